#pragma once
// affine_gemm: y[row][n] = sum_k w[n][k] x[row][k] with 4- or 8-bit weights, dense or grouped by expert.
//   Matrix    y^T = W x^T on wgmma m64nNk16: weights are the A operand and come from registers, where they are expanded
//             (the packed layout is wgmma's operand order), so the expanded weights never touch any memory; rows of x are
//             the n side, straight from shared memory.
//   Launch    grid (outputs / block rows, row tiles), 128 threads a warpgroup. Tiles have 32, 64, 96 or 128 rows of x,
//             chosen by how many rows the tile has (tile by load).
//   Pipeline  cp.async into kStages stages of 64 k: x gathered row by row with the 128-byte swizzle, codes and scales as
//             they are. The next stage's weights are expanded while the tensor cores work on this one.
//   Numerics  codes to fp16 exactly, w = scale * code + bias rounded to fp16, x fp16, sums fp32.
//   Bound     by the tensor cores from about 100 rows an expert on, below by reading the weights.
#include <algorithm>

#include "backend/cuda/gemm.h"
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/wgmma.cuh"
#include "model/shape.h"

namespace calla::cuda {

inline constexpr int kGemmStages = 5;
inline constexpr int kMaxTileRows = 128;

template <int kBits, int kGroups, int kBlocks>
struct GemmConfig {
  static constexpr int kThreads = kGroups * 128;
  static constexpr int kTiles = kGroups * kBlocks * 4;  // 16-row weight tiles of a block; kBlocks x 64 rows a warpgroup
  static constexpr int kCodeBytes = kTiles * 512 * kBits / 4;
  static constexpr int kScaleBytes = kTiles * 64;
  __host__ __device__ static constexpr int stage_bytes(int tile_rows) {
    return (tile_rows * 128 + kCodeBytes + kScaleBytes + 1023) / 1024 * 1024;
  }
};

__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }
__device__ __forceinline__ uint32_t as_bits(__half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }

struct HalfScales {
  __half2 scale_low, bias_low, scale_high, bias_high;
  __device__ explicit HalfScales(uint2 v)
      : scale_low(__float2half2_rn(low_bf16(v.x))),
        bias_low(__float2half2_rn(high_bf16(v.x))),
        scale_high(__float2half2_rn(low_bf16(v.y))),
        bias_high(__float2half2_rn(high_bf16(v.y))) {}
};

// The operand registers of a step (1024 + code, or 1024 + 16 code) to weights.
template <int kBits>
__device__ __forceinline__ void apply_scales(uint32_t (&a)[4], const HalfScales& s) {
  const __half2 offset = __float2half2_rn(1024.0f);
  a[0] = as_bits(__hfma2(__hsub2(as_half2(a[0]), offset), s.scale_low, s.bias_low));
  a[2] = as_bits(__hfma2(__hsub2(as_half2(a[2]), offset), s.scale_low, s.bias_low));
  if constexpr (kBits == 4) {
    const __half2 sixteenth = __float2half2_rn(0.0625f), shift = __float2half2_rn(-64.0f);
    a[1] = as_bits(__hfma2(__hfma2(as_half2(a[1]), sixteenth, shift), s.scale_high, s.bias_high));
    a[3] = as_bits(__hfma2(__hfma2(as_half2(a[3]), sixteenth, shift), s.scale_high, s.bias_high));
  } else {
    a[1] = as_bits(__hfma2(__hsub2(as_half2(a[1]), offset), s.scale_high, s.bias_high));
    a[3] = as_bits(__hfma2(__hsub2(as_half2(a[3]), offset), s.scale_high, s.bias_high));
  }
}

// A 16 x 64 tile's four steps.
template <int kBits>
__device__ __forceinline__ void expand_tile(const std::byte* codes, const std::byte* scales, int tile,
                                            uint32_t (&a)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const HalfScales s(*reinterpret_cast<const uint2*>(scales + tile * 64 + lane / 4 * 8));
  const auto* from = reinterpret_cast<const uint4*>(codes) + tile * (32 * kBits / 4) + lane;
  const uint4 v = from[0];
  if constexpr (kBits == 4) {
    expand_step(v.x, a[0]), expand_step(v.y, a[1]), expand_step(v.z, a[2]), expand_step(v.w, a[3]);
  } else {
    const uint4 u = from[32];
    expand_step(v.x, v.y, a[0]), expand_step(v.z, v.w, a[1]);
    expand_step(u.x, u.y, a[2]), expand_step(u.z, u.w, a[3]);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) apply_scales<kBits>(a[j], s);
}

// Where a row of the product reads x and writes its output, in elements.
struct GemmRow {
  uint32_t x;
  uint32_t out;
};
inline constexpr uint32_t kNoRow = 0xffffffffu;

template <GemmOutput kOutput>
__device__ __forceinline__ void write_pair(const GemmParams& p, size_t at, int tile, int r, float low, float high) {
  if constexpr (kOutput == GemmOutput::kSwiglu) {
    const int unit = tile * 8 + r;
    if (unit < p.columns) static_cast<__half*>(p.out)[at + unit] = __float2half_rn(silu(low) * high * kHiddenScale);
  } else {
    const int n = tile * kTileRows + 2 * r;
    if (n >= p.columns) return;
    if constexpr (kOutput == GemmOutput::kBf16) {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + n) = pack_bf162(low, high);
    } else {
      auto* to = reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + n);
      if constexpr (kOutput == GemmOutput::kAdd) {
        const float2 old = *to;
        low += old.x;
        high += old.y;
      }
      *to = make_float2(low, high);
    }
  }
}

template <class C, int kBits, int kBlocks, int kTileRowsX, GemmOutput kOutput>
__device__ __forceinline__ void multiply_tile(const GemmParams& p, const PackedView& w, std::byte* shared,
                                              const GemmRow* rows, int count) {
  constexpr int kStageBytes = C::stage_bytes(kTileRowsX);
  const int tid = static_cast<int>(threadIdx.x), warpgroup = tid / 128, warp = tid / 32 % 4, lane = tid % 32;
  const int first_tile = static_cast<int>(blockIdx.x) * C::kTiles;
  const uint32_t base = shared_address(shared);

  // What this thread copies of each stage, worked out once: pieces of x rows, of codes, of scales.
  constexpr int kRowStep = C::kThreads / 8, kRowPasses = (kTileRowsX + kRowStep - 1) / kRowStep;
  constexpr int kPieces = 32 * kBits / 4;  // 16-byte pieces of a tile's codes
  constexpr int kCodePasses = C::kTiles * kPieces / C::kThreads;
  static_assert(C::kTiles * kPieces % C::kThreads == 0 && kRowStep % 8 == 0);
  const int row0 = tid / 8, piece = tid % 8;
  const uint32_t row_to = static_cast<uint32_t>(row0 * 128 + (piece ^ (row0 % 8)) * 16);
  uint32_t x_from[kRowPasses];
#pragma unroll
  for (int n = 0; n < kRowPasses; ++n) {
    const int row = row0 + n * kRowStep;
    x_from[n] = row < count ? rows[row].x + static_cast<uint32_t>(piece * 8) : kNoRow;
  }
  const auto tile_at = [&](int i) { return static_cast<size_t>(min(first_tile + i, w.tiles - 1)); };
  const uint4* code_from[kCodePasses];
#pragma unroll
  for (int n = 0; n < kCodePasses; ++n) {
    const int i = tid + n * C::kThreads;
    code_from[n] = w.codes + tile_at(i / kPieces) * w.codes_per_tile() + i % kPieces;
  }
  const uint2* scale_from = w.scales + tile_at(min(tid / 4, C::kTiles - 1)) * w.scales_per_tile() + tid % 4 * 2;

  const auto load = [&](int k_block) {
    if (k_block < w.padded_groups) {
      const uint32_t to = base + k_block % kGemmStages * kStageBytes;
      const bool real = k_block < w.groups;  // groups that only pad K have zero weights and need a finite x
#pragma unroll
      for (int n = 0; n < kRowPasses; ++n)
        if (x_from[n] != kNoRow)
          cp_async16(to + row_to + n * kRowStep * 128, p.x + x_from[n] + (real ? k_block * kGroup : 0), real);
      const uint32_t codes = to + kTileRowsX * 128 + tid * 16,
                     scales = to + kTileRowsX * 128 + C::kCodeBytes + tid * 16;
#pragma unroll
      for (int n = 0; n < kCodePasses; ++n) cp_async16(codes + n * C::kThreads * 16, code_from[n] + k_block * kPieces);
      if (tid < C::kTiles * 4) cp_async16(scales, scale_from + k_block * 8);
    }
    cp_async_commit();
  };

  float acc[kBlocks][kTileRowsX / 2];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < kTileRowsX / 2; ++i) acc[b][i] = 0;
  uint32_t a[2][kBlocks][4][4];

#pragma unroll
  for (int i = 0; i < kGemmStages - 2; ++i) load(i);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) pin_registers(acc[b]);

  // One block of 64 k. The product of the block before may still run; the one before that has ended, so its operand
  // registers (set `kSet`) and its stage are free.
  const auto step = [&]<int kSet>(int k_block) {
    cp_async_wait<kGemmStages - 3>();
    fence_async_proxy();
    __syncthreads();
    load(k_block + kGemmStages - 2);
    const std::byte* stage = shared + k_block % kGemmStages * kStageBytes;
    const std::byte* codes = stage + kTileRowsX * 128;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      expand_tile<kBits>(codes, codes + C::kCodeBytes, (warpgroup * kBlocks + b) * 4 + warp, a[kSet][b]);
    const uint64_t x = k_major_operand(base + k_block % kGemmStages * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) wgmma_f16(acc[b], a[kSet][b][j], x + j * 2);
    wgmma_commit();
    wgmma_wait<1>();
  };
  for (int k_block = 0; k_block < w.padded_groups; k_block += 2) {
    step.template operator()<0>(k_block);
    step.template operator()<1>(k_block + 1);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) pin_registers(acc[b]);
  cp_async_wait<0>();

  const int r = lane / 4, q = lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int tile = first_tile + (warpgroup * kBlocks + b) * 4 + warp;
#pragma unroll
    for (int i = 0; i < kTileRowsX / 8; ++i) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int column = 8 * i + 2 * q + odd;
        if (column < count && tile < w.tiles) {
          const size_t at = rows[column].out;
          write_pair<kOutput>(p, at, tile, r, acc[b][4 * i + odd], acc[b][4 * i + 2 + odd]);
        }
      }
    }
  }
}

template <int kBits, int kGroups, int kBlocks, bool kGrouped, GemmOutput kOutput>
__global__ void __launch_bounds__(kGroups * 128, 1) affine_gemm(GemmParams p) {
  using C = GemmConfig<kBits, kGroups, kBlocks>;
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ GemmRow rows[kMaxTileRows];
  int first, count;
  PackedView w = p.w;
  if constexpr (kGrouped) {
    if (static_cast<int>(blockIdx.y) >= *p.tile_count) return;
    const ExpertTile tile = p.tiles[blockIdx.y];
    w = w.entry(tile.expert);
    first = tile.first;
    count = tile.count;
  } else {
    first = static_cast<int>(blockIdx.y) * kMaxTileRows;
    count = min(kMaxTileRows, p.rows - first);
  }
  for (int i = static_cast<int>(threadIdx.x); i < count; i += C::kThreads) {
    const auto index = static_cast<size_t>(first + i);
    size_t row = index, choice = 0;
    if constexpr (kGrouped) {
      const auto pair = static_cast<uint32_t>(p.pairs[index]);
      row = pair / kExpertsPerToken;
      choice = pair % kExpertsPerToken;
    }
    rows[i] = {static_cast<uint32_t>(row * p.x_stride + choice * p.x_choice_stride),
               static_cast<uint32_t>(row * p.out_stride + choice * p.out_choice_stride)};
  }
  __syncthreads();
  if (count <= 32) {
    multiply_tile<C, kBits, kBlocks, 32, kOutput>(p, w, shared, rows, count);
  } else if (count <= 64) {
    multiply_tile<C, kBits, kBlocks, 64, kOutput>(p, w, shared, rows, count);
  } else if (count <= 96) {
    multiply_tile<C, kBits, kBlocks, 96, kOutput>(p, w, shared, rows, count);
  } else {
    multiply_tile<C, kBits, kBlocks, 128, kOutput>(p, w, shared, rows, count);
  }
}

template <int kBits, int kGroups, int kBlocks, bool kGrouped, GemmOutput kOutput>
void launch_gemm(const Launch& launch, const GemmParams& p) {
  using C = GemmConfig<kBits, kGroups, kBlocks>;
  check(static_cast<size_t>(p.rows) * std::max(p.x_stride, p.out_stride) < kNoRow, "row offsets fit 32 bits");
  const int largest = kGrouped ? kMaxTileRows : std::min(kMaxTileRows, (p.rows + 31) / 32 * 32);
  const int tiles = kGrouped ? p.max_tiles : (p.rows + kMaxTileRows - 1) / kMaxTileRows;
  const dim3 grid(static_cast<unsigned>((p.w.tiles + C::kTiles - 1) / C::kTiles), static_cast<unsigned>(tiles));
  Launch plain = launch;
  plain.dependent = false;
  launch_kernel(plain, affine_gemm<kBits, kGroups, kBlocks, kGrouped, kOutput>, grid, C::kThreads,
                static_cast<size_t>(kGemmStages) * C::stage_bytes(largest), 1, p);
}

}  // namespace calla::cuda
