// The first and the last stages of a step: embedding, head, pick.
#include "backend/metal/metal_backend.h"
#include "base/check.h"

namespace calla::metal {

void MetalBackend::embed() {
  const BoundMatrix& m = plan_.embedding;
  const size_t groups = (static_cast<size_t>(m.shape.k) / 8 + mtl::kLanes - 1) / mtl::kLanes;
  encoder_.dispatch(*plan_.embed, mtl::EmbedParams{m.shape},
                    {constant(m.codes), constant(m.scales), constant(m.biases), constant(step().rows),
                     reads(pool_->last_tokens()), writes(slot(Slot::kResidual))},
                    {groups, static_cast<size_t>(rows_)}, mtl::kLanes);
}

void MetalBackend::head() {
  if (head_count_ == 0) return;
  const BoundMatrix& m = plan_.lm_head;
  mtl::RmsnormQmvParams params{};
  params.matrix[0] = m.shape;
  params.float_out[0] = 1;
  params.hidden = shape_.hidden;
  params.eps = shape_.rms_eps;
  std::array<Argument, 20> arguments;
  arguments.fill(constant(m.codes));
  arguments[0] = reads(slot(Slot::kResidual));
  arguments[1] = constant(plan_.final_norm);
  arguments[2] = constant(step().head_rows);
  arguments[4] = constant(m.scales);
  arguments[5] = constant(m.biases);
  for (size_t i = 16; i < 20; ++i) arguments[i] = constant(step().logits);  // outputs that are not there
  arguments[15] = writes(step().logits);
  const auto groups = static_cast<size_t>((m.shape.n + mtl::kNormedGroupRows - 1) / mtl::kNormedGroupRows);
  encoder_.dispatch(*plan_.head, params, arguments, {static_cast<size_t>(head_count_), groups}, mtl::kQmvThreads,
                    m.weights() * head_count_);
}

void MetalBackend::pick() {
  if (head_count_ == 0) return;
  StepBuffers& now = step();
  mtl::PickParams params{};
  params.vocab = shape_.vocab;
  params.slices = (shape_.vocab + mtl::kPickSlice - 1) / mtl::kPickSlice;
  params.count_stride = pool_->count_stride();
  params.weight_stride = (shape_.vocab + 3) / 4 * 4;
  const auto heads = static_cast<size_t>(head_count_);
  const Grid slices = {static_cast<size_t>(params.slices), heads};
  encoder_.dispatch(
      *kernels_.pick_max, params,
      {reads(now.logits), reads(pool_->counts()), constant(now.masks), constant(now.heads), writes(scratch_.slice_max)},
      slices, mtl::kElementThreads);
  if (samples_) {
    encoder_.dispatch(*kernels_.pick_weights, params,
                      {reads(now.logits), reads(pool_->counts()), constant(now.masks), constant(now.heads),
                       reads(scratch_.slice_max), writes(scratch_.pick_weights)},
                      slices, mtl::kElementThreads);
  }
  encoder_.dispatch(
      *kernels_.pick_token, params,
      {samples_ ? reads(scratch_.pick_weights) : constant(scratch_.pick_weights), updates(pool_->counts()),
       constant(now.heads), reads(scratch_.slice_max), writes(now.picked), updates(pool_->last_tokens())},
      {heads}, mtl::kPickThreads);
}

}  // namespace calla::metal
