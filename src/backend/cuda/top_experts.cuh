#pragma once
// Picks a token's experts from the router's logits: the eight largest (ties to the lowest id) and their softmax
// weights renormalised to sum 1. One warp; used by the route kernel and, redundantly, by the expert kernels of decode.
#include "backend/cuda/ptx.cuh"
#include "model/shape.h"

namespace calla::cuda {

inline constexpr int kMaxFusedExperts = 256;  // that one warp holds eight a lane

// Lane i < 8 returns the i-th expert and its weight (other lanes: undefined). All 32 lanes call it.
struct ChosenExpert {
  int id;
  float weight;
};

__device__ __forceinline__ ChosenExpert choose_experts(const float* logits, int experts) {
  constexpr int kPerLane = kMaxFusedExperts / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float value[kPerLane];
  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane * kPerLane + i;
    value[i] = id < experts ? __ldcg(logits + id) : 0.0f;
    key[i] = id < experts ? max(ordered_bits(value[i]), 1u) : 0u;  // 0: taken
  }
  ChosenExpert mine{0, 0.0f};
  float largest = 0, sum = 0;
#pragma unroll
  for (int round = 0; round < kExpertsPerToken; ++round) {
    uint32_t best = key[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) best = max(best, key[i]);
    const uint32_t winner = __reduce_max_sync(0xffffffffu, best);
    const int owner = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, best == winner))) - 1;
    int id = 0;
    float logit = 0;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!found && key[i] == winner) {
        found = true;
        id = lane * kPerLane + i;
        logit = value[i];
        if (lane == owner) key[i] = 0;
      }
    }
    id = __shfl_sync(0xffffffffu, id, owner);
    logit = __shfl_sync(0xffffffffu, logit, owner);
    if (round == 0) largest = logit;
    const float p = __expf(logit - largest);
    sum += p;
    if (lane == round) mine = {id, p};
  }
  mine.weight /= sum;
  return mine;
}

}  // namespace calla::cuda
