#include "model/cost.h"

#include <initializer_list>

namespace calla {
namespace {

uint64_t chosen_bytes(const WeightMatrix& experts) { return experts.bytes() / experts.stack * kExpertsPerToken; }

double elements(const WeightMatrix& matrix) { return static_cast<double>(matrix.n) * matrix.k; }

// Calls visit(matrix, copies that one token uses) for all matrices of a layer.
template <class Visit>
void for_each_matrix(const LayerWeights& layer, Visit visit) {
  if (layer.gdn)
    for (const WeightMatrix* m :
         {&layer.gdn->in_qkv, &layer.gdn->in_z, &layer.gdn->in_a, &layer.gdn->in_b, &layer.gdn->out})
      visit(*m, 1);
  if (layer.attention)
    for (const WeightMatrix* m : {&layer.attention->q, &layer.attention->k, &layer.attention->v, &layer.attention->out})
      visit(*m, 1);
  const MoeWeights& moe = layer.moe;
  for (const WeightMatrix* m :
       {&moe.router, &moe.shared_gate_proj, &moe.shared_up_proj, &moe.shared_down_proj, &moe.shared_expert_gate})
    visit(*m, 1);
  for (const WeightMatrix* m : {&moe.expert_gate_proj, &moe.expert_up_proj, &moe.expert_down_proj})
    visit(*m, kExpertsPerToken);
}

}  // namespace

DecodeBytes decode_bytes(const ModelShape& shape, const ModelWeights& weights, int context) {
  DecodeBytes bytes;
  bytes.weights = weights.embedding.bytes() / static_cast<uint64_t>(weights.embedding.n) + weights.lm_head.bytes();
  for (const LayerWeights& layer : weights.layers)
    for_each_matrix(
        layer, [&](const WeightMatrix& m, int copies) { bytes.weights += copies == 1 ? m.bytes() : chosen_bytes(m); });
  const uint64_t state = static_cast<uint64_t>(shape.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim * sizeof(float);
  const uint64_t tail = static_cast<uint64_t>(kConvWidth - 1) * static_cast<uint64_t>(shape.gdn_conv_width()) * 2;
  bytes.state = 2 * static_cast<uint64_t>(shape.gdn_layers()) * (state + tail);
  bytes.kv = static_cast<uint64_t>(shape.attention_layers()) * 2 * static_cast<uint64_t>(shape.kv_width()) * 2 *
             static_cast<uint64_t>(context);
  return bytes;
}

double prefill_flops(const ModelShape& shape, const ModelWeights& weights, int tokens) {
  double per_token = 0;
  for (const LayerWeights& layer : weights.layers)
    for_each_matrix(layer, [&](const WeightMatrix& m, int copies) { per_token += 2 * elements(m) * copies; });
  // The state of each head: decay, read, update, read: 7 operations an element.
  per_token += 7.0 * shape.gdn_layers() * shape.gdn_value_heads * kGdnHeadDim * kGdnHeadDim;
  const double pairs = 0.5 * static_cast<double>(tokens) * (tokens + 1.0);
  const double attention = 4.0 * shape.attention_layers() * shape.q_width() * pairs;
  return per_token * tokens + attention + 2 * elements(weights.lm_head);
}

}  // namespace calla
