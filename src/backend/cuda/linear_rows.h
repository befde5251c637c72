#pragma once
// Projections of 2..32 rows on Hopper: gemv_stream() of linear_stream.h with the weights read once for all rows.
#include "backend/cuda/linear_decode.h"

namespace calla::cuda {

inline constexpr int kMaxLinearRows = 32;

// True if the matrix has a shape that the kernel takes, and its tiles and at least eight rows fit in shared memory.
bool linear_rows_fit(const DeviceInfo& device, const PackedView& w, int rows);
// out[row][column] (row stride `out_stride`) = or += w x. Columns >= `columns` are not written.
void linear_rows(const Launch& launch, const PackedView& w, const __half* x, size_t x_stride, int rows, float* out,
                 size_t out_stride, int columns, bool add);

}  // namespace calla::cuda
