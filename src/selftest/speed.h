#pragma once
// What decoding may cost on a machine, from counted bytes and a measured bandwidth. Predictions, always called so.
#include <string>

#include "backend/weights.h"
#include "model/shape.h"

namespace calla {

// Tokens/s at which `bytes` a token come from memory of `bandwidth` bytes/s, if nothing else takes time.
inline double decode_limit(double bytes, double bandwidth) { return bandwidth / bytes; }

// What to expect of a backend: 85 % of the bandwidth; on metal 2.5 us more for each dependent dispatch (docs/metal.md), on cuda 10
// us for the steps of each layer that wait for each other (an H200's, docs/performance-notes/cuda.md: within 7 % from 256 to 128K).
double predicted_decode_rate(const std::string& backend, const ModelShape& shape, double bytes, double bandwidth);

}  // namespace calla
