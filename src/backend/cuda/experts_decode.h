#pragma once
// The experts of a few rows (decode): two kernels a layer, in three forms.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

inline constexpr int kMinExpertRows = 7,
                     kMaxExpertRows = 32;  // of the *_rows form: for fewer rows the others are faster

struct ExpertsDecode {
  const Experts* experts = nullptr;
  const Experts* shared = nullptr;
  Activations slots;
  int rows = 0;
  int router_width = 0;  // columns of a row of router_logits; the shared gate's logit is column `shared_column`
  int shared_column = 0;
  bool choose = false;  // choose the experts here, from router_logits; else expert_ids and _weights hold them
};

// What the kernels of all forms are told.
template <class Params>
Params experts_params(const ExpertsDecode& e) {
  Params p{};
  p.up = e.experts->up;
  p.down = e.experts->down;
  p.shared_up = e.shared->up;
  p.shared_down = e.shared->down;
  p.a = e.slots;
  p.experts = e.experts->count;
  p.expert_width = e.experts->width;
  p.shared_width = e.shared->width;
  p.router_width = e.router_width;
  p.shared_column = e.shared_column;
  p.hidden = e.experts->down.tiles * kTileRows;
  return p;
}

// moe_input -> hidden = silu(gate) * up for the chosen experts and the shared one. If `choose`, also writes
// expert_ids, expert_weights and shared_gate.
void experts_up_decode(const Launch& launch, const ExpertsDecode& e);
// residual += sum of the experts' down projections, weighted.
void experts_down_decode(const Launch& launch, const ExpertsDecode& e);

// The same on Hopper, with weights streamed through shared memory (experts_stream.cu), where they fit. As above, each row's
// experts are read for it alone.
bool experts_stream_fit(const DeviceInfo& device, const ExpertsDecode& e);
void experts_up_stream(const Launch& launch, const ExpertsDecode& e);
void experts_down_stream(const Launch& launch, const ExpertsDecode& e);

// The same for kMinExpertRows to kMaxExpertRows rows, each expert's weights read once for all rows that chose it (experts_rows.cu),
// where the rows fit in shared memory.
bool experts_rows_fit(const DeviceInfo& device, const ExpertsDecode& e);
void experts_up_rows(const Launch& launch, const ExpertsDecode& e);
void experts_down_rows(const Launch& launch, const ExpertsDecode& e);

}  // namespace calla::cuda
