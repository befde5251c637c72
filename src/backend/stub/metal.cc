// This build has no Metal backend.
#include "backend/create.h"
#include "base/error.h"

namespace calla {

BackendInfo metal_backend_info() {
  BackendInfo info{"metal", "Apple silicon GPUs", false,
                   "this build has no Metal backend; configure with -DCALLA_METAL=ON"};
  info.built = false;
  return info;
}

std::unique_ptr<Backend> create_metal_backend(const ModelShape&, const ModelWeights&, const BackendOptions&) {
  throw DeviceError(metal_backend_info().reason);
}

}  // namespace calla
