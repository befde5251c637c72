// This build has no cpu backend.
#include "backend/create.h"
#include "base/error.h"

namespace calla {

BackendInfo cpu_backend_info() {
  return {"cpu", "any machine: AVX2, AVX-512, NEON", false, "this build has no cpu backend"};
}

std::unique_ptr<Backend> create_cpu_backend(const ModelShape&, const ModelWeights&, const BackendOptions&) {
  throw DeviceError(cpu_backend_info().reason);
}

}  // namespace calla
