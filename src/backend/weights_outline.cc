#include "backend/weights_outline.h"

#include "backend/sampling.h"

namespace calla {
namespace {

WeightMatrix matrix(int stack, int n, int k, int bits, int group) {
  WeightMatrix m;
  m.stack = stack;
  m.n = n;
  m.k = k;
  m.bits = bits;
  m.group = group;
  return m;
}

// Numbers that bf16 holds exactly, as a checkpoint's would be.
class Vectors {
 public:
  explicit Vectors(uint64_t seed) : seed_(seed) {}
  FloatVector make(int n, float mean, float spread) {
    FloatVector v(static_cast<size_t>(n));
    for (float& x : v) x = to_float(to_bf16(mean + spread * (2 * draw_uniform(seed_, ++count_) - 1)));
    return v;
  }

 private:
  const uint64_t seed_;
  uint64_t count_ = 0;
};

}  // namespace

ModelWeights outline_weights(const ModelShape& shape, uint64_t seed, int bits, int group) {
  Vectors vectors(seed);
  const auto plain = [&](int n, int k) { return matrix(1, n, k, bits, group); };
  ModelWeights w;
  w.embedding = plain(shape.vocab, shape.hidden);
  for (const LayerKind kind : shape.layer_kinds) {
    LayerWeights& layer = w.layers.emplace_back();
    layer.input_norm = vectors.make(shape.hidden, 1, 0.3f);
    layer.post_norm = vectors.make(shape.hidden, 1, 0.3f);
    if (kind == LayerKind::kGatedDeltaNet) {
      GdnWeights& gdn = layer.gdn.emplace();
      gdn.in_qkv = plain(shape.gdn_conv_width(), shape.hidden);
      gdn.in_z = plain(shape.gdn_value_width(), shape.hidden);
      gdn.in_a = plain(shape.gdn_value_heads, shape.hidden);
      gdn.in_b = plain(shape.gdn_value_heads, shape.hidden);
      gdn.out = plain(shape.hidden, shape.gdn_value_width());
      gdn.conv = vectors.make(shape.gdn_conv_width() * kConvWidth, 0, 0.8f);
      gdn.a_log = vectors.make(shape.gdn_value_heads, 0, 2);
      gdn.dt_bias = vectors.make(shape.gdn_value_heads, -2, 2);
      gdn.norm = vectors.make(kGdnHeadDim, 1, 0.3f);
    } else {
      AttentionWeights& attention = layer.attention.emplace();
      attention.q = plain(2 * shape.q_width(), shape.hidden);
      attention.k = plain(shape.kv_width(), shape.hidden);
      attention.v = plain(shape.kv_width(), shape.hidden);
      attention.out = plain(shape.hidden, shape.q_width());
      attention.q_norm = vectors.make(kHeadDim, 1, 0.3f);
      attention.k_norm = vectors.make(kHeadDim, 1, 0.3f);
    }
    MoeWeights& moe = layer.moe;
    const auto experts = [&](int n, int k) { return matrix(shape.experts, n, k, bits, group); };
    moe.router = matrix(1, shape.experts, shape.hidden, 8, kQuantGroup);
    moe.expert_gate_proj = experts(shape.expert_width, shape.hidden);
    moe.expert_up_proj = experts(shape.expert_width, shape.hidden);
    moe.expert_down_proj = experts(shape.hidden, shape.expert_width);
    moe.shared_gate_proj = plain(shape.shared_expert_width, shape.hidden);
    moe.shared_up_proj = plain(shape.shared_expert_width, shape.hidden);
    moe.shared_down_proj = plain(shape.hidden, shape.shared_expert_width);
    moe.shared_expert_gate = matrix(1, 1, shape.hidden, 8, kQuantGroup);
  }
  w.final_norm = vectors.make(shape.hidden, 1, 0.3f);
  w.lm_head = plain(shape.vocab, shape.hidden);
  return w;
}

}  // namespace calla
