#pragma once
// What the tests at the real widths share.
#include <string>
#include <vector>

#include "backend/metal/options.h"
#include "selftest/random_model.h"

namespace calla {

inline ModelShape one_layer_of_each_kind() {
  ModelShape shape = real_shape(4);
  shape.layer_kinds = {LayerKind::kGatedDeltaNet, LayerKind::kAttention};
  return shape;
}

// All but embedding, head and pick, which Decode covers.
inline std::vector<std::string> layer_stages() {
  return {"project_gdn",      "mix_gdn", "project_attention", "prepare_attention", "attend",
          "project_residual", "route",   "experts_up",        "experts_down"};
}

// The start-up check of tensor operations on fewer rows than max_rows: in software it is the slowest part of a start.
inline metal::MetalTestOptions few_rows_checked() {
  metal::MetalTestOptions options;
  options.tensor_check_rows = 17;
  return options;
}

}  // namespace calla
