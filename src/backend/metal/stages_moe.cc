// The sparse MoE.
#include <algorithm>

#include "backend/metal/metal_backend.h"
#include "base/check.h"

namespace calla::metal {
namespace {

size_t ceil_div(int a, int b) { return static_cast<size_t>((a + b - 1) / b); }

}  // namespace

void MetalBackend::route(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const MoePlan& moe = plan.moe;
  const std::array<Output, 2> outputs = {
      {{&moe.router, scratch_.router_logits, true}, {&moe.shared_expert_gate, scratch_.shared_logit, true}}};
  project(*moe.route, plan.post_norm, outputs, slot(Slot::kMoeInput), true);
  encoder_.dispatch(*kernels_.router_topk, mtl::TopkParams{shape_.experts},
                    {reads(scratch_.router_logits), reads(scratch_.shared_logit), writes(slot(Slot::kExpertIds)),
                     writes(slot(Slot::kExpertWeights)), writes(slot(Slot::kSharedGate))},
                    {static_cast<size_t>(rows_)}, mtl::kLanes);
}

void MetalBackend::group_rows(int /*layer*/) {
  if (!policy_.use_grouped(rows_)) return;
  mtl::GroupParams params{};
  params.rows = rows_;
  params.experts = shape_.experts;
  params.tile_rows = expert_tile_;
  params.up_tiles =
      static_cast<int>(ceil_div(std::max(shape_.expert_width, shape_.shared_expert_width), mtl::kTileN / 2));
  params.down_tiles = static_cast<int>(ceil_div(shape_.hidden, mtl::kTileN));
  if (ablations_.gpu_routing) {
    group_rows_on_cpu(params);
    return;
  }
  encoder_.dispatch(
      *kernels_.moe_group_rows, params,
      {reads(slot(Slot::kExpertIds)), writes(scratch_.sorted), writes(scratch_.blocks), writes(scratch_.groups)}, {1},
      mtl::kGroupThreads);
}

// The control of `gpu-routing`: stop, look at the choices, group them here, go on.
void MetalBackend::group_rows_on_cpu(const mtl::GroupParams& params) {
  synchronise();
  const auto* ids = slot(Slot::kExpertIds).as<int32_t>();
  auto* sorted = scratch_.sorted.as<int32_t>();
  auto* blocks = scratch_.blocks.as<mtl::ExpertBlock>();
  std::vector<std::vector<int32_t>> pairs(params.experts + 1);
  for (int row = 0; row < params.rows; ++row) {
    for (int i = 0; i < kExpertsPerToken; ++i) pairs[ids[row * kExpertsPerToken + i]].push_back(row * mtl::kPairs + i);
    pairs[params.experts].push_back(row * mtl::kPairs + kExpertsPerToken);
  }
  int first = 0;
  uint32_t count = 0;
  for (int expert = 0; expert <= params.experts; ++expert) {
    const auto rows = static_cast<int>(pairs[expert].size());
    std::copy(pairs[expert].begin(), pairs[expert].end(), sorted + first);
    for (int i = 0; i < rows; i += params.tile_rows)
      blocks[count++] = {expert, first + i, std::min(params.tile_rows, rows - i)};
    first += rows;
  }
  const std::array<uint32_t, 6> groups = {static_cast<uint32_t>(params.up_tiles),   count, 1,
                                          static_cast<uint32_t>(params.down_tiles), count, 1};
  std::copy(groups.begin(), groups.end(), scratch_.groups.as<uint32_t>());
}

mtl::ExpertsParams MetalBackend::up_params(const MoePlan& moe) const {
  mtl::ExpertsParams p{};
  p.expert = moe.gate.shape;
  p.shared = moe.shared_gate.shape;
  p.in_stride = shape_.hidden;
  p.out_stride = slot_width(Slot::kExpertHidden, shape_);
  p.experts = shape_.experts;
  return p;
}

mtl::ExpertsParams MetalBackend::down_params(const MoePlan& moe) const {
  mtl::ExpertsParams p{};
  p.expert = moe.down.shape;
  p.shared = moe.shared_down.shape;
  p.in_stride = slot_width(Slot::kExpertHidden, shape_);
  p.out_stride = shape_.hidden;
  p.experts = shape_.experts;
  return p;
}

// The control of `fused-dequant`: the whole stack expanded in memory, then the same GEMM over bf16.
BoundMatrix MetalBackend::expanded(const Kernel& dequantise, const BoundMatrix& m, int which) {
  const BufferSpan& out = scratch_.expanded[which];
  encoder_.dispatch(dequantise, mtl::DequantiseParams{m.shape, m.stack},
                    {constant(m.codes), constant(m.scales), constant(m.biases), writes(out)},
                    {ceil_div(m.shape.k, 8 * mtl::kLanes), static_cast<size_t>(m.stack) * m.shape.n}, mtl::kLanes,
                    m.weights());
  BoundMatrix bf16_matrix = m;
  bf16_matrix.bits = 16;
  bf16_matrix.codes = bf16_matrix.scales = bf16_matrix.biases = out;
  return bf16_matrix;
}

void MetalBackend::experts_up(int layer) {
  const MoePlan& moe = plan_.layers[layer].moe;
  const double work =
      2.0 * rows_ * shape_.hidden * (kExpertsPerToken * shape_.expert_width + shape_.shared_expert_width);
  const BufferSpan& hidden = slot(Slot::kExpertHidden);
  if (!policy_.use_grouped(rows_)) {
    if (ablations_.fused_chains) {
      experts_up_apart(moe);
      return;
    }
    const int width = std::max(shape_.expert_width, shape_.shared_expert_width);
    encoder_.dispatch(
        *moe.up_qmv, up_params(moe),
        {reads(slot(Slot::kMoeInput)), reads(slot(Slot::kExpertIds)), constant(moe.gate.codes),
         constant(moe.gate.scales), constant(moe.gate.biases), constant(moe.up.codes), constant(moe.up.scales),
         constant(moe.up.biases), constant(moe.shared_gate.codes), constant(moe.shared_gate.scales),
         constant(moe.shared_gate.biases), constant(moe.shared_up.codes), constant(moe.shared_up.scales),
         constant(moe.shared_up.biases), writes(hidden)},
        {ceil_div(width, mtl::kQmvGroupRows), static_cast<size_t>(rows_) * mtl::kPairs}, mtl::kQmvThreads, work);
    return;
  }
  BoundMatrix gate = moe.gate, up = moe.up;
  const Kernel* kernel = &moe.up_qmm.of(expert_tile_);
  if (ablations_.fused_dequant) {
    gate = expanded(*moe.dequantise_up, moe.gate, 0);
    up = expanded(*moe.dequantise_up, moe.up, 1);
    kernel = &moe.up_qmm_bf16.of(expert_tile_);
  }
  // An expanded matrix has just been written; the file's are constant.
  const auto matrix = [&](const BufferSpan& span) { return ablations_.fused_dequant ? reads(span) : constant(span); };
  encoder_.dispatch_indirect(
      *kernel, up_params(moe),
      {reads(slot(Slot::kMoeInput)), reads(scratch_.sorted), reads(scratch_.blocks), matrix(gate.codes),
       matrix(gate.scales), matrix(gate.biases), matrix(up.codes), matrix(up.scales), matrix(up.biases),
       constant(moe.shared_gate.codes), constant(moe.shared_gate.scales), constant(moe.shared_gate.biases),
       constant(moe.shared_up.codes), constant(moe.shared_up.scales), constant(moe.shared_up.biases), writes(hidden)},
      scratch_.groups.part(0, 12), Policy::tile_threads(expert_tile_), work);
}

void MetalBackend::experts_down(int layer) {
  const MoePlan& moe = plan_.layers[layer].moe;
  const double work =
      1.0 * rows_ * shape_.hidden * (kExpertsPerToken * shape_.expert_width + shape_.shared_expert_width);
  const BufferSpan& hidden = slot(Slot::kExpertHidden);
  if (!policy_.use_grouped(rows_)) {
    if (ablations_.fused_chains) {
      experts_down_apart(moe);
      return;
    }
    encoder_.dispatch(*moe.down_qmv, down_params(moe),
                      {reads(hidden), reads(slot(Slot::kExpertIds)), reads(slot(Slot::kExpertWeights)),
                       reads(slot(Slot::kSharedGate)), constant(moe.down.codes), constant(moe.down.scales),
                       constant(moe.down.biases), constant(moe.shared_down.codes), constant(moe.shared_down.scales),
                       constant(moe.shared_down.biases), updates(slot(Slot::kResidual))},
                      {ceil_div(shape_.hidden, mtl::kQmvGroupRows), static_cast<size_t>(rows_)}, mtl::kQmvThreads,
                      work);
    return;
  }
  BoundMatrix down = moe.down;
  const Kernel* kernel = &moe.down_qmm.of(expert_tile_);
  if (ablations_.fused_dequant) {
    down = expanded(*moe.dequantise_down, moe.down, 2);
    kernel = &moe.down_qmm_bf16.of(expert_tile_);
  }
  const auto matrix = [&](const BufferSpan& span) { return ablations_.fused_dequant ? reads(span) : constant(span); };
  encoder_.dispatch_indirect(
      *kernel, down_params(moe),
      {reads(hidden), reads(scratch_.sorted), reads(scratch_.blocks), matrix(down.codes), matrix(down.scales),
       matrix(down.biases), constant(moe.shared_down.codes), constant(moe.shared_down.scales),
       constant(moe.shared_down.biases), writes(scratch_.pair_out)},
      scratch_.groups.part(12, 12), Policy::tile_threads(expert_tile_), work);
  combine();
}

void MetalBackend::combine() {
  encoder_.dispatch(*kernels_.experts_combine, mtl::CombineParams{shape_.hidden},
                    {reads(scratch_.pair_out), reads(slot(Slot::kExpertWeights)), reads(slot(Slot::kSharedGate)),
                     updates(slot(Slot::kResidual))},
                    {ceil_div(shape_.hidden, 4 * mtl::kElementThreads), static_cast<size_t>(rows_)},
                    mtl::kElementThreads);
}

// Controls of `fused-chains`: gate, up and SwiGLU, down and sum as kernels of their own.
void MetalBackend::experts_up_apart(const MoePlan& moe) {
  mtl::ExpertsParams params = up_params(moe);
  const int width = std::max(shape_.expert_width, shape_.shared_expert_width);
  params.out_stride = width;
  const size_t bytes = static_cast<size_t>(rows_) * mtl::kPairs * width * sizeof(bf16);
  const BufferSpan gates = scratch_.pair_out.part(0, bytes);
  const BufferSpan ups = scratch_.pair_out.part(bytes, bytes);
  const auto projection = [&](const BoundMatrix& m, const BoundMatrix& shared, const BufferSpan& out) {
    encoder_.dispatch(
        *moe.gate_up_apart, params,
        {reads(slot(Slot::kMoeInput)), reads(slot(Slot::kExpertIds)), constant(m.codes), constant(m.scales),
         constant(m.biases), constant(shared.codes), constant(shared.scales), constant(shared.biases), writes(out)},
        {ceil_div(width, mtl::kQmvGroupRows), static_cast<size_t>(rows_) * mtl::kPairs}, mtl::kQmvThreads);
  };
  projection(moe.gate, moe.shared_gate, gates);
  projection(moe.up, moe.shared_up, ups);
  encoder_.dispatch(*kernels_.swiglu, mtl::SwigluParams{shape_.expert_width, shape_.shared_expert_width},
                    {reads(gates), reads(ups), writes(slot(Slot::kExpertHidden))},
                    {ceil_div(width, mtl::kElementThreads), static_cast<size_t>(rows_) * mtl::kPairs},
                    mtl::kElementThreads);
}

void MetalBackend::experts_down_apart(const MoePlan& moe) {
  mtl::ExpertsParams params = down_params(moe);
  params.pair_stride = shape_.expert_width;
  encoder_.dispatch(*moe.down_apart, params,
                    {reads(slot(Slot::kExpertHidden)), reads(slot(Slot::kExpertIds)), constant(moe.down.codes),
                     constant(moe.down.scales), constant(moe.down.biases), constant(moe.shared_down.codes),
                     constant(moe.shared_down.scales), constant(moe.shared_down.biases), writes(scratch_.pair_out)},
                    {ceil_div(shape_.hidden, mtl::kQmvGroupRows), static_cast<size_t>(rows_) * mtl::kPairs},
                    mtl::kQmvThreads);
  combine();
}

}  // namespace calla::metal
