#pragma once
// Projections of one to eight rows (decode): y = W x, or y += W x, with RMSNorm of x folded in.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

inline constexpr int kMaxGemvRows = 8;

struct GemvInput {
  const float* residual = nullptr;  // with `norm`: RMSNorm is applied while reading
  const float* norm = nullptr;
  float eps = 0;
  __half* normed_out = nullptr;     // if set, the normed rows are also written here [row][k]
  const __half* half = nullptr;     // or fp16 rows, read as they are
  size_t stride = 0;                // between rows
  const StepHead* heads = nullptr;  // if set, row i is heads[i].row
};

// out[row][column] (row stride `out_stride`) = or += w x. Columns >= `columns` are not written.
void gemv(const Launch& launch, const PackedView& w, const GemvInput& in, int rows, float* out, size_t out_stride,
          int columns, bool add);

}  // namespace calla::cuda
