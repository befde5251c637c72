#pragma once
// Weights without a checkpoint, for benchmarks of the real shape: every matrix has its sizes but no host memory, which
// DeviceWeights takes as "fill with random numbers on the device"; small vectors are random on the host.
#include "backend/weights.h"
#include "model/shape.h"

namespace calla::cuda {

ModelWeights synthetic_weights(const ModelShape& shape);

}  // namespace calla::cuda
