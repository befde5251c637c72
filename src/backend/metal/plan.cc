#include "backend/metal/plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/error.h"

namespace calla::metal {
namespace {

class Planner {
 public:
  Planner(Device& device, const WeightBuffers& buffers, const ModelShape& shape, const Ablations& ablations,
          bool tensor_ops)
      : device_(device), buffers_(buffers), shape_(shape), ablations_(ablations), tensor_ops_(tensor_ops) {}

  ModelPlan plan(const ModelWeights& weights) {
    ModelPlan plan;
    plan.embedding = bind(weights.embedding, "embed_tokens");
    plan.lm_head = bind(weights.lm_head, "lm_head");
    plan.final_norm = upload(weights.final_norm, "final norm");
    std::vector<float> frequencies(mtl::kRotaryPairs);
    for (int i = 0; i < mtl::kRotaryPairs; ++i)
      frequencies[i] = static_cast<float>(
          std::pow(static_cast<double>(shape_.rope_theta), -static_cast<double>(2 * i) / shape_.rotary_dim));
    plan.rope_frequencies = upload(frequencies, "RoPE frequencies");
    plan.embed = &device_.kernel("embed_rows", {int_constant(0, plan.embedding.bits)});
    plan.head = &rmsnorm_qmv({&plan.lm_head}, true, false);
    int kinds[2] = {0, 0};
    for (const LayerWeights& layer : weights.layers) {
      plan.layers.push_back(plan_layer(layer));
      plan.layers.back().index_in_kind = kinds[layer.gdn ? 0 : 1]++;
    }
    return plan;
  }

 private:
  enum Output { kBf16 = 0, kFloat = 1, kAdded = 2 };

  BoundMatrix bind(const WeightMatrix& m, const char* name) { return bind_matrix(buffers_, m, name); }

  BufferSpan upload(const FloatVector& values, const char* label) {
    const BufferSpan span = device_.allocate(values.size() * sizeof(float), label);
    std::memcpy(span.as<float>(), values.data(), values.size() * sizeof(float));
    return span;
  }

  // Matrices that are not there get the first one's format, so that no code for another one is compiled in.
  const Kernel& rmsnorm_qmv(std::initializer_list<const BoundMatrix*> matrices, bool gather, bool write_normed) {
    std::array<int, 4> bits;
    bits.fill((*matrices.begin())->bits);
    std::transform(matrices.begin(), matrices.end(), bits.begin(), [](const BoundMatrix* m) { return m->bits; });
    return device_.kernel("rmsnorm_qmv",
                          {int_constant(0, bits[0]), int_constant(1, bits[1]), int_constant(2, bits[2]),
                           int_constant(3, bits[3]), bool_constant(4, gather), bool_constant(5, write_normed)});
  }

  TileKernels tiles(const std::string& name, std::initializer_list<FunctionConstant> constants) {
    const std::string suffix = tensor_ops_ ? "_tensor" : "";
    return {&device_.kernel(name + "_16" + suffix, constants), &device_.kernel(name + "_32" + suffix, constants)};
  }

  DenseMatrix dense(const WeightMatrix& m, const char* name, Output output) {
    DenseMatrix result;
    result.matrix = bind(m, name);
    result.gemm = tiles("affine_qmm", {int_constant(0, result.matrix.bits), int_constant(6, output)});
    return result;
  }

  const Kernel& out_kernel(const DenseMatrix& out) {
    return device_.kernel(ablations_.row_parallel ? "qmv_thread_residual" : "qmv_residual",
                          {int_constant(0, out.matrix.bits)});
  }

  LayerPlan plan_layer(const LayerWeights& layer) {
    LayerPlan plan;
    plan.input_norm = upload(layer.input_norm, "input norm");
    plan.post_norm = upload(layer.post_norm, "post-attention norm");
    if (layer.gdn) {
      const GdnWeights& w = *layer.gdn;
      GdnPlan& p = plan.gdn.emplace();
      p.qkv = dense(w.in_qkv, "in_proj_qkv", kBf16);
      p.z = dense(w.in_z, "in_proj_z", kBf16);
      p.a = dense(w.in_a, "in_proj_a", kFloat);
      p.b = dense(w.in_b, "in_proj_b", kFloat);
      p.out = dense(w.out, "out_proj", kAdded);
      p.conv = upload(w.conv, "convolution");
      p.a_log = upload(w.a_log, "A_log");
      p.dt_bias = upload(w.dt_bias, "dt_bias");
      p.norm = upload(w.norm, "gated norm");
      p.project = &rmsnorm_qmv({&p.qkv.matrix, &p.z.matrix, &p.a.matrix, &p.b.matrix}, false, false);
      p.project_out = &out_kernel(p.out);
    } else {
      const AttentionWeights& w = *layer.attention;
      AttentionPlan& p = plan.attention.emplace();
      p.q = dense(w.q, "q_proj", kBf16);
      p.k = dense(w.k, "k_proj", kBf16);
      p.v = dense(w.v, "v_proj", kBf16);
      p.out = dense(w.out, "o_proj", kAdded);
      p.q_norm = upload(w.q_norm, "q norm");
      p.k_norm = upload(w.k_norm, "k norm");
      p.project = &rmsnorm_qmv({&p.q.matrix, &p.k.matrix, &p.v.matrix}, false, false);
      p.project_out = &out_kernel(p.out);
    }
    plan.moe = plan_moe(layer.moe);
    return plan;
  }

  MoePlan plan_moe(const MoeWeights& w) {
    MoePlan p;
    p.router = dense(w.router, "mlp.gate", kFloat);
    p.shared_expert_gate = dense(w.shared_expert_gate, "mlp.shared_expert_gate", kFloat);
    p.gate = bind(w.expert_gate_proj, "switch_mlp.gate_proj");
    p.up = bind(w.expert_up_proj, "switch_mlp.up_proj");
    p.down = bind(w.expert_down_proj, "switch_mlp.down_proj");
    p.shared_gate = bind(w.shared_gate_proj, "shared_expert.gate_proj");
    p.shared_up = bind(w.shared_up_proj, "shared_expert.up_proj");
    p.shared_down = bind(w.shared_down_proj, "shared_expert.down_proj");
    same_format(p.gate, p.up, "switch_mlp.gate_proj and up_proj");
    same_format(p.shared_gate, p.shared_up, "shared_expert.gate_proj and up_proj");
    p.route = &rmsnorm_qmv({&p.router.matrix, &p.shared_expert_gate.matrix}, false, true);
    const std::initializer_list<FunctionConstant> up = {int_constant(0, p.gate.bits),
                                                        int_constant(1, p.shared_gate.bits)};
    const std::initializer_list<FunctionConstant> down = {int_constant(0, p.down.bits),
                                                          int_constant(1, p.shared_down.bits)};
    p.up_qmv = &device_.kernel("experts_up_qmv", up);
    p.down_qmv = &device_.kernel("experts_down_qmv", down);
    p.gate_up_apart = &device_.kernel("experts_qmv", up);
    p.down_apart = &device_.kernel("experts_qmv", down);
    p.up_qmm = tiles("experts_up_qmm", up);
    p.down_qmm = tiles("experts_down_qmm", down);
    if (ablations_.fused_dequant) {
      p.up_qmm_bf16 = tiles("experts_up_qmm", {int_constant(0, 16), int_constant(1, p.shared_gate.bits)});
      p.down_qmm_bf16 = tiles("experts_down_qmm", {int_constant(0, 16), int_constant(1, p.shared_down.bits)});
      p.dequantise_up = &device_.kernel("dequantise", {int_constant(0, p.gate.bits)});
      p.dequantise_down = &device_.kernel("dequantise", {int_constant(0, p.down.bits)});
    }
    return p;
  }

  static void same_format(const BoundMatrix& a, const BoundMatrix& b, const char* names) {
    if (a.bits != b.bits || a.shape.group_shift != b.shape.group_shift)
      throw CheckpointError(std::string(names) + " differ in their quantisation; the Metal kernels read them together");
  }

  Device& device_;
  const WeightBuffers& buffers_;
  const ModelShape& shape_;
  const Ablations& ablations_;
  const bool tensor_ops_;
};

}  // namespace

void check_matrix(const WeightMatrix& m, const char* name) {
  const auto refuse = [&](const std::string& why) {
    throw CheckpointError(std::string(name) + ": " + why + ", which the Metal kernels do not have");
  };
  if (m.k % mtl::kTileK != 0) refuse(std::to_string(m.k) + " inputs, not a multiple of 64");
  if (m.format == WeightFormat::kBf16) return;
  if (m.bits != 4 && m.bits != 8) refuse(std::to_string(m.bits) + "-bit codes");
  if (m.group < 32 || !std::has_single_bit(static_cast<unsigned>(m.group)) || m.k % m.group != 0)
    refuse("quantisation groups of " + std::to_string(m.group));
}

BoundMatrix bind_matrix(const WeightBuffers& buffers, const WeightMatrix& m, const char* name) {
  check_matrix(m, name);
  BoundMatrix bound;
  bound.stack = m.stack;
  const size_t rows = static_cast<size_t>(m.stack) * m.n;
  if (m.format == WeightFormat::kBf16) {
    bound.bits = 16;
    bound.shape = {m.n, m.k, 6};
    bound.codes = bound.scales = bound.biases = buffers.at(m.values, rows * m.k * sizeof(bf16));
    return bound;
  }
  bound.bits = m.bits;
  bound.shape = {m.n, m.k, std::countr_zero(static_cast<unsigned>(m.group))};
  bound.codes = buffers.at(m.codes, rows * m.words_per_row() * sizeof(uint32_t));
  bound.scales = buffers.at(m.scales, rows * m.groups_per_row() * sizeof(bf16));
  bound.biases = buffers.at(m.biases, rows * m.groups_per_row() * sizeof(bf16));
  return bound;
}

ModelPlan make_plan(Device& device, const WeightBuffers& buffers, const ModelShape& shape, const ModelWeights& weights,
                    const Ablations& ablations, bool tensor_ops) {
  return Planner(device, buffers, shape, ablations, tensor_ops).plan(weights);
}

}  // namespace calla::metal
