#pragma once
// Weights without a checkpoint: every matrix of a shape with its sizes and format but without memory (codes, scales and
// biases are null), and random small vectors. RandomModel gives the matrices contents on the host; the cuda backend takes
// an outline as it is and fills it on the device.
#include <cstdint>

#include "backend/weights.h"
#include "model/shape.h"

namespace calla {

// `bits` and `group` are those of every matrix but the router and the shared expert's gate, which have 8 bits in groups
// of 64 as in real checkpoints. The same seed gives the same vectors.
ModelWeights outline_weights(const ModelShape& shape, uint64_t seed, int bits = 4, int group = 64);

// Calls visit(matrix) for every matrix, in the order of the forward pass; Weights is ModelWeights, const or not.
template <class Weights, class Visit>
void for_each_matrix(Weights& weights, Visit visit) {
  visit(weights.embedding);
  for (auto& layer : weights.layers) {
    if (layer.gdn) {
      auto& gdn = *layer.gdn;
      for (auto* m : {&gdn.in_qkv, &gdn.in_z, &gdn.in_a, &gdn.in_b, &gdn.out}) visit(*m);
    }
    if (layer.attention) {
      auto& attention = *layer.attention;
      for (auto* m : {&attention.q, &attention.k, &attention.v, &attention.out}) visit(*m);
    }
    auto& moe = layer.moe;
    for (auto* m : {&moe.router, &moe.expert_gate_proj, &moe.expert_up_proj, &moe.expert_down_proj,
                    &moe.shared_gate_proj, &moe.shared_up_proj, &moe.shared_down_proj, &moe.shared_expert_gate})
      visit(*m);
  }
  visit(weights.lm_head);
}

}  // namespace calla
