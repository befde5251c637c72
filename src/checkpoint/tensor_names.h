#pragma once
// Tensor names as different writers wrap them, brought to one spelling.
#include <string_view>

namespace calla {

// The name without what a conversion put in front of the language model's parts:
//   language_model.model.layers.0.mlp.gate  (MLX)                  -> layers.0.mlp.gate
//   model.language_model.layers.0.mlp.gate  (original, multimodal) -> layers.0.mlp.gate
//   model.layers.0.mlp.gate                 (text only)            -> layers.0.mlp.gate
//   language_model.lm_head, lm_head                                -> lm_head
std::string_view canonical_name(std::string_view name);

// A part of the checkpoint that the engine has no use for: the vision tower, and the multi-token-prediction layers.
bool is_unused_part(std::string_view name);

}  // namespace calla
