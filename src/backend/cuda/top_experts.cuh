#pragma once
// Picks a token's experts from the router's logits: the eight largest (ties to the lowest id) and their softmax
// weights renormalised to sum 1. One warp; used by the route kernel and, redundantly, by the expert kernels of decode.
#include "backend/cuda/ptx.cuh"
#include "model/shape.h"

namespace calla::cuda {

inline constexpr int kMaxFusedExperts = 256;  // that one warp holds eight a lane

// Lane i < 8 holds the i-th expert and its weight (other lanes: undefined). All 32 lanes choose together.
struct ChosenExpert {
  int id;
  float weight;
};

// Keys order logits to 2^-15 relative (their low byte gives way to the id), far below the rounding of the router's input.
// `logit(id)` reads one. Lane i < 8 returns the i-th expert.
template <class Logit>
__device__ __forceinline__ int choose_ids(const Logit& logit, int experts) {
  constexpr int kPerLane = kMaxFusedExperts / 32;
  static_assert(kPerLane == 8 && kMaxFusedExperts == 256, "the sorting network has eight inputs, ids eight bits");
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = i * 32 + lane;
    key[i] = 0;  // no expert
    if (id < experts) key[i] = max(ordered_bits(logit(id)) & 0xffffff00u, 0x100u) | static_cast<uint32_t>(255 - id);
  }
  // Each lane sorts its keys, largest first (Batcher's network) ...
  constexpr int kNetwork[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {1, 2}, {5, 6},
                                   {0, 4}, {1, 5}, {2, 6}, {3, 7}, {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
  for (int i = 0; i < 19; ++i) {
    const uint32_t a = key[kNetwork[i][0]], b = key[kNetwork[i][1]];
    key[kNetwork[i][0]] = max(a, b);
    key[kNetwork[i][1]] = min(a, b);
  }
  // ... and the warp takes the largest head eight times. Keys are distinct, so one lane moves on.
  int mine = 0;
#pragma unroll
  for (int round = 0; round < kExpertsPerToken; ++round) {
    const uint32_t winner = __reduce_max_sync(0xffffffffu, key[0]);
    if (lane == round) mine = static_cast<int>(255 - (winner & 255));
    const bool taken = key[0] == winner;
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) key[i] = taken ? key[i + 1] : key[i];
    if (taken) key[kPerLane - 1] = 0;
  }
  return mine;
}

// A chosen expert's weight from its logit (-infinity in the other lanes).
__device__ __forceinline__ float expert_weight(float logit) {
  const float share = __expf(logit - __shfl_sync(0xffffffffu, logit, 0));
  return __fdividef(share, sum_lanes(share));
}

__device__ __forceinline__ ChosenExpert choose_experts(const float* logits, int experts) {
  const int id = choose_ids([&](int i) { return __ldcg(logits + i); }, experts);
  return {id, expert_weight(threadIdx.x % 32 < kExpertsPerToken ? __ldcg(logits + id) : -INFINITY)};
}

}  // namespace calla::cuda
