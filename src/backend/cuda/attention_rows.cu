// attention_prepare: a warp takes a head of q (RMSNorm, RoPE -> attn_q), k (RMSNorm, RoPE -> cache) or v (-> cache).
//   Launch    grid ((q_heads + 2 kv_heads) / 8, rows), block 256.
// attention_split: one row's attention over a share of its cache, for the eight query heads of a KV head together.
//   Launch    grid (splits, kv_heads, rows), block 128 = 4 warps; a warp takes 16 of a page's 64 rows and keeps its own
//             running softmax, so warps never wait for each other; they merge once at the end.
//   Matrix    S^T = K Q^T and O^T = V^T P^T with m16n8k16: the eight query heads are the n side, so each cache row is
//             read once for all of them (GQA packing) and no lane idles.
//   Shared    stages of 16 KiB a warp (cp.async): three, 192 KiB a block, where a block has many pages; else two, so that
//             its first page comes in while a block of the projection holds the rest; one on GPUs with less.
//   Moves     1 KiB of cache a position and KV head. Bandwidth-bound.
// attention_merge: the splits' results, output gate -> mixed. Grid (4 q_heads, rows), block 512: 64 dims, eight
//   shares of the splits.
#include <cmath>

#include "backend/cuda/attention.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kWarpRows = kKvPageRows / kWarps;           // 16
constexpr int kWarpTileBytes = kWarpRows * kHeadDim * 2;  // 8 KiB of keys, as much of values
constexpr int shared_bytes(int stages) { return kWarps * stages * 2 * kWarpTileBytes; }
constexpr int kMergeDims = 64, kMergeShares = 8, kMergeThreads = kMergeShares * kMergeDims;
constexpr int kMaxSplits = kMergeThreads;
constexpr float kScoreScale = 0.0625f * 1.44269504f;  // 1 / sqrt(256), and exp2 instead of exp

__global__ void __launch_bounds__(256) attention_prepare_kernel(AttentionParams p) {
  launch_dependents();
  const int unit = static_cast<int>(blockIdx.x * 8 + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int row = static_cast<int>(blockIdx.y);
  if (unit >= p.q_heads + 2 * p.kv_heads) return;
  const StepSequence sequence = p.step.sequences[find_sequence(p.step, row)];
  const int position = sequence.position + row - sequence.first_row;
  const bool is_query = unit < p.q_heads, is_value = unit >= p.q_heads + p.kv_heads;
  const int head = is_query ? unit : (unit - p.q_heads) % p.kv_heads;
  // What does not depend on the projection, before waiting for it: the norm's weights, and the rotation. Pairs are
  // (i, i + half): the partner's lane is half / 8 lanes away.
  const int half = p.rotary_dim / 2, distance = half / 8;
  const bool low = lane < distance, rotates = lane < 2 * distance && !is_value;
  const int partner = rotates ? (low ? lane + distance : lane - distance) : lane;
  float norm[8], sine[8], cosine[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    norm[i] = (is_query ? p.q_norm : p.k_norm)[lane * 8 + i];
    sine[i] = 0;
    cosine[i] = 1;
    if (!rotates) continue;
    // The angle reaches 1e5 radians: reduced in double, then fp32 is exact enough.
    const double turns = position * p.inverse_frequency[(low ? lane : lane - distance) * 8 + i] * (0.5 / M_PI);
    sincospif(static_cast<float>(2 * (turns - floor(turns))), &sine[i], &cosine[i]);
    if (low) sine[i] = -sine[i];
  }
  grid_dependency_wait();

  const float* from = p.projected + row * p.stride +
                      (is_query ? head * 2 * kHeadDim : (is_value ? p.v_column : p.k_column) + head * kHeadDim) +
                      lane * 8;
  const float4 a = __ldcg(reinterpret_cast<const float4*>(from)), b = __ldcg(reinterpret_cast<const float4*>(from) + 1);
  float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  if (!is_value) {
    float square = 0;
#pragma unroll
    for (float x : v) square += x * x;
    const float scale = rsqrtf(sum_lanes(square) / kHeadDim + p.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] *= scale * norm[i];
      const float other = __shfl_sync(0xffffffffu, v[i], partner);
      v[i] = v[i] * cosine[i] + other * sine[i];
    }
  }
  const uint4 packed =
      make_uint4(pack_bf162(v[0], v[1]), pack_bf162(v[2], v[3]), pack_bf162(v[4], v[5]), pack_bf162(v[6], v[7]));
  if (is_query) {
    *reinterpret_cast<uint4*>(p.attn_q + (static_cast<size_t>(row) * p.q_heads + head) * kHeadDim + lane * 8) = packed;
  } else {
    const int page = p.step.pages[sequence.page_offset + position / kKvPageRows];
    *reinterpret_cast<uint4*>(p.tile(page, head, is_value) + tile_offset(position % kKvPageRows, lane)) = packed;
  }
}

// Pages [first, last) of a split. They are shared out evenly among the first `used_splits`: none has more than one page more
// than another.
struct PageRange {
  int first, last;
};
__device__ __forceinline__ int used_splits(int pages, int splits) { return min(pages, splits); }
__device__ __forceinline__ PageRange split_pages(int pages, int split, int splits) {
  const int used = used_splits(pages, splits);
  return {min(split, used) * pages / used, min(split + 1, used) * pages / used};
}

__device__ __forceinline__ int row_length(const StepView& step, int row, StepSequence& sequence) {
  sequence = step.sequences[find_sequence(step, row)];
  return sequence.position + row - sequence.first_row + 1;
}

template <bool kPackHeads, int kStages>
__global__ void __launch_bounds__(kThreads) attention_split(AttentionParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int r = lane / 4, q = lane % 4;
  const int row = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.y) / (kPackHeads ? 1 : kGqaFactor);
  const int only_head = kPackHeads ? -1 : static_cast<int>(blockIdx.y) % kGqaFactor;
  StepSequence sequence;
  const int length = row_length(p.step, row, sequence);
  const PageRange range = split_pages((length + kKvPageRows - 1) / kKvPageRows, split, p.splits);
  const int32_t* pages = p.step.pages + sequence.page_offset;
  launch_dependents();
  if (range.first >= range.last) {
    grid_dependency_wait();
    return;
  }

  std::byte* mine = shared + warp * kStages * 2 * kWarpTileBytes;
  const uint32_t mine_address = shared_address(mine);
  // A warp's 16 rows of a tile: four panels of 16 x 128 bytes, contiguous in each panel.
  const auto load_page = [&](int index, int stage) {
    const int page = pages[index];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const std::byte* from = p.tile(page, kv_head, which) + warp * kWarpRows * 128;
      const uint32_t to = mine_address + (stage * 2 + which) * kWarpTileBytes;
#pragma unroll
      for (int i = 0; i < kWarpTileBytes / 512; ++i) {
        const int offset = i * 512 + lane * 16;  // in the warp's tile
        cp_async16(to + offset, from + offset / 2048 * kPanelBytes + offset % 2048);
      }
    }
  };
  // Pages in front of the step's own rows are older than this step: load them before waiting for the projection.
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;
  const int old_pages = sequence.position / kKvPageRows;
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage)
    if (range.first + stage < min(range.last, old_pages)) load_page(range.first + stage, stage);
  grid_dependency_wait();
#pragma unroll
  for (int stage = 0; stage < kAhead; ++stage) {
    const int index = range.first + stage;
    if (index >= old_pages && index < range.last) load_page(index, stage);
    cp_async_commit();
  }

  // Q^T as the B operand: column r is query head r of this KV head.
  uint32_t query[16][2];
  const uint16_t* from = p.attn_q + (static_cast<size_t>(row) * p.q_heads + kv_head * kGqaFactor + r) * kHeadDim;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const bool wanted = kPackHeads || r == only_head;
    query[j][0] = wanted ? *reinterpret_cast<const uint32_t*>(from + 16 * j + 2 * q) : 0;
    query[j][1] = wanted ? *reinterpret_cast<const uint32_t*>(from + 16 * j + 8 + 2 * q) : 0;
  }

  float out[16][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};  // of heads 2q, 2q + 1; weight: this lane's rows only
  for (int index = range.first; index < range.last; ++index) {
    const int stage = (index - range.first) % kStages;
    const int ahead = index + kStages - 1;
    if (ahead < range.last) load_page(ahead, (ahead - range.first) % kStages);
    cp_async_commit();
    cp_async_wait<kStages - 1>();
    __syncwarp();
    const uint32_t keys = mine_address + stage * 2 * kWarpTileBytes, values = keys + kWarpTileBytes;

    float scores[2][4] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      uint32_t a[4];
      const int tile_row = lane % 16, c = 2 * j + lane / 16;
      ldmatrix_x4(a, keys + c / 8 * 2048 + tile_row * 128 + ((c % 8) ^ (tile_row % 8)) * 16);
      mma_bf16(scores[j % 2], a, query[j][0], query[j][1]);
    }
    const int position = index * kKvPageRows + warp * kWarpRows + r;
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = (scores[0][i] + scores[1][i]) * kScoreScale;
      if (position + i / 2 * 8 >= length) s[i] = -INFINITY;
    }
    float correction[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = fmaxf(s[h], s[h + 2]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 4));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 8));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
      const float next = fmaxf(maximum[h], top);
      // A warp whose rows are all past the end keeps -inf; exp2(-inf - 0) is then 0, never NaN.
      const float base = next == -INFINITY ? 0.0f : next;
      correction[h] = exp2f(maximum[h] - base);
      maximum[h] = next;
      s[h] = exp2f(s[h] - base);
      s[h + 2] = exp2f(s[h + 2] - base);
      weight[h] = weight[h] * correction[h] + s[h] + s[h + 2];
    }
    const uint32_t p0 = transpose_8x8(pack_bf162(s[0], s[1])), p1 = transpose_8x8(pack_bf162(s[2], s[3]));
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[t][i] *= correction[i % 2];
      uint32_t a[4];
      const int tile_row = lane / 16 * 8 + lane % 8, c = 2 * t + lane / 8 % 2;
      ldmatrix_x4_transposed(a, values + c / 8 * 2048 + tile_row * 128 + ((c % 8) ^ (tile_row % 8)) * 16);
      mma_bf16(out[t], a, p0, p1);
    }
    __syncwarp();
  }
  cp_async_wait<0>();
  __syncthreads();

  // Merge the warps: [warp][head] rows of 256 sums, then maxima and weights, then factors.
  constexpr int kRowFloats = kHeadDim + 4;  // apart by four banks
  auto* sums = reinterpret_cast<float*>(shared);
  float* tops = sums + kWarps * kGqaFactor * kRowFloats;
  float* weights = tops + kWarps * kGqaFactor;
  float* factors = weights + kWarps * kGqaFactor;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], 4);
    weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], 8);
    weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], 16);
    if (r == 0) {
      tops[warp * kGqaFactor + 2 * q + h] = maximum[h];
      weights[warp * kGqaFactor + 2 * q + h] = weight[h];
    }
  }
#pragma unroll
  for (int t = 0; t < 16; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[(warp * kGqaFactor + 2 * q + i % 2) * kRowFloats + 16 * t + r + i / 2 * 8] = out[t][i];
  __syncthreads();
  float* to =
      p.partial + ((static_cast<size_t>(row) * p.q_heads + kv_head * kGqaFactor) * p.splits + split) * kPartialFloats;
  const size_t head_stride = static_cast<size_t>(p.splits) * kPartialFloats;
  if (warp == 0) {  // lane = 8 w + head
    const int head = lane % kGqaFactor;
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w * kGqaFactor + head]);
    const float factor = exp2f(tops[lane] - top);
    factors[lane] = factor;
    float total = factor * weights[lane];
    total += __shfl_xor_sync(0xffffffffu, total, 8);
    total += __shfl_xor_sync(0xffffffffu, total, 16);
    if (lane < kGqaFactor && (kPackHeads || head == only_head)) {
      to[head * head_stride + kHeadDim] = top;
      to[head * head_stride + kHeadDim + 1] = total;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kGqaFactor * kHeadDim / 4; i += kThreads) {
    const int head = i / (kHeadDim / 4), dim = i % (kHeadDim / 4) * 4;
    if (!kPackHeads && head != only_head) continue;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = factors[w * kGqaFactor + head];
      const float4 v = *reinterpret_cast<const float4*>(sums + (w * kGqaFactor + head) * kRowFloats + dim);
      total.x = fmaf(factor, v.x, total.x);
      total.y = fmaf(factor, v.y, total.y);
      total.z = fmaf(factor, v.z, total.z);
      total.w = fmaf(factor, v.w, total.w);
    }
    *reinterpret_cast<float4*>(to + head * head_stride + dim) = total;
  }
}

__global__ void __launch_bounds__(kMergeThreads) attention_merge(AttentionParams p) {
  __shared__ float factors[kMaxSplits];
  __shared__ float sums[kMergeShares][kMergeDims];
  __shared__ float warp_tops[kMergeThreads / 32], warp_weights[kMergeThreads / 32];
  launch_dependents();
  constexpr int kBlocksPerHead = kHeadDim / kMergeDims;
  const int head = static_cast<int>(blockIdx.x) / kBlocksPerHead, row = static_cast<int>(blockIdx.y);
  const int tid = static_cast<int>(threadIdx.x), column = tid % kMergeDims, part = tid / kMergeDims;
  const int dim = static_cast<int>(blockIdx.x) % kBlocksPerHead * kMergeDims + column;
  StepSequence sequence;
  const int pages = (row_length(p.step, row, sequence) + kKvPageRows - 1) / kKvPageRows;
  const int used = used_splits(pages, p.splits);
  grid_dependency_wait();
  const float* from = p.partial + (static_cast<size_t>(row) * p.q_heads + head) * p.splits * kPartialFloats;
  const float output_gate = __ldcg(p.projected + row * p.stride + head * 2 * kHeadDim + kHeadDim + dim);

  // The splits' maxima and weights, one a thread.
  const float top = tid < used ? __ldcg(from + tid * kPartialFloats + kHeadDim) : -INFINITY;
  const float weight = tid < used ? __ldcg(from + tid * kPartialFloats + kHeadDim + 1) : 0.0f;
  const float warp_top = max_lanes(top);
  if (tid % 32 == 0) warp_tops[tid / 32] = warp_top;
  __syncthreads();
  float largest = -INFINITY;
#pragma unroll
  for (const float v : warp_tops) largest = fmaxf(largest, v);
  const float factor = exp2f(top - largest);
  if (tid < used) factors[tid] = factor;
  const float warp_weight = sum_lanes(factor * weight);
  if (tid % 32 == 0) warp_weights[tid / 32] = warp_weight;
  __syncthreads();

  float total = 0;
#pragma unroll 8
  for (int i = part; i < used; i += kMergeShares)
    total = fmaf(factors[i], __ldcg(from + i * kPartialFloats + dim), total);
  sums[part][column] = total;
  __syncthreads();
  if (part != 0) return;
  float all_weight = 0;
  total = 0;
#pragma unroll
  for (const float v : warp_weights) all_weight += v;
#pragma unroll
  for (int i = 0; i < kMergeShares; ++i) total += sums[i][column];
  p.mixed[row * p.mixed_stride + head * kHeadDim + dim] = __float2half_rn(total / all_weight * sigmoid(output_gate));
}

template <bool kPackHeads>
void launch_split(const Launch& launch, const AttentionParams& p) {
  const dim3 grid(static_cast<unsigned>(p.splits), static_cast<unsigned>(kPackHeads ? p.kv_heads : p.q_heads),
                  static_cast<unsigned>(p.step.rows));
  const auto run = [&](auto kernel, int stages) {
    launch_kernel(launch, kernel, grid, kThreads, static_cast<size_t>(shared_bytes(stages)), 1, p);
  };
  const int room = launch.device.shared_per_block;
  if (room >= shared_bytes(3) && p.deep) return run(attention_split<kPackHeads, 3>, 3);
  if (room >= shared_bytes(2)) return run(attention_split<kPackHeads, 2>, 2);
  run(attention_split<kPackHeads, 1>, 1);
}

}  // namespace

void attention_prepare(const Launch& launch, const AttentionParams& p) {
  check(p.rotary_dim % 16 == 0 && p.rotary_dim <= kHeadDim, "rotary_dim is a multiple of 16, at most 256");
  const int units = p.q_heads + 2 * p.kv_heads;
  launch_kernel(launch, attention_prepare_kernel,
                dim3(static_cast<unsigned>((units + 7) / 8), static_cast<unsigned>(p.step.rows)), 256, 0, 1, p);
}

void attention_rows(const Launch& launch, const AttentionParams& p, bool pack_heads) {
  check(p.splits <= kMaxSplits, "splits fit a block");
  const auto rows = static_cast<unsigned>(p.step.rows);
  if (pack_heads) {
    launch_split<true>(launch, p);
  } else {
    launch_split<false>(launch, p);
  }
  launch_kernel(launch, attention_merge, dim3(static_cast<unsigned>(p.q_heads * (kHeadDim / kMergeDims)), rows),
                kMergeThreads, 0, 1, p);
}

}  // namespace calla::cuda
