#pragma once
// Packed 4-bit weights times one row of activations, on the integer tensor cores; for the programs (program/).
//
// x becomes 16-bit fixed point with one factor a group of 64 inputs: x = factor (256 high + low), both signed bytes, to
// 2^-16 of the group's largest element (fp16 has 2^-12 of each). The codes need no conversion: a word of eight becomes
// two operand registers by one AND each, the second of which is 16 times its codes. The sums are exact.
//
// One row would use one of the eight columns of m16n8k32. Instead a warp takes a unit of work, four groups of one tile,
// and group g has columns 2 g (high) and 2 g + 1 (low); B is zero elsewhere. So all products of the unit add up in one
// accumulator, and lane 4 r + q finds both sums of group q for fragment rows r and r + 8.
//
// An RMSNorm's factor belongs to the whole row, so it is applied to the outputs: staging does not wait for it.
#include "backend/cuda/layout.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {

// In shared memory: [chunk][lane] 16-byte operands, then the groups' factors.
struct FixedRow {
  uint4* operands;
  float* factors;

  __host__ __device__ static constexpr size_t bytes(int groups) {
    return static_cast<size_t>(groups) * (128 + sizeof(float));
  }
  __device__ FixedRow(void* memory, int groups)
      : operands(static_cast<uint4*>(memory)), factors(reinterpret_cast<float*>(operands + groups * 8)) {}
};

// The four inputs k, k + 1, k + 8 and k + 9 of a thread.
struct FixedInputs {
  float2 low, high;
  __device__ float squares() const { return low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y; }
};
// k of this thread, where a thread stages four inputs.
__device__ __forceinline__ int fixed_input() {
  const int tid = static_cast<int>(threadIdx.x);
  return tid / 4 * 16 + tid % 4 * 2;
}

// NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// A thread's inputs times `inverse` as whole numbers of 16 bits: their high bytes, and their low ones, in the operands' order.
inline constexpr float kLargestFixed = 127 * 256;
__device__ __forceinline__ void split_fixed(const FixedInputs& v, float inverse, uint32_t& high, uint32_t& low) {
  // Adding 1.5 x 2^23 leaves the rounded number in the low bits; 128 more makes its second byte `high` and its first
  // `low` + 128. A group of zeros becomes some finite bytes with factor 0.
  constexpr float kInteger = 12582912.0f + 128.0f;
  const uint32_t n0 = __float_as_uint(fmaf(v.low.x, inverse, kInteger));
  const uint32_t n1 = __float_as_uint(fmaf(v.high.x, inverse, kInteger));
  const uint32_t n2 = __float_as_uint(fmaf(v.low.y, inverse, kInteger));
  const uint32_t n3 = __float_as_uint(fmaf(v.high.y, inverse, kInteger));
  const uint32_t n01 = __byte_perm(n0, n1, 0x5140), n23 = __byte_perm(n2, n3, 0x5140);
  high = __byte_perm(n01, n23, 0x7632);
  low = __byte_perm(n01, n23, 0x5410) ^ 0x80808080u;
}

// Stores the four inputs of place `place` (thread `place`'s, see fixed_input); sixteen neighbouring lanes hold one group. All
// lanes of a warp call it.
__device__ __forceinline__ void store_four(const FixedRow& to, int place, const FixedInputs& v) {
  float top = max_or_nan(max_or_nan(fabsf(v.low.x), fabsf(v.low.y)), max_or_nan(fabsf(v.high.x), fabsf(v.high.y)));
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) top = max_or_nan(top, __shfl_xor_sync(0xffffffffu, top, offset));
  uint32_t high, low;
  split_fixed(v, __fdividef(kLargestFixed, top), high, low);
  auto* words = reinterpret_cast<uint32_t*>(to.operands) + place / 16 * 32 + place % 4 * 4 + place / 4 % 4;
  words[0] = high;
  words[16] = low;
  if (place % 16 == 0) to.factors[place / 16] = top * (1 / kLargestFixed);
}
// c[16][8] += a[16][32] b[32][8], a unsigned, b signed bytes. Lane l = 4 r + q: a = rows r, r + 8 at four k, then the same
// of the second half; b = column r; c as in mma_f16.
__device__ __forceinline__ void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A chunk of the row as a warp's operands.
struct FixedChunk {
  uint32_t b[kChunkGroups][4];
  float factor, sum;  // of group q: x = factor * integer; and the sum of x

  __device__ __forceinline__ FixedChunk(const FixedRow& x, int chunk) {
    const int lane = static_cast<int>(threadIdx.x % 32), q = lane % 4;
    const uint4 v = x.operands[chunk * 32 + lane];
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      const bool mine = lane / 8 == g;
      b[g][0] = mine ? v.x : 0, b[g][1] = mine ? v.y : 0, b[g][2] = mine ? v.z : 0, b[g][3] = mine ? v.w : 0;
    }
    constexpr int kOnes = 0x01010101;
    int s = __dp4a(static_cast<int>(v.x), kOnes, __dp4a(static_cast<int>(v.y), kOnes, 0)) +
            __dp4a(static_cast<int>(v.z), kOnes, __dp4a(static_cast<int>(v.w), kOnes, 0));
    s += __shfl_xor_sync(0xffffffffu, s, 1);
    s += __shfl_xor_sync(0xffffffffu, s, 2);
    const int high = __shfl_sync(0xffffffffu, s, 8 * q), low = __shfl_sync(0xffffffffu, s, 8 * q + 4);
    factor = x.factors[chunk * kChunkGroups + q];
    sum = factor * static_cast<float>(high * 256 + low);
  }
};

// The codes and scales of a unit, from shared memory: `codes` and `scales` point to its first group.
struct FixedUnit {
  uint4 words[kChunkGroups];
  uint2 scale;  // of group q
  __device__ __forceinline__ void load(const std::byte* codes, const std::byte* scales) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) words[g] = reinterpret_cast<const uint4*>(codes)[g * 32 + lane];
    scale = reinterpret_cast<const uint2*>(scales)[lane % 4 * 8 + lane / 4];
  }
};

// A unit's product in two steps, so that the next unit's first can run under this one's second: the integer sums of group
// q for fragment rows r (x) and r + 8 (y, times 16) ...
__device__ __forceinline__ int2 multiply_fixed(const FixedUnit& w, const FixedChunk& x) {
  constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
  int even[4] = {}, odd[4] = {};
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const uint4 v = w.words[g];
    mma_u8s8(even, v.x & kLow, v.x & kHigh, v.y & kLow, v.y & kHigh, x.b[g][0], x.b[g][1]);
    mma_u8s8(odd, v.z & kLow, v.z & kHigh, v.w & kLow, v.w & kHigh, x.b[g][2], x.b[g][3]);
  }
  return make_int2((even[0] + odd[0]) * 256 + even[1] + odd[1], (even[2] + odd[2]) * 256 + even[3] + odd[3]);
}
// ... and the rows' sums over the four groups, in every lane of a quad.
__device__ __forceinline__ float2 scale_fixed(int2 sums, uint2 scale, const FixedChunk& x) {
  float low = low_bf16(scale.x) * (static_cast<float>(sums.x) * x.factor) + high_bf16(scale.x) * x.sum;
  float high = low_bf16(scale.y) * (static_cast<float>(sums.y) * (x.factor * 0.0625f)) + high_bf16(scale.y) * x.sum;
  low += __shfl_xor_sync(0xffffffffu, low, 1);
  high += __shfl_xor_sync(0xffffffffu, high, 1);
  low += __shfl_xor_sync(0xffffffffu, low, 2);
  high += __shfl_xor_sync(0xffffffffu, high, 2);
  return make_float2(low, high);
}

// Units' sums lie as [tile][chunk][16 outputs].
__device__ __forceinline__ void store_fixed_unit(float* to, float2 sums) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane % 4 == 0) *reinterpret_cast<float2*>(to + lane / 4 * 2) = sums;
}
template <int kChunks>
__device__ __forceinline__ float sum_fixed_units(const float* tile, int output) {
  float total = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) total += tile[c * kTileRows + output];
  return total;
}

// 1 / RMS of the row from the warps' sums of squares.
template <int kWarps>
__device__ __forceinline__ float fixed_norm(const float* squares, int k, float eps) {
  float total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += squares[i];
  return rsqrtf(total / static_cast<float>(k) + eps);
}

}  // namespace calla::cuda
