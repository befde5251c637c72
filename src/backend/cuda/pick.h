#pragma once
// Picks tokens on the device, by the definition in backend/sampling.h.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"

namespace calla::cuda {

struct PickParams {
  StepView step;
  const float* logits = nullptr;  // [head][vocab]
  int vocab = 0;
  TokenCount* counts = nullptr;    // [slot][vocab]
  TokenId* last_picked = nullptr;  // [slot]
  TokenId* results = nullptr;      // page-locked host memory
  float* weights = nullptr;        // scratch [head][vocab], for sampling
  uint64_t* best = nullptr;        // scratch [head], zero between steps
  uint32_t* arrived = nullptr;     // scratch [head], zero between steps
};

// Every head is greedy, without penalties or masks.
void pick_greedy(const Launch& launch, const PickParams& p);
// Any sampling parameters.
void pick_sampled(const Launch& launch, const PickParams& p);

}  // namespace calla::cuda
