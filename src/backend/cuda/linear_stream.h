#pragma once
// Projections of one to eight rows on Hopper: gemv() of linear_decode.h, with weights streamed through shared memory.
#include "backend/cuda/linear_decode.h"

namespace calla::cuda {

// Several rows must be fp16 already (norm_rows); one row can be normed on the way.
// True if the staged rows and at least two tiles fit in shared memory.
bool stream_fits(const DeviceInfo& device, const PackedView& w, int rows);
void gemv_stream(const Launch& launch, const PackedView& w, const GemvInput& in, int rows, float* out,
                 size_t out_stride, int columns, bool add);

}  // namespace calla::cuda
