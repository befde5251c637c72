#pragma once
// The parts of the decode kernels that multiply packed weights with one to eight rows of activations.
//
// A warp takes 16-row tiles and chunks of four quantisation groups. Weights are the A operand of mma.m16n8k16, made
// from the codes with one AND-OR a half2: the value is 1024 + code (or 1024 + 16 code), exact in fp16, and the offset
// leaves through the group's sum of x: sum w x = s (c - 1024 S) + b S with c the tensor core's fp32 sum and S = sum x.
// So a weight costs 0.8 instructions, and one row of activations costs as much as eight.
//
// x is staged once a block in shared memory in the order of the B operand, with the sums S beside it.
#include "backend/cuda/layout.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {

inline constexpr int kGemvWarps = 8;
inline constexpr int kGemvThreads = kGemvWarps * 32;

// x of kCols rows as B operands: [group][half][col][q] 16-byte pieces; then sums [group][kCols].
template <int kCols>
struct StagedInput {
  uint4* pieces;
  float* sums;

  __host__ __device__ static size_t bytes(int groups) { return static_cast<size_t>(groups) * kCols * (128 + 4); }
  __device__ StagedInput(void* memory, int groups)
      : pieces(static_cast<uint4*>(memory)),
        sums(reinterpret_cast<float*>(static_cast<uint4*>(memory) + static_cast<size_t>(groups) * 8 * kCols)) {}

  // Stores inputs [8 c, 8 c + 8) of a column. All 32 lanes of a warp call it with consecutive c, so that eight
  // neighbours hold one group; lanes past the end pass valid = false. Groups that only pad K are stored as zeros.
  __device__ void store(int c, int col, const float (&v)[8], bool valid) const {
    float sum = 0;
    uint32_t h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      h[i] = pack_half2(v[2 * i], v[2 * i + 1]);
      const float2 rounded = unpack_half2(h[i]);
      sum += rounded.x + rounded.y;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if (!valid) return;
    const int group = c / 8, step = c % 8 / 2, upper = c % 2;
    auto* words = reinterpret_cast<uint32_t*>(pieces + ((group * 2 + step / 2) * kCols + col) * 4);
#pragma unroll
    for (int q = 0; q < 4; ++q) words[q * 4 + (step % 2) * 2 + upper] = h[q];
    if (c % 8 == 0) sums[group * kCols + col] = sum;
  }

  // The B operands of a group's four steps: registers 2 j and 2 j + 1.
  __device__ void load(int group, uint32_t (&b)[8]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (kCols == 8 || lane < 4) {
      const uint4 low = pieces[(group * 2) * kCols * 4 + lane], high = pieces[(group * 2 + 1) * kCols * 4 + lane];
      b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w;
      b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) b[i] = 0;
    }
  }
};

__device__ __forceinline__ void load_row8(const float* x, float (&v)[8]) {
  const float4 a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_row8(const __half* x, float (&v)[8]) {
  const uint4 a = *reinterpret_cast<const uint4*>(x);
  const float2 f0 = unpack_half2(a.x), f1 = unpack_half2(a.y), f2 = unpack_half2(a.z), f3 = unpack_half2(a.w);
  v[0] = f0.x, v[1] = f0.y, v[2] = f1.x, v[3] = f1.y, v[4] = f2.x, v[5] = f2.y, v[6] = f3.x, v[7] = f3.y;
}
__device__ __forceinline__ void zero(float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 0;
}
__device__ __forceinline__ float sum_of_squares(const float (&v)[8]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
  return sum;
}
__device__ __forceinline__ void scale_by(float (&v)[8], float scale, const float* weight) {
  float w[8];
  load_row8(weight, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= scale * w[i];
}

// Stages one row, all warps of the block together. kNormed: RMSNorm on the way. No barrier at the end.
template <bool kNormed, int kCols, class T>
__device__ void stage_row(StagedInput<kCols> to, int col, const T* x, int k, const float* norm, float eps,
                          float* scratch, __half* normed_out) {
  const int tid = static_cast<int>(threadIdx.x), pieces = k / 8;
  const int padded = (pieces + 8 * kChunkGroups - 1) / (8 * kChunkGroups) * (8 * kChunkGroups);
  float first[8] = {};
  float scale = 1;
  if (tid < pieces) load_row8(x + tid * 8, first);
  if constexpr (kNormed) {
    float sum = sum_of_squares(first);
    for (int c = tid + kGemvThreads; c < pieces; c += kGemvThreads) {
      float v[8];
      load_row8(x + c * 8, v);
      sum += sum_of_squares(v);
    }
    scale = rsqrtf(sum_block<kGemvWarps>(sum, scratch) / static_cast<float>(k) + eps);
  }
  for (int base = 0; base < padded; base += kGemvThreads) {
    const int c = base + tid;
    const bool valid = c < pieces;
    if (base > 0) {
      if (valid) {
        load_row8(x + c * 8, first);
      } else {
        zero(first);
      }
    }
    if constexpr (kNormed) {
      if (valid) scale_by(first, scale, norm + c * 8);
    }
    to.store(c, col, first, c < padded);
    if (normed_out != nullptr && valid)
      *reinterpret_cast<uint4*>(normed_out + c * 8) =
          make_uint4(pack_half2(first[0], first[1]), pack_half2(first[2], first[3]), pack_half2(first[4], first[5]),
                     pack_half2(first[6], first[7]));
  }
}

// Stages up to eight rows, one a warp.
template <bool kNormed, class T>
__device__ void stage_row_by_warp(StagedInput<8> to, int col, const T* x, int k, const float* norm, float eps,
                                  __half* normed_out) {
  const int lane = static_cast<int>(threadIdx.x % 32), pieces = k / 8;
  float scale = 1;
  if constexpr (kNormed) {
    float sum = 0;
    for (int c = lane; c < pieces; c += 32) {
      float v[8];
      load_row8(x + c * 8, v);
      sum += sum_of_squares(v);
    }
    scale = rsqrtf(sum_lanes(sum) / static_cast<float>(k) + eps);
  }
  const int padded = (pieces + 8 * kChunkGroups - 1) / (8 * kChunkGroups) * (8 * kChunkGroups);
  for (int base = 0; base < padded; base += 32) {
    const int c = base + lane;
    const bool valid = c < pieces;
    float v[8] = {};
    if (valid) {
      load_row8(x + c * 8, v);
      if constexpr (kNormed) scale_by(v, scale, norm + c * 8);
    }
    to.store(c, col, v, c < padded);
    if (normed_out != nullptr && valid)
      *reinterpret_cast<uint4*>(normed_out + c * 8) =
          make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]), pack_half2(v[6], v[7]));
  }
}

// The weights of kTiles tiles at one chunk of groups, in registers.
template <int kBits, int kTiles>
struct WeightChunk {
  uint4 codes[kTiles][kChunkGroups * kBits / 4];
  uint2 scales[kTiles];  // lane q of a quad holds group q of the chunk

  // Tiles [tile, tile + kTiles). A tile past the last reads the last one again.
  __device__ __forceinline__ void load(const PackedView& w, int tile, int chunk) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const size_t at =
          static_cast<size_t>(min(tile + t, w.tiles - 1)) * w.padded_groups + static_cast<size_t>(chunk * kChunkGroups);
      const uint4* from = w.codes + at * (32 * kBits / 4) + lane;
#pragma unroll
      for (int i = 0; i < kChunkGroups * kBits / 4; ++i) codes[t][i] = load_stream(from + i * 32);
      scales[t] = load_stream(w.scales + at * 8 + (lane % 4) * 8 + lane / 4);
    }
  }
};

// The A operand of one k16 step from its word(s) of codes.
__device__ __forceinline__ uint32_t and_or(uint32_t word, uint32_t mask) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, 0x64006400, 0xea;" : "=r"(r) : "r"(word), "r"(mask));
  return r;
}
__device__ __forceinline__ void expand_step(uint32_t word, uint32_t (&a)[4]) {
  const uint32_t upper = word >> 8;
  a[0] = and_or(word, 0x000f000fu);
  a[1] = and_or(word, 0x00f000f0u);
  a[2] = and_or(upper, 0x000f000fu);
  a[3] = and_or(upper, 0x00f000f0u);
}
__device__ __forceinline__ void expand_step(uint32_t word, uint32_t next, uint32_t (&a)[4]) {
  a[0] = __byte_perm(word, 0x64646464u, 0x4140);
  a[1] = __byte_perm(word, 0x64646464u, 0x4342);
  a[2] = __byte_perm(next, 0x64646464u, 0x4140);
  a[3] = __byte_perm(next, 0x64646464u, 0x4342);
}

// acc[t] += the chunk's tiles times the staged columns, in the layout of the C operand.
template <int kBits, int kTiles, int kCols>
__device__ __forceinline__ void multiply_chunk(float (&acc)[kTiles][4], const WeightChunk<kBits, kTiles>& w,
                                               StagedInput<kCols> x, int chunk) {
  const int lane = static_cast<int>(threadIdx.x % 32), q = lane % 4;
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const int group = chunk * kChunkGroups + g;
    uint32_t b[8];
    x.load(group, b);
    float2 sum;
    if constexpr (kCols == 8) {
      sum = *reinterpret_cast<const float2*>(x.sums + group * kCols + 2 * q);
    } else {
      sum = make_float2(x.sums[group], 0);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float c[4] = {};
      uint32_t a[4];
      if constexpr (kBits == 4) {
        const uint4 v = w.codes[t][g];
        expand_step(v.x, a), mma_f16(c, a, b[0], b[1]);
        expand_step(v.y, a), mma_f16(c, a, b[2], b[3]);
        expand_step(v.z, a), mma_f16(c, a, b[4], b[5]);
        expand_step(v.w, a), mma_f16(c, a, b[6], b[7]);
      } else {
        const uint4 v = w.codes[t][2 * g], u = w.codes[t][2 * g + 1];
        expand_step(v.x, v.y, a), mma_f16(c, a, b[0], b[1]);
        expand_step(v.z, v.w, a), mma_f16(c, a, b[2], b[3]);
        expand_step(u.x, u.y, a), mma_f16(c, a, b[4], b[5]);
        expand_step(u.z, u.w, a), mma_f16(c, a, b[6], b[7]);
      }
      const int source = (lane & ~3) | g;
      const uint32_t low = __shfl_sync(0xffffffffu, w.scales[t].x, source);
      const uint32_t high = __shfl_sync(0xffffffffu, w.scales[t].y, source);
      const float scale_low = low_bf16(low), offset_low = fmaf(-1024.0f, scale_low, high_bf16(low));
      const float scale_high = kBits == 4 ? low_bf16(high) * 0.0625f : low_bf16(high);
      const float offset_high = fmaf(-1024.0f, scale_high, high_bf16(high));
      acc[t][0] += scale_low * c[0] + offset_low * sum.x;
      acc[t][2] += scale_high * c[2] + offset_high * sum.x;
      if constexpr (kCols == 8) {
        acc[t][1] += scale_low * c[1] + offset_low * sum.y;
        acc[t][3] += scale_high * c[3] + offset_high * sum.y;
      }
    }
  }
}

// The warps' partial sums meet in shared memory: [warp][tile][fragment pair][col], pairs (r, r + 8) adjacent.
template <int kTiles, int kCols>
__device__ __forceinline__ void store_partial(float* to, const float (&acc)[kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32), r = lane / 4, q = lane % 4;
  float* mine = to + (threadIdx.x / 32) * kTiles * kTileRows * kCols;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float* tile = mine + t * kTileRows * kCols;
    if constexpr (kCols == 8) {
      *reinterpret_cast<float2*>(tile + (2 * r) * 8 + 2 * q) = make_float2(acc[t][0], acc[t][1]);
      *reinterpret_cast<float2*>(tile + (2 * r + 1) * 8 + 2 * q) = make_float2(acc[t][2], acc[t][3]);
    } else if (q == 0) {
      *reinterpret_cast<float2*>(tile + 2 * r) = make_float2(acc[t][0], acc[t][2]);
    }
  }
}

// The total of output `i` (tile * 16 + row in tile) and column `col`.
template <int kTiles, int kCols>
__device__ __forceinline__ float sum_partials(const float* from, int i, int col) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < kGemvWarps; ++w) total += from[(w * kTiles * kTileRows + i) * kCols + col];
  return total;
}

// The block's share of one set of tiles: warps split K, the totals land in `partials` after the caller's barrier.
template <int kBits, int kTiles, int kChunks, int kCols>
struct BlockProduct {
  WeightChunk<kBits, kTiles> ahead[kChunks];

  // Loads the first kChunks chunks of this warp; needs no activations.
  __device__ __forceinline__ void prefetch(const PackedView& w, int tile) {
    const int warp = static_cast<int>(threadIdx.x / 32), chunks = w.padded_groups / kChunkGroups;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (warp + i * kGemvWarps < chunks) ahead[i].load(w, tile, warp + i * kGemvWarps);
  }
  __device__ __forceinline__ void multiply(const PackedView& w, int tile, StagedInput<kCols> x, float* partials) {
    float acc[kTiles][4] = {};
    const int warp = static_cast<int>(threadIdx.x / 32), chunks = w.padded_groups / kChunkGroups;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (warp + i * kGemvWarps < chunks) multiply_chunk(acc, ahead[i], x, warp + i * kGemvWarps);
#pragma unroll 1
    for (int chunk = warp + kChunks * kGemvWarps; chunk < chunks; chunk += kGemvWarps) {
      ahead[0].load(w, tile, chunk);
      multiply_chunk(acc, ahead[0], x, chunk);
    }
    store_partial<kTiles, kCols>(partials, acc);
  }
};

}  // namespace calla::cuda
