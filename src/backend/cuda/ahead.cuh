#pragma once
// Weights that a later kernel will read, brought into L2 while this one computes: a decode step is a chain of short kernels,
// and memory would idle at each one's beginning and end.
#include "backend/cuda/launch.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {

// Every block asks for its share. Called by all threads once this kernel's own loads are on their way.
__device__ __forceinline__ void prefetch_ahead(const Ahead& ahead) {
  constexpr uint32_t kPiece = 2048;
  const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
#pragma unroll
  for (int r = 0; r < Ahead::kRanges; ++r) {
    const uint32_t pieces = ahead.bytes[r] / kPiece;
    for (uint32_t i = block + blocks * threadIdx.x; i < pieces; i += blocks * blockDim.x)
      prefetch_l2(ahead.data[r] + static_cast<size_t>(i) * kPiece, kPiece);
  }
}

}  // namespace calla::cuda
