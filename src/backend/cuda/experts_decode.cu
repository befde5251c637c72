// experts_swiglu_up: h[i][u] = silu(gate_i x [u]) * (up_i x [u]) for the eight chosen experts and the shared one.
//   Launch    grid (width / 16, 9, rows), block 256 = 8 warps that split K; two tiles of 8 units (gate and up rows).
//   Fused     the choice of the experts: every block repeats it from the router's logits (0.3 us), because a kernel of
//             its own would cost a launch in the chain.
//   Moves     9 x 9/16 K width bytes of weights a row. Bandwidth-bound.
// experts_down_sum: residual[n] += sum_i weight_i down_i h_i [n] + shared_gate down_shared h_shared [n].
//   Launch    grid (hidden / 16, rows), block 288 = 9 warps, an expert each; one tile of 16 outputs.
//   Overlap   the choice of experts depends on the router only, which has ended before experts_swiglu_up lets this
//             kernel start: so it chooses and loads its weights while that kernel still runs.
//   Moves     9 x 9/16 width hidden bytes of weights a row. Bandwidth-bound.
#include <algorithm>

#include "backend/cuda/experts_decode.h"
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda {
namespace {

constexpr int kUpTiles = 2;
constexpr int kAll = kExpertsPerToken + 1;  // the chosen experts and the shared one
constexpr int kDownThreads = kAll * 32;

struct ExpertsParams {
  PackedView up, down;  // of the routed experts
  PackedView shared_up, shared_down;
  Activations a;
  int experts;
  int expert_width, shared_width;
  int router_width, shared_column;
  int hidden;
};

__global__ void __launch_bounds__(kGemvThreads, 3) experts_swiglu_up(ExpertsParams p, bool choose) {
  extern __shared__ uint4 shared[];
  __shared__ int chosen_id;
  const bool is_shared = blockIdx.y == kExpertsPerToken;
  const int slot = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int tile = static_cast<int>(blockIdx.x) * kUpTiles, width = is_shared ? p.shared_width : p.expert_width;
  PackedView w = is_shared ? p.shared_up : p.up;
  const StagedInput<1> x(shared, w.padded_groups);
  float* partials = x.sums + w.padded_groups;
  BlockProduct<4, kUpTiles, 1, 1> product;

  if (tile >= w.tiles) {  // the shared expert may be narrower or wider than a routed one
    grid_dependency_wait();
    launch_dependents();
    return;
  }
  if (is_shared) product.prefetch(w, tile);
  grid_dependency_wait();
  launch_dependents();  // not earlier: experts_down_sum relies on the router's end

  if (choose && threadIdx.x < 32 && (!is_shared || blockIdx.x == 0)) {
    const float* logits = p.a.router_logits + static_cast<size_t>(row) * p.router_width;
    const ChosenExpert mine = choose_experts(logits, p.experts);
    const int lane = static_cast<int>(threadIdx.x);
    if (lane == slot) chosen_id = mine.id;
    if (is_shared && lane < kExpertsPerToken) {  // one block a row leaves the choice for later readers
      p.a.expert_ids[row * kExpertsPerToken + lane] = mine.id;
      p.a.expert_weights[row * kExpertsPerToken + lane] = mine.weight;
      if (lane == 0) p.a.shared_gate[row] = sigmoid(__ldcg(logits + p.shared_column));
    }
  }
  if (!choose && threadIdx.x == 0 && !is_shared) chosen_id = p.a.expert_ids[row * kExpertsPerToken + slot];
  if (!is_shared) {
    __syncthreads();
    w = w.entry(chosen_id);
    product.prefetch(w, tile);
  }
  stage_row<false>(x, 0, p.a.moe_input + static_cast<size_t>(row) * p.hidden, p.hidden, nullptr, 0.0f, nullptr,
                   nullptr);
  __syncthreads();
  product.multiply(w, tile, x, partials);
  __syncthreads();

  const int unit = tile * 8 + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kUpTiles * 8 && unit < width) {
    const float gate = sum_partials<kUpTiles, 1>(partials, static_cast<int>(threadIdx.x) * 2, 0);
    const float up = sum_partials<kUpTiles, 1>(partials, static_cast<int>(threadIdx.x) * 2 + 1, 0);
    const size_t at = static_cast<size_t>(row) * (kExpertsPerToken * p.expert_width + p.shared_width) +
                      static_cast<size_t>(slot) * p.expert_width + unit;
    p.a.hidden[at] = __float2half_rn(silu(gate) * up * kHiddenScale);
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kDownThreads, 2) experts_down_sum(ExpertsParams p, bool choose) {
  extern __shared__ uint4 shared[];
  __shared__ int ids[kExpertsPerToken];
  __shared__ float weights[kAll];
  __shared__ float totals[kAll][kTileRows];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int tile = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const bool is_shared = warp == kExpertsPerToken;

  launch_dependents();
  WeightChunk<4, 1> ahead[kChunks];
  PackedView w = is_shared ? p.shared_down : p.down;
  const auto prefetch = [&] {
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (i * kChunkGroups < w.padded_groups) ahead[i].load(w, tile, i);
  };
  if (is_shared) {
    prefetch();
    if (lane == 0)
      weights[kExpertsPerToken] =
          choose ? sigmoid(__ldcg(p.a.router_logits + static_cast<size_t>(row) * p.router_width + p.shared_column))
                 : p.a.shared_gate[row];
  }
  if (warp == 0) {
    ChosenExpert mine{0, 0};
    if (choose) {
      mine = choose_experts(p.a.router_logits + static_cast<size_t>(row) * p.router_width, p.experts);
    } else if (lane < kExpertsPerToken) {
      mine = {p.a.expert_ids[row * kExpertsPerToken + lane], p.a.expert_weights[row * kExpertsPerToken + lane]};
    }
    if (lane < kExpertsPerToken) {
      ids[lane] = mine.id;
      weights[lane] = mine.weight;
    }
  }
  __syncthreads();
  if (!is_shared) {
    w = w.entry(ids[warp]);
    prefetch();
  }
  grid_dependency_wait();

  // Each warp stages its own expert's hidden units; a warp's barrier is enough.
  const int groups = max(p.down.padded_groups, p.shared_down.padded_groups);
  const StagedInput<1> x(shared + warp * (StagedInput<1>::bytes(groups) / sizeof(uint4)), groups);
  const int width = is_shared ? p.shared_width : p.expert_width;
  const __half* h = p.a.hidden + static_cast<size_t>(row) * (kExpertsPerToken * p.expert_width + p.shared_width) +
                    static_cast<size_t>(warp) * p.expert_width;
  for (int base = 0; base < w.padded_groups * 8; base += 32) {
    const int c = base + lane;
    float v[8] = {};
    if (c * 8 < width) load_row8(h + c * 8, v);
    x.store(c, 0, v, c < w.padded_groups * 8);
  }
  __syncwarp();

  float acc[1][4] = {};
#pragma unroll
  for (int i = 0; i < kChunks; ++i)
    if (i * kChunkGroups < w.padded_groups) multiply_chunk(acc, ahead[i], x, i);
#pragma unroll 1
  for (int chunk = kChunks; chunk * kChunkGroups < w.padded_groups; ++chunk) {
    ahead[0].load(w, tile, chunk);
    multiply_chunk(acc, ahead[0], x, chunk);
  }
  if (lane % 4 == 0) {
    const float weight = weights[warp] / kHiddenScale;
    totals[warp][2 * (lane / 4)] = acc[0][0] * weight;
    totals[warp][2 * (lane / 4) + 1] = acc[0][2] * weight;
  }
  __syncthreads();
  if (threadIdx.x < kTileRows) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kAll; ++i) total += totals[i][threadIdx.x];
    float* to = p.a.residual + static_cast<size_t>(row) * p.hidden + tile * kTileRows + threadIdx.x;
    *to += total;
  }
}

}  // namespace

void experts_up_decode(const Launch& launch, const ExpertsDecode& e) {
  const ExpertsParams p = experts_params<ExpertsParams>(e);
  const int tiles = std::max(p.up.tiles, p.shared_up.tiles);
  const size_t bytes = StagedInput<1>::bytes(p.up.padded_groups) + sizeof(float) * kGemvWarps * kUpTiles * kTileRows;
  launch_kernel(launch, experts_swiglu_up,
                dim3(static_cast<unsigned>((tiles + kUpTiles - 1) / kUpTiles), kAll, static_cast<unsigned>(e.rows)),
                kGemvThreads, bytes, 1, p, e.choose);
}

void experts_down_decode(const Launch& launch, const ExpertsDecode& e) {
  const ExpertsParams p = experts_params<ExpertsParams>(e);
  const size_t bytes = kAll * StagedInput<1>::bytes(std::max(p.down.padded_groups, p.shared_down.padded_groups));
  launch_kernel(launch, experts_down_sum<2>, dim3(static_cast<unsigned>(p.down.tiles), static_cast<unsigned>(e.rows)),
                kDownThreads, bytes, 1, p, e.choose);
}

}  // namespace calla::cuda
