#pragma once
// Projections of one row on Hopper: gemv() of linear_decode.h for matrices of which a block can hold its whole share.
#include "backend/cuda/linear_decode.h"

namespace calla::cuda {

// True if the blocks' shares fit, beside a block of another kernel.
bool resident_fits(const DeviceInfo& device, const PackedView& w);
void gemv_resident(const Launch& launch, const PackedView& w, const GemvInput& in, float* out, int columns, bool add);

}  // namespace calla::cuda
