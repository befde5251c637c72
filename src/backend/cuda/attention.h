#pragma once
// Gated attention: q/k preparation, the cache, and the three ways to attend.
//
// The cache is [attention layer][page][kv_head][key, value] tiles of 64 rows x 256 bf16 (32 KiB), each stored in the
// order in which shared memory wants it: four panels of 64 dims, a panel row is 128 bytes whose 16-byte pieces are
// permuted by the row (piece ^ row % 8, the 128-byte swizzle). So a tile travels as one contiguous copy, and ldmatrix
// and wgmma read it without bank conflicts.
#include "backend/backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"

namespace calla::cuda {

inline constexpr int kTileBytes = kKvPageRows * kHeadDim * 2;
inline constexpr int kPanelBytes = kKvPageRows * 128;

// Byte offset of dims [8 c, 8 c + 8) of a row in a tile.
__host__ __device__ constexpr int tile_offset(int row, int c) {
  return c / 8 * kPanelBytes + row * 128 + ((c % 8) ^ (row % 8)) * 16;
}

// One attention layer's view of a step.
struct AttentionParams {
  StepView step;
  const float* projected = nullptr;  // [row][stride]: q and output gate by head at 0, k, v at their columns
  size_t stride = 0;
  int k_column = 0, v_column = 0;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  const double* inverse_frequency = nullptr;  // theta^(-2i / rotary_dim) [rotary_dim / 2]
  int rotary_dim = 0;
  float eps = 0;
  int q_heads = 0, kv_heads = 0;
  uint16_t* attn_q = nullptr;  // [row][q_heads * 256] bf16
  std::byte* cache = nullptr;  // this layer's pages
  __half* mixed = nullptr;
  size_t mixed_stride = 0;
  // Split-KV scratch: [row][q_head][split] of 256 sums, then maximum and weight.
  float* partial = nullptr;
  int splits = 1;
  bool deep = false;  // a split has more than two pages

  __host__ __device__ std::byte* tile(int page, int kv_head, int which) const {
    return cache + ((static_cast<size_t>(page) * kv_heads + kv_head) * 2 + which) * kTileBytes;
  }
};
inline constexpr int kPartialFloats = kHeadDim + 4;  // rows stay aligned to 16 bytes

// q/k RMSNorm and partial RoPE; q to attn_q, k and v to the cache.
void attention_prepare(const Launch& launch, const AttentionParams& p);
// Every row by itself (decode; also any rows on GPUs before Hopper). `pack_heads` off: each query head reads the cache
// for itself (the ablation of GQA packing).
void attention_rows(const Launch& launch, const AttentionParams& p, bool pack_heads);
// Many rows of a sequence share each tile of the cache (prefill, Hopper). `tiles` covers the step's rows.
void attention_tiles(const Launch& launch, const AttentionParams& p, const AttentionTile* tiles, int tile_count);
inline constexpr int kAttentionTileTokens = 16;  // x 8 query heads = 128 rows of the matrix product

}  // namespace calla::cuda
