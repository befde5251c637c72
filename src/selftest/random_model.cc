#include "selftest/random_model.h"

#include <cmath>

namespace calla {
namespace {

std::vector<LayerKind> layer_kinds(int layers) {
  std::vector<LayerKind> kinds(layers, LayerKind::kGatedDeltaNet);
  for (int i = 3; i < layers; i += 4) kinds[i] = LayerKind::kAttention;
  return kinds;
}

}  // namespace

ModelShape tiny_shape(int layers) {
  ModelShape shape;
  shape.hidden = 256;
  shape.layer_kinds = layer_kinds(layers);
  shape.vocab = 4096;
  shape.q_heads = 8;
  shape.kv_heads = 1;
  shape.rotary_dim = 64;
  shape.rope_theta = 1e7f;
  shape.gdn_key_heads = 2;
  shape.gdn_value_heads = 4;
  shape.experts = 32;
  shape.expert_width = 64;
  shape.shared_expert_width = 64;
  shape.max_context = 32768;
  return shape;
}

ModelShape real_shape(int layers) {
  ModelShape shape;
  shape.hidden = 2048;
  shape.layer_kinds = layer_kinds(layers);
  shape.vocab = 248320;
  shape.q_heads = 16;
  shape.kv_heads = 2;
  shape.rotary_dim = 64;
  shape.rope_theta = 1e7f;
  shape.gdn_key_heads = 16;
  shape.gdn_value_heads = 32;
  shape.experts = 256;
  shape.expert_width = 512;
  shape.shared_expert_width = 512;
  shape.max_context = 262144;
  return shape;
}

RandomModel::RandomModel(const ModelShape& shape, uint64_t seed, int bits, int group, bool filled)
    : shape_(shape), filled_(filled), state_(seed * 0x9e3779b97f4a7c15u + 1) {
  const auto plain = [&](int n, int k) { return matrix(1, n, k, bits, group); };
  weights_.embedding = plain(shape.vocab, shape.hidden);
  for (LayerKind kind : shape.layer_kinds) {
    LayerWeights& layer = weights_.layers.emplace_back();
    layer.input_norm = vector(shape.hidden, 1, 0.3f);
    layer.post_norm = vector(shape.hidden, 1, 0.3f);
    if (kind == LayerKind::kGatedDeltaNet) {
      GdnWeights& gdn = layer.gdn.emplace();
      gdn.in_qkv = plain(shape.gdn_conv_width(), shape.hidden);
      gdn.in_z = plain(shape.gdn_value_width(), shape.hidden);
      gdn.in_a = plain(shape.gdn_value_heads, shape.hidden);
      gdn.in_b = plain(shape.gdn_value_heads, shape.hidden);
      gdn.out = plain(shape.hidden, shape.gdn_value_width());
      gdn.conv = vector(shape.gdn_conv_width() * kConvWidth, 0, 0.8f);
      gdn.a_log = vector(shape.gdn_value_heads, 0, 2);
      gdn.dt_bias = vector(shape.gdn_value_heads, -2, 2);
      gdn.norm = vector(kGdnHeadDim, 1, 0.3f);
    } else {
      AttentionWeights& attention = layer.attention.emplace();
      attention.q = plain(2 * shape.q_width(), shape.hidden);
      attention.k = plain(shape.kv_width(), shape.hidden);
      attention.v = plain(shape.kv_width(), shape.hidden);
      attention.out = plain(shape.hidden, shape.q_width());
      attention.q_norm = vector(kHeadDim, 1, 0.3f);
      attention.k_norm = vector(kHeadDim, 1, 0.3f);
    }
    MoeWeights& moe = layer.moe;
    moe.router = matrix(1, shape.experts, shape.hidden, 8, kQuantGroup);
    moe.expert_gate_proj = matrix(shape.experts, shape.expert_width, shape.hidden, bits, group);
    moe.expert_up_proj = matrix(shape.experts, shape.expert_width, shape.hidden, bits, group);
    moe.expert_down_proj = matrix(shape.experts, shape.hidden, shape.expert_width, bits, group);
    moe.shared_gate_proj = plain(shape.shared_expert_width, shape.hidden);
    moe.shared_up_proj = plain(shape.shared_expert_width, shape.hidden);
    moe.shared_down_proj = plain(shape.hidden, shape.shared_expert_width);
    moe.shared_expert_gate = matrix(1, 1, shape.hidden, 8, kQuantGroup);
  }
  weights_.final_norm = vector(shape.hidden, 1, 0.3f);
  weights_.lm_head = plain(shape.vocab, shape.hidden);
}

WeightMatrix RandomModel::matrix(int stack, int n, int k, int bits, int group) {
  WeightMatrix m;
  m.stack = stack;
  m.n = n;
  m.k = k;
  m.bits = bits;
  m.group = group;
  if (!filled_) return m;
  const size_t rows = static_cast<size_t>(stack) * n;
  const size_t words = rows * m.words_per_row(), groups = rows * m.groups_per_row();
  codes_.push_back(std::make_unique_for_overwrite<uint32_t[]>(words));
  for (size_t i = 0; i + 1 < words; i += 2) {
    const uint64_t bits64 = next();
    codes_.back()[i] = static_cast<uint32_t>(bits64);
    codes_.back()[i + 1] = static_cast<uint32_t>(bits64 >> 32);
  }
  if (words % 2) codes_.back()[words - 1] = static_cast<uint32_t>(next());
  m.codes = codes_.back().get();
  numbers_.push_back(std::make_unique<bf16[]>(2 * groups));
  bf16* scales = numbers_.back().get();
  bf16* biases = scales + groups;
  const float largest = static_cast<float>((1 << bits) - 1);
  const float step = 3.46f / (largest * std::sqrt(static_cast<float>(k)));  // uniform codes: sd = step * largest / 3.46
  for (size_t i = 0; i < groups; ++i) {
    const float sign = next() & 1 ? 1.0f : -1.0f;
    const float scale = sign * step * (1 + 0.4f * uniform());
    scales[i] = to_bf16(scale);
    biases[i] = to_bf16(-scale * largest / 2 * (1 + 0.05f * uniform()));
  }
  m.scales = scales;
  m.biases = biases;
  return m;
}

FloatVector RandomModel::vector(int n, float mean, float spread) {
  FloatVector v(n);
  for (float& x : v) x = to_float(to_bf16(mean + spread * uniform()));
  return v;
}

uint64_t RandomModel::next() {
  uint64_t x = state_ += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

float RandomModel::uniform() { return static_cast<float>(next() >> 40) * 0x1.0p-23f - 1; }

}  // namespace calla
