// attention_tiles: causal attention of many rows of a sequence (prefill), on wgmma.
//   Tile      16 tokens x the 8 query heads of a KV head = 128 rows of the matrix product, 64 a warpgroup; cache tiles of
//             64 positions. A cache tile serves all eight heads, and only the last one or two of a block need the mask.
//   Launch    grid (token tiles, kv_heads), 384 threads: two warpgroups compute, one warp of the third copies. Blocks
//             with the longest history start first.
//   Shared    Q 64 KiB, two stages of keys and values 128 KiB. The cache already lies in the swizzled order, so a tile is
//             one bulk copy; the computing warpgroups wait on barriers only and drift apart, so that one's softmax runs
//             under the other's matrix products.
//   Matrix    S = Q K^T: m64n64k16, both from shared memory. O += P V: m64n256k16, P from registers, V transposed by
//             the operand descriptor. bf16, fp32 sums.
//   Bound     by the tensor cores: 4 x 128 x 64 x 256 flops a tile of 64 KiB.
#include "backend/cuda/attention.h"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda {
namespace {

constexpr int kThreads = 384;
constexpr int kStages = 2;
constexpr int kQueryBytes = 64 * kHeadDim * 2;  // of a warpgroup
constexpr int kSharedBytes = 2 * kQueryBytes + kStages * 2 * kTileBytes;
constexpr float kScoreScale = 0.0625f * 1.44269504f;  // 1 / sqrt(256), and exp2 instead of exp

struct Barriers {
  uint64_t keys_full[kStages], values_full[kStages];
  uint64_t keys_free[kStages], values_free[kStages];
};

// Copies cache tiles [0, tiles) as their stages come free. One thread.
__device__ void produce(const AttentionParams& p, const int32_t* pages, int kv_head, int tiles, std::byte* stages,
                        Barriers& barriers) {
  for (int i = 0; i < tiles; ++i) {
    const int stage = i % kStages;
    const uint32_t parity = static_cast<uint32_t>(i / kStages) & 1;
    std::byte* to = stages + stage * 2 * kTileBytes;
    barrier_wait(&barriers.keys_free[stage], parity ^ 1);
    bulk_copy(to, p.tile(pages[i], kv_head, 0), kTileBytes, &barriers.keys_full[stage]);
    barrier_wait(&barriers.values_free[stage], parity ^ 1);
    bulk_copy(to + kTileBytes, p.tile(pages[i], kv_head, 1), kTileBytes, &barriers.values_full[stage]);
  }
}

__global__ void __launch_bounds__(kThreads, 1) attention_tile_kernel(AttentionParams p, const AttentionTile* tiles) {
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ Barriers barriers;
  const int tid = static_cast<int>(threadIdx.x), warpgroup = tid / 128;
  const AttentionTile tile = tiles[gridDim.x - 1 - blockIdx.x];
  const int kv_head = static_cast<int>(blockIdx.y);
  const StepSequence sequence = p.step.sequences[tile.sequence];
  const int tokens = min(kAttentionTileTokens, sequence.rows - tile.first);
  const int position = sequence.position + tile.first;  // of the first token
  const int cache_tiles = (position + tokens + kKvPageRows - 1) / kKvPageRows;
  std::byte* stages = shared + 2 * kQueryBytes;

  if (tid == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&barriers.keys_full[i], 1);
      barrier_init(&barriers.values_full[i], 1);
      barrier_init(&barriers.keys_free[i], 8);  // computing warps
      barrier_init(&barriers.values_free[i], 8);
    }
    fence_async_proxy();
  }
  // Q: row 8 t + h of the product is token t, head h; panels of 64 dims, swizzled like the cache.
  for (int i = tid; i < 128 * 32; i += kThreads) {
    const int row = i / 32, piece = i % 32, token = min(row / 8, tokens - 1);
    const uint16_t* from =
        p.attn_q +
        (static_cast<size_t>(sequence.first_row + tile.first + token) * p.q_heads + kv_head * kGqaFactor + row % 8) *
            kHeadDim +
        piece * 8;
    *reinterpret_cast<uint4*>(shared + row / 64 * kQueryBytes + tile_offset(row % 64, piece)) =
        *reinterpret_cast<const uint4*>(from);
  }
  fence_async_proxy();
  __syncthreads();

  if (warpgroup == 2) {
    give_registers<40>();
    if (tid == 256) produce(p, p.step.pages + sequence.page_offset, kv_head, cache_tiles, stages, barriers);
    return;
  }
  take_registers<232>();
  const int warp = tid / 32 % 4, lane = tid % 32, r = lane / 4, q = lane % 4;
  const uint32_t query = shared_address(shared) + warpgroup * kQueryBytes;
  float out[128], maximum[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};
#pragma unroll
  for (float& v : out) v = 0;
  // This thread's rows r and r + 8 of the warp are tokens 2 w and 2 w + 1 of the warpgroup's eight, head r.
  const int token[2] = {warpgroup * 8 + warp * 2, warpgroup * 8 + warp * 2 + 1};

  for (int i = 0; i < cache_tiles; ++i) {
    const int stage = i % kStages;
    const uint32_t parity = static_cast<uint32_t>(i / kStages) & 1;
    const uint32_t keys = shared_address(stages) + stage * 2 * kTileBytes, values = keys + kTileBytes;

    float scores[32];
#pragma unroll
    for (float& v : scores) v = 0;
    barrier_wait(&barriers.keys_full[stage], parity);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 16; ++j)
      wgmma_bf16(scores, k_major_operand(query + j / 4 * kPanelBytes) + j % 4 * 2,
                 k_major_operand(keys + j / 4 * kPanelBytes) + j % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&barriers.keys_free[stage]);

#pragma unroll
    for (float& v : scores) v *= kScoreScale;
    if ((i + 1) * kKvPageRows > position + 1) {  // some of these positions are after the first token
#pragma unroll
      for (int b = 0; b < 8; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (i * kKvPageRows + 8 * b + 2 * q + e % 2 > position + token[e / 2]) scores[4 * b + e] = -INFINITY;
    }
    float correction[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = scores[2 * h];
#pragma unroll
      for (int b = 0; b < 8; ++b) top = fmaxf(top, fmaxf(scores[4 * b + 2 * h], scores[4 * b + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float next = fmaxf(maximum[h], top);  // finite: position 0 is before every token
      correction[h] = exp2f(maximum[h] - next);
      maximum[h] = next;
      float sum = 0;
#pragma unroll
      for (int b = 0; b < 8; ++b)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& s = scores[4 * b + 2 * h + e];
          s = exp2f(s - next);
          sum += s;
        }
      weight[h] = weight[h] * correction[h] + sum;
    }
    if (__any_sync(0xffffffffu, correction[0] != 1 || correction[1] != 1)) {
#pragma unroll
      for (int b = 0; b < 32; ++b)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[4 * b + e] *= correction[e / 2];
    }
    uint32_t weights[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = scores + 4 * (2 * j + half);
        weights[j][2 * half] = pack_bf162(s[0], s[1]);
        weights[j][2 * half + 1] = pack_bf162(s[2], s[3]);
      }

    barrier_wait(&barriers.values_full[stage], parity);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      wgmma_bf16_transposed(out, weights[j], mn_major_operand(values + j * 2048, kPanelBytes));
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(&barriers.values_free[stage]);
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = weight[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (token[h] >= tokens) continue;
    const float scale = 1.0f / total;
    const size_t row = static_cast<size_t>(sequence.first_row + tile.first + token[h]);
    const int head = kv_head * kGqaFactor + r;
    const float* output_gate = p.projected + row * p.stride + head * 2 * kHeadDim + kHeadDim;
    __half* to = p.mixed + row * p.mixed_stride + head * kHeadDim;
#pragma unroll
    for (int b = 0; b < 32; ++b) {
      const int dim = 8 * b + 2 * q;
      const float2 gate_logit = *reinterpret_cast<const float2*>(output_gate + dim);
      *reinterpret_cast<uint32_t*>(to + dim) = pack_half2(out[4 * b + 2 * h] * scale * sigmoid(gate_logit.x),
                                                          out[4 * b + 2 * h + 1] * scale * sigmoid(gate_logit.y));
    }
  }
}

}  // namespace

void attention_tiles(const Launch& launch, const AttentionParams& p, const AttentionTile* tiles, int tile_count) {
  Launch plain = launch;
  plain.dependent = false;
  launch_kernel(plain, attention_tile_kernel,
                dim3(static_cast<unsigned>(tile_count), static_cast<unsigned>(p.kv_heads)), kThreads, kSharedBytes, 1,
                p, tiles);
}

}  // namespace calla::cuda
