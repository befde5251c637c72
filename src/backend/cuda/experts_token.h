#pragma once
// The whole mixture of experts of one row on Hopper in one kernel: route, experts_up and experts_down (experts_token.cu).
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

// Device memory that the blocks of a launch talk through; zero-filled, then one `generation` of 1. A word is a payload and
// the generation that it belongs to.
struct TokenExchange {
  uint2* logits = nullptr;         // [256] a logit each
  uint2* units = nullptr;          // [kExchangedUnits / 2] two hidden units each
  uint32_t* flags = nullptr;       // [128] the generation of a block's last hidden units
  uint32_t* generation = nullptr;  // counts launches
};
inline constexpr int kExchangedUnits = 9 * 512;
inline constexpr int kTokenWords = 256 + kExchangedUnits / 2, kTokenFlags = 128;

struct ExpertsToken {
  const LayerOnDevice* layer = nullptr;
  float eps = 0;
  Activations slots;
  TokenExchange exchange;
};

// True if all blocks of the kernel run at once, without which it would not end.
bool experts_token_runs(const DeviceInfo& device);
// True if the layer has the one shape that the kernel is written for (the real model's).
bool experts_token_fits(const LayerOnDevice& layer);
// residual += experts(RMSNorm(residual)). Also writes moe_input, expert_ids, expert_weights, shared_gate and hidden.
void experts_token(const Launch& launch, const ExpertsToken& e);

}  // namespace calla::cuda
