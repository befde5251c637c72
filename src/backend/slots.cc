#include "backend/backend.h"
#include "base/check.h"

namespace calla {

int slot_width(Slot slot, const ModelShape& shape) {
  switch (slot) {
    case Slot::kResidual:
    case Slot::kMoeInput:
      return shape.hidden;
    case Slot::kGdnQkv:
      return shape.gdn_conv_width();
    case Slot::kGdnZ:
      return shape.gdn_value_width();
    case Slot::kGdnA:
    case Slot::kGdnB:
      return shape.gdn_value_heads;
    case Slot::kAttnQGate:
      return 2 * shape.q_width();
    case Slot::kAttnK:
    case Slot::kAttnV:
      return shape.kv_width();
    case Slot::kAttnQ:
      return shape.q_width();
    case Slot::kMixed:
      return shape.mixer_width();
    case Slot::kExpertIds:
    case Slot::kExpertWeights:
      return kExpertsPerToken;
    case Slot::kSharedGate:
      return 1;
    case Slot::kExpertHidden:
      return kExpertsPerToken * shape.expert_width + shape.shared_expert_width;
    case Slot::kLogits:
      return shape.vocab;
  }
  check(false, "unknown slot");
  return 0;
}

const char* slot_name(Slot slot) {
  switch (slot) {
    case Slot::kResidual:
      return "residual";
    case Slot::kGdnQkv:
      return "gdn_qkv";
    case Slot::kGdnZ:
      return "gdn_z";
    case Slot::kGdnA:
      return "gdn_a";
    case Slot::kGdnB:
      return "gdn_b";
    case Slot::kAttnQGate:
      return "attn_q_gate";
    case Slot::kAttnK:
      return "attn_k";
    case Slot::kAttnV:
      return "attn_v";
    case Slot::kAttnQ:
      return "attn_q";
    case Slot::kMixed:
      return "mixed";
    case Slot::kMoeInput:
      return "moe_input";
    case Slot::kExpertIds:
      return "expert_ids";
    case Slot::kExpertWeights:
      return "expert_weights";
    case Slot::kSharedGate:
      return "shared_gate";
    case Slot::kExpertHidden:
      return "expert_hidden";
    case Slot::kLogits:
      return "logits";
  }
  return "?";
}

}  // namespace calla
