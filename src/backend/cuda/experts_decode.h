#pragma once
// The experts of one to eight rows (decode): two kernels a layer.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

struct ExpertsDecode {
  const Experts* experts = nullptr;
  const Experts* shared = nullptr;
  Activations slots;
  int rows = 0;
  int router_width = 0;  // columns of a row of router_logits; the shared gate's logit is column `shared_column`
  int shared_column = 0;
  bool choose = false;  // choose the experts here, from router_logits; else expert_ids and _weights hold them
};

// moe_input -> hidden = silu(gate) * up for the chosen experts and the shared one. If `choose`, also writes
// expert_ids, expert_weights and shared_gate.
void experts_up_decode(const Launch& launch, const ExpertsDecode& e);
// residual += sum of the experts' down projections, weighted.
void experts_down_decode(const Launch& launch, const ExpertsDecode& e);

// The same on Hopper, with weights streamed through shared memory (experts_stream.cu), where they fit.
bool experts_stream_fit(const DeviceInfo& device, const ExpertsDecode& e);
void experts_up_stream(const Launch& launch, const ExpertsDecode& e);
void experts_down_stream(const Launch& launch, const ExpertsDecode& e);

}  // namespace calla::cuda
