// This build has no cpu backend.
#include "backend/create.h"
#include "base/error.h"

namespace calla {

BackendInfo cpu_backend_info() {
  BackendInfo info{"cpu", "any machine: AVX2, AVX-512, NEON", false, "this build has no cpu backend"};
  info.built = false;
  return info;
}

std::unique_ptr<Backend> create_cpu_backend(const ModelShape&, const ModelWeights&, const BackendOptions&) {
  throw DeviceError(cpu_backend_info().reason);
}

}  // namespace calla
