#include "selftest/speed.h"

namespace calla {

double predicted_decode_rate(const std::string& backend, const ModelShape& shape, double bytes, double bandwidth) {
  constexpr double kReached = 0.85, kDispatchSeconds = 2.5e-6, kCudaLayerSeconds = 10e-6;
  double waits = 0;
  if (backend == "metal") {
    // Seven dispatches a layer, one more for an attention layer with several key ranges, and the four at the ends.
    waits = (7 * shape.layers() + shape.attention_layers() + 4) * kDispatchSeconds;
  } else if (backend == "cuda") {
    waits = shape.layers() * kCudaLayerSeconds;
  }
  return 1 / (bytes / (kReached * bandwidth) + waits);
}

}  // namespace calla
