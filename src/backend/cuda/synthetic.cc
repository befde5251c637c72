#include "backend/cuda/synthetic.h"

#include "backend/sampling.h"

namespace calla::cuda {
namespace {

class Maker {
 public:
  WeightMatrix matrix(int n, int k, int bits = 4, int stack = 1) const {
    WeightMatrix m;
    m.stack = stack;
    m.n = n;
    m.k = k;
    m.bits = bits;
    m.group = kQuantGroup;
    return m;
  }
  FloatVector vector(int n, float mean, float spread) {
    FloatVector v(static_cast<size_t>(n));
    for (float& x : v) x = mean + spread * (2 * draw_uniform(17, ++count_) - 1);
    return v;
  }

 private:
  uint64_t count_ = 0;
};

}  // namespace

ModelWeights synthetic_weights(const ModelShape& shape) {
  Maker make;
  ModelWeights w;
  const int hidden = shape.hidden;
  w.embedding = make.matrix(shape.vocab, hidden);
  w.lm_head = make.matrix(shape.vocab, hidden);
  w.final_norm = make.vector(hidden, 1, 0.3f);
  for (LayerKind kind : shape.layer_kinds) {
    LayerWeights& layer = w.layers.emplace_back();
    layer.input_norm = make.vector(hidden, 1, 0.3f);
    layer.post_norm = make.vector(hidden, 1, 0.3f);
    if (kind == LayerKind::kGatedDeltaNet) {
      GdnWeights& gdn = layer.gdn.emplace();
      gdn.in_qkv = make.matrix(shape.gdn_conv_width(), hidden);
      gdn.in_z = make.matrix(shape.gdn_value_width(), hidden);
      gdn.in_a = make.matrix(shape.gdn_value_heads, hidden);
      gdn.in_b = make.matrix(shape.gdn_value_heads, hidden);
      gdn.out = make.matrix(hidden, shape.gdn_value_width());
      gdn.conv = make.vector(shape.gdn_conv_width() * kConvWidth, 0, 0.8f);
      gdn.a_log = make.vector(shape.gdn_value_heads, 0, 2);
      gdn.dt_bias = make.vector(shape.gdn_value_heads, -2, 2);
      gdn.norm = make.vector(kGdnHeadDim, 1, 0.3f);
    } else {
      AttentionWeights& attention = layer.attention.emplace();
      attention.q = make.matrix(2 * shape.q_width(), hidden);
      attention.k = make.matrix(shape.kv_width(), hidden);
      attention.v = make.matrix(shape.kv_width(), hidden);
      attention.out = make.matrix(hidden, shape.q_width());
      attention.q_norm = make.vector(kHeadDim, 1, 0.3f);
      attention.k_norm = make.vector(kHeadDim, 1, 0.3f);
    }
    MoeWeights& moe = layer.moe;
    moe.router = make.matrix(shape.experts, hidden, 8);
    moe.expert_gate_proj = make.matrix(shape.expert_width, hidden, 4, shape.experts);
    moe.expert_up_proj = make.matrix(shape.expert_width, hidden, 4, shape.experts);
    moe.expert_down_proj = make.matrix(hidden, shape.expert_width, 4, shape.experts);
    moe.shared_gate_proj = make.matrix(shape.shared_expert_width, hidden);
    moe.shared_up_proj = make.matrix(shape.shared_expert_width, hidden);
    moe.shared_down_proj = make.matrix(hidden, shape.shared_expert_width);
    moe.shared_expert_gate = make.matrix(1, hidden, 8);
  }
  return w;
}

}  // namespace calla::cuda
