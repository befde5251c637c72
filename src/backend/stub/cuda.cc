// This build has no CUDA backend.
#include "backend/create.h"
#include "base/error.h"

namespace calla {

BackendInfo cuda_backend_info() {
  BackendInfo info{"cuda", "NVIDIA GPUs (Hopper first)", false,
                   "this build has no CUDA backend; `make cuda` makes one (docs/cuda.md): build/cuda/calla"};
  info.built = false;
  return info;
}

std::unique_ptr<Backend> create_cuda_backend(const ModelShape&, const ModelWeights&, const BackendOptions&) {
  throw DeviceError(cuda_backend_info().reason);
}

}  // namespace calla
