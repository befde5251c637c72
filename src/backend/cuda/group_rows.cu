// group_by_expert: one block of 1024: histogram of the choices in shared memory, prefix sums over experts of rows and of
//   tiles, tile list, scatter of the pairs. Reads the ids twice. The order of the rows of an expert is not fixed, but a
//   row's result does not depend on its place.
// sum_experts: a block a row; reads 18 bytes an output, in the order of the choices.
#include <algorithm>

#include "backend/cuda/group_rows.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kTileRowsMax = 128;

// Exclusive prefix sum over the block's threads of `value`; `total` for everyone.
__device__ int exclusive_sum(int value, int* warp_sums, int& total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(offset));
    if (lane >= offset) sum += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + sum - value;
}

__global__ void __launch_bounds__(kThreads)
    group_kernel(const int32_t* expert_ids, int pairs, int experts, Grouping out) {
  __shared__ int counts[kThreads];
  __shared__ int warp_sums[kThreads / 32];
  const int tid = static_cast<int>(threadIdx.x);
  counts[tid] = 0;
  __syncthreads();
  for (int i = tid; i < pairs; i += kThreads) atomicAdd(&counts[expert_ids[i]], 1);
  __syncthreads();
  const int count = tid < experts ? counts[tid] : 0;
  int all;
  const int first = exclusive_sum(count, warp_sums, all);
  const int tiles = (count + kTileRowsMax - 1) / kTileRowsMax;
  const int first_tile = exclusive_sum(tiles, warp_sums, all);
  for (int i = 0; i < tiles; ++i)
    out.tiles[first_tile + i] = {tid, first + i * kTileRowsMax, min(kTileRowsMax, count - i * kTileRowsMax)};
  if (tid == 0) *out.tile_count = all;
  counts[tid] = first;
  __syncthreads();
  for (int i = tid; i < pairs; i += kThreads) out.pairs[atomicAdd(&counts[expert_ids[i]], 1)] = i;
}

__global__ void __launch_bounds__(256) sum_kernel(Activations a, const uint16_t* y, int hidden) {
  const size_t row = blockIdx.x;
  float weights[kExpertsPerToken + 1];
#pragma unroll
  for (int i = 0; i < kExpertsPerToken; ++i) weights[i] = a.expert_weights[row * kExpertsPerToken + i] / kHiddenScale;
  weights[kExpertsPerToken] = a.shared_gate[row] / kHiddenScale;
  for (int n = static_cast<int>(threadIdx.x) * 8; n < hidden; n += 256 * 8) {
    float sum[8] = {};
#pragma unroll
    for (int i = 0; i <= kExpertsPerToken; ++i) {
      const uint4 v = *reinterpret_cast<const uint4*>(y + (row * (kExpertsPerToken + 1) + i) * hidden + n);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] = fmaf(weights[i], low_bf16(words[j]), sum[2 * j]);
        sum[2 * j + 1] = fmaf(weights[i], high_bf16(words[j]), sum[2 * j + 1]);
      }
    }
    auto* to = reinterpret_cast<float4*>(a.residual + row * hidden + n);
    float4 low = to[0], high = to[1];
    low.x += sum[0], low.y += sum[1], low.z += sum[2], low.w += sum[3];
    high.x += sum[4], high.y += sum[5], high.z += sum[6], high.w += sum[7];
    to[0] = low;
    to[1] = high;
  }
}

}  // namespace

int max_expert_tiles(int rows, int experts) {
  const int pairs = rows * kExpertsPerToken;
  return std::min(pairs, pairs / kTileRowsMax + experts);
}

void group_by_expert(const Launch& launch, const int32_t* expert_ids, int rows, int experts, const Grouping& out) {
  check(experts <= kThreads, "grouping handles up to 1024 experts");
  group_kernel<<<1, kThreads, 0, launch.stream>>>(expert_ids, rows * kExpertsPerToken, experts, out);
  check_launch("group_by_expert");
}

void sum_experts(const Launch& launch, const Activations& a, const uint16_t* y, int rows, int hidden) {
  sum_kernel<<<static_cast<unsigned>(rows), 256, 0, launch.stream>>>(a, y, hidden);
  check_launch("sum_experts");
}

}  // namespace calla::cuda
