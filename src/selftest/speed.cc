#include "selftest/speed.h"

namespace calla {

double predicted_decode_rate(const std::string& backend, const ModelShape& shape, double bytes, double bandwidth) {
  constexpr double kReached = 0.85, kDispatchSeconds = 2.5e-6;
  // Seven dispatches a layer, one more for an attention layer with several key ranges, and the four at the ends.
  const int dispatches = backend == "metal" ? 7 * shape.layers() + shape.attention_layers() + 4 : 0;
  return 1 / (bytes / (kReached * bandwidth) + dispatches * kDispatchSeconds);
}

}  // namespace calla
