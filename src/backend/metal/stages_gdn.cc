// Projections, and the Gated DeltaNet mixer.
#include "backend/metal/metal_backend.h"
#include "base/check.h"

namespace calla::metal {

void MetalBackend::project(const Kernel& qmv, const BufferSpan& norm, std::span<const Output> outputs,
                           const BufferSpan& normed, bool keep_normed) {
  const BufferSpan& residual = slot(Slot::kResidual);
  if (policy_.use_gemm(rows_)) {
    encoder_.dispatch(*kernels_.rmsnorm, mtl::RmsnormParams{shape_.hidden, shape_.rms_eps},
                      {reads(residual), constant(norm), writes(normed)}, {static_cast<size_t>(rows_)},
                      mtl::kNormThreads);
    for (const Output& output : outputs)
      gemm(*output.matrix, normed, shape_.hidden, output.out, output.matrix->matrix.shape.n);
    return;
  }
  mtl::RmsnormQmvParams params{};
  params.hidden = shape_.hidden;
  params.eps = shape_.rms_eps;
  // Matrices that are not there get the first one's buffers, bound and never touched.
  const BoundMatrix& first = outputs[0].matrix->matrix;
  std::array<Argument, 20> arguments;
  arguments.fill(constant(first.codes));
  arguments[0] = reads(residual);
  arguments[1] = constant(norm);
  arguments[2] = constant(step().head_rows);
  size_t groups = keep_normed ? 1 : 0;
  double work = 0;
  for (size_t i = 0; i < 4; ++i) {
    arguments[15 + i] = constant(outputs[0].out);
    if (i >= outputs.size()) continue;
    const BoundMatrix& m = outputs[i].matrix->matrix;
    params.matrix[i] = m.shape;
    params.float_out[i] = outputs[i].is_float ? 1 : 0;
    arguments[3 + 3 * i] = constant(m.codes);
    arguments[4 + 3 * i] = constant(m.scales);
    arguments[5 + 3 * i] = constant(m.biases);
    arguments[15 + i] = writes(outputs[i].out);
    groups += (m.shape.n + mtl::kNormedGroupRows - 1) / mtl::kNormedGroupRows;
    work += m.weights() * rows_;
  }
  arguments[19] = keep_normed ? writes(normed) : constant(outputs[0].out);
  encoder_.dispatch(qmv, params, arguments, {static_cast<size_t>(rows_), groups}, mtl::kQmvThreads, work);
}

void MetalBackend::gemm(const DenseMatrix& dense, const BufferSpan& x, int in_stride, const BufferSpan& out,
                        int out_stride) {
  const BoundMatrix& m = dense.matrix;
  const int tile = Policy::dense_tile(rows_, !ablations_.wide_tiles);
  const auto tiles_n = static_cast<size_t>((m.shape.n + mtl::kTileN - 1) / mtl::kTileN);
  const auto tiles_m = static_cast<size_t>((rows_ + tile - 1) / tile);
  encoder_.dispatch(dense.gemm.of(tile), mtl::QmmParams{m.shape, rows_, in_stride, out_stride},
                    {reads(x), constant(m.codes), constant(m.scales), constant(m.biases), updates(out)},
                    {tiles_n, tiles_m}, Policy::tile_threads(tile), m.weights() * rows_);
}

void MetalBackend::project_gdn(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const GdnPlan& gdn = *plan.gdn;
  const std::array<Output, 4> outputs = {{{&gdn.qkv, slot(Slot::kGdnQkv), false},
                                          {&gdn.z, slot(Slot::kGdnZ), false},
                                          {&gdn.a, slot(Slot::kGdnA), true},
                                          {&gdn.b, slot(Slot::kGdnB), true}}};
  project(*gdn.project, plan.input_norm, outputs, scratch_.normed, false);
}

mtl::GdnParams MetalBackend::gdn_params(const LayerPlan& layer) const {
  mtl::GdnParams p{};
  p.key_heads = shape_.gdn_key_heads;
  p.value_heads = shape_.gdn_value_heads;
  p.conv_width = shape_.gdn_conv_width();
  p.mixed_stride = shape_.mixer_width();
  p.layer = layer.index_in_kind;
  p.layers = shape_.gdn_layers();
  p.first_row = 0;
  p.rows = rows_;
  p.eps = shape_.rms_eps;
  return p;
}

void MetalBackend::mix_gdn(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const GdnPlan& gdn = *plan.gdn;
  mtl::GdnParams params = gdn_params(plan);
  StepBuffers& now = step();
  // Which copy of the tail is current, for each sequence; from here on it is the other one.
  const size_t phase_bytes = sequences_.size() * sizeof(int32_t);
  const BufferSpan phases = now.phases.part(plan.index_in_kind * options_.max_rows * sizeof(int32_t), phase_bytes);
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const int recurrent_slot = sequences_[s].recurrent_slot;
    phases.as<int32_t>()[s] = pool_->phase(plan.index_in_kind, recurrent_slot);
    pool_->flip_phase(plan.index_in_kind, recurrent_slot);
  }
  const auto heads = static_cast<size_t>(shape_.gdn_value_heads);
  const auto rows = static_cast<size_t>(rows_);

  if (max_sequence_rows_ == 1 && !ablations_.fused_chains) {
    encoder_.dispatch(
        *kernels_.gdn_step, params,
        {reads(slot(Slot::kGdnQkv)), reads(slot(Slot::kGdnZ)), reads(slot(Slot::kGdnA)), reads(slot(Slot::kGdnB)),
         constant(gdn.conv), constant(gdn.a_log), constant(gdn.dt_bias), constant(gdn.norm), constant(now.sequences),
         constant(phases), updates(pool_->tails()), updates(pool_->states()), writes(slot(Slot::kMixed))},
        {heads, rows}, mtl::kGdnStepThreads);
    return;
  }
  const size_t conv_heads = 2 * static_cast<size_t>(shape_.gdn_key_heads) + heads + 1;
  encoder_.dispatch(*kernels_.gdn_conv, params,
                    {reads(slot(Slot::kGdnQkv)), reads(slot(Slot::kGdnA)), reads(slot(Slot::kGdnB)), constant(gdn.conv),
                     constant(gdn.a_log), constant(gdn.dt_bias), constant(now.sequences), constant(now.sequence_of_row),
                     constant(phases), updates(pool_->tails()), writes(scratch_.conv_out), writes(scratch_.gates)},
                    {(conv_heads + mtl::kGroupHeads - 1) / mtl::kGroupHeads, rows}, mtl::kHeadThreads);
  // One dispatch, the state in registers from the first row to the last; the control stops every 32 rows.
  const int piece = ablations_.register_scan ? 32 : max_sequence_rows_;
  for (params.first_row = 0; params.first_row < max_sequence_rows_; params.first_row += piece) {
    params.rows = piece;
    encoder_.dispatch(*kernels_.gdn_scan, params,
                      {reads(scratch_.conv_out), reads(scratch_.gates), constant(now.sequences),
                       updates(pool_->states()), writes(scratch_.scan_out)},
                      {kGdnHeadDim / mtl::kScanColumns, heads, sequences_.size()}, mtl::kScanThreads,
                      3.0 * kGdnHeadDim * kGdnHeadDim * shape_.gdn_value_heads * std::min(piece, rows_));
  }
  encoder_.dispatch(
      *kernels_.gdn_gated_norm, params,
      {reads(scratch_.scan_out), reads(slot(Slot::kGdnZ)), constant(gdn.norm), writes(slot(Slot::kMixed))},
      {(heads + mtl::kGroupHeads - 1) / mtl::kGroupHeads, rows}, mtl::kHeadThreads);
}

void MetalBackend::project_residual(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const DenseMatrix& out = plan.gdn ? plan.gdn->out : plan.attention->out;
  const BufferSpan& residual = slot(Slot::kResidual);
  if (policy_.use_gemm(rows_)) {
    gemm(out, slot(Slot::kMixed), shape_.mixer_width(), residual, shape_.hidden);
    return;
  }
  const BoundMatrix& m = out.matrix;
  const int rows_a_group = ablations_.row_parallel ? mtl::kQmvThreads : mtl::kQmvGroupRows;
  encoder_.dispatch(
      plan.gdn ? *plan.gdn->project_out : *plan.attention->project_out,
      mtl::QmvParams{m.shape, shape_.mixer_width(), shape_.hidden},
      {reads(slot(Slot::kMixed)), constant(m.codes), constant(m.scales), constant(m.biases), updates(residual)},
      {static_cast<size_t>(rows_), static_cast<size_t>((m.shape.n + rows_a_group - 1) / rows_a_group)},
      mtl::kQmvThreads, m.weights() * rows_);
}

}  // namespace calla::metal
