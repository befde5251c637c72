#pragma once
// Products of packed weights with up to eight rows of fp16 activations that lie as they are: a column of the tensor cores'
// product reads its row directly, wherever that is, so that nothing has to be staged in the operand's order.
#include "backend/cuda/stream.cuh"

namespace calla::cuda {

inline constexpr int kColumns = 8;
inline constexpr int kChunkInputs = kChunkGroups * kGroup;
// Added to the rows in shared memory, in halves: then the eight rows that a warp reads start in different banks.
inline constexpr int kRowPad = 8;

// B operands of a chunk: registers 2 j and 2 j + 1 of step j of group g; and the groups' sums of columns 2 q and 2 q + 1,
// by which the codes' offset leaves: a product with ones, which lands where the lane needs it.
struct ColumnsOfChunk {
  uint32_t b[kChunkGroups][8];
  float2 sum[kChunkGroups];

  // `row` is the row of this lane's column (lane / 4), as pairs.
  __device__ __forceinline__ void load(const uint32_t* row, int chunk) {
    const uint32_t* from = row + chunk * (kChunkInputs / 2) + threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < kChunkGroups * 8; ++k) b[k / 8][k % 8] = from[k * 4];
    constexpr uint32_t kOnes[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      float s[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_f16(s, kOnes, b[g][2 * j], b[g][2 * j + 1]);
      sum[g] = make_float2(s[0], s[1]);
    }
  }
};

// acc += a tile's chunk times eight columns; acc in the layout of the C operand.
template <int kBits>
__device__ __forceinline__ void multiply_columns(float (&acc)[4], const uint4* codes, const uint2* scales,
                                                 const ColumnsOfChunk& x) {
  constexpr float kHighFactor = kBits == 4 ? 0.0625f : 1.0f;
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const GroupWeights<kBits> w(codes + g * (32 * kBits / 4));
    const uint2 scale = scales[g * 8 + threadIdx.x % 32 / 4];
    float c[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[4];
      w.step(j, a);
      mma_f16(c, a, x.b[g][2 * j], x.b[g][2 * j + 1]);
    }
    const float low = low_bf16(scale.x), low_bias = fmaf(-1024.0f, low, high_bf16(scale.x));
    const float high = kHighFactor * low_bf16(scale.y), high_bias = fmaf(-1024.0f, high, high_bf16(scale.y));
    acc[0] += low * c[0] + low_bias * x.sum[g].x;
    acc[1] += low * c[1] + low_bias * x.sum[g].y;
    acc[2] += high * c[2] + high_bias * x.sum[g].x;
    acc[3] += high * c[3] + high_bias * x.sum[g].y;
  }
}

}  // namespace calla::cuda
