// This build has no CUDA backend.
#include "backend/create.h"
#include "base/error.h"

namespace calla {

BackendInfo cuda_backend_info() {
  return {"cuda", "NVIDIA GPUs (Hopper first)", false,
          "this build has no CUDA backend; configure with -DCALLA_CUDA=ON"};
}

std::unique_ptr<Backend> create_cuda_backend(const ModelShape&, const ModelWeights&, const BackendOptions&) {
  throw DeviceError(cuda_backend_info().reason);
}

}  // namespace calla
