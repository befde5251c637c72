// The full-attention mixer.
#include "backend/metal/metal_backend.h"
#include "base/check.h"

namespace calla::metal {

void MetalBackend::project_attention(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const AttentionPlan& attention = *plan.attention;
  const std::array<Output, 3> outputs = {{{&attention.q, slot(Slot::kAttnQGate), false},
                                          {&attention.k, slot(Slot::kAttnK), false},
                                          {&attention.v, slot(Slot::kAttnV), false}}};
  project(*attention.project, plan.input_norm, outputs, scratch_.normed, false);
}

mtl::AttentionParams MetalBackend::attention_params(const LayerPlan& layer) const {
  mtl::AttentionParams p{};
  p.q_heads = shape_.q_heads;
  p.kv_heads = shape_.kv_heads;
  p.layer = layer.index_in_kind;
  p.layers = shape_.attention_layers();
  p.mixed_stride = shape_.mixer_width();
  p.splits = 1;
  p.parts = 7;
  p.eps = shape_.rms_eps;
  return p;
}

void MetalBackend::prepare_attention(int layer) {
  flush_deferred();
  // Single rows: attend does it on the way, for one dependent dispatch less. Should something else come first,
  // flush_deferred runs the kernel of its own.
  if (max_sequence_rows_ == 1 && !ablations_.fused_chains) {
    deferred_prepare_ = layer;
  } else {
    dispatch_prepare(layer);
  }
}

void MetalBackend::dispatch_prepare(int layer) {
  const LayerPlan& plan = plan_.layers[layer];
  const AttentionPlan& attention = *plan.attention;
  const auto heads = static_cast<size_t>(shape_.q_heads + 2 * shape_.kv_heads);
  mtl::AttentionParams params = attention_params(plan);
  const int last = ablations_.fused_chains ? 4 : 7;
  for (int parts = ablations_.fused_chains ? 1 : 7; parts <= last; parts *= 2) {
    params.parts = parts;
    encoder_.dispatch(*kernels_.prepare_qkv, params,
                      {reads(slot(Slot::kAttnQGate)), reads(slot(Slot::kAttnK)), reads(slot(Slot::kAttnV)),
                       constant(attention.q_norm), constant(attention.k_norm), constant(plan_.rope_frequencies),
                       constant(step().rows), constant(step().pages), writes(slot(Slot::kAttnQ)), writes(pool_->kv())},
                      {(heads + mtl::kGroupHeads - 1) / mtl::kGroupHeads, static_cast<size_t>(rows_)},
                      mtl::kHeadThreads);
  }
}

void MetalBackend::attend(int layer) {
  const bool fold = deferred_prepare_ == layer;
  if (fold) {
    deferred_prepare_ = -1;
  } else {
    flush_deferred();
  }
  const LayerPlan& plan = plan_.layers[layer];
  if (max_sequence_rows_ > policy_.sdpa_rows) {
    attend_tiles(plan);
  } else {
    attend_rows(plan, fold);
  }
}

void MetalBackend::attend_rows(const LayerPlan& plan, bool fold) {
  const AttentionPlan& attention = *plan.attention;
  mtl::AttentionParams params = attention_params(plan);
  const bool fixed = policy_.fixed_blocks(max_keys_);
  params.splits = policy_.splits(max_keys_);
  const bool single = params.splits == 1;
  const int packed = ablations_.gqa_packing ? 1 : mtl::kPackedHeads;
  const auto groups = static_cast<size_t>(shape_.q_heads / packed);
  StepBuffers& now = step();
  for (params.first_row = 0; params.first_row < rows_; params.first_row += policy_.sdpa_rows) {
    const auto rows = static_cast<size_t>(std::min(policy_.sdpa_rows, rows_ - params.first_row));
    encoder_.dispatch(
        *kernels_.sdpa_decode[single ? 1 : 0][fold ? 1 : 0][fixed ? 1 : 0], params,
        {reads(slot(Slot::kAttnQGate)), reads(slot(Slot::kAttnK)), reads(slot(Slot::kAttnV)),
         constant(attention.q_norm), constant(attention.k_norm), constant(plan_.rope_frequencies), constant(now.rows),
         constant(now.pages), fold ? writes(slot(Slot::kAttnQ)) : reads(slot(Slot::kAttnQ)),
         fold ? updates(pool_->kv()) : reads(pool_->kv()), writes(scratch_.partials), writes(scratch_.sums),
         writes(slot(Slot::kMixed))},
        {static_cast<size_t>(params.splits), groups, rows}, mtl::kSdpaThreads,
        2.0 * shape_.q_heads * kHeadDim * max_keys_ * static_cast<double>(rows));
    if (single) continue;
    encoder_.dispatch(
        *kernels_.sdpa_merge, params,
        {reads(scratch_.partials), reads(scratch_.sums), reads(slot(Slot::kAttnQGate)), writes(slot(Slot::kMixed))},
        {static_cast<size_t>(shape_.q_heads), rows}, mtl::kMergeThreads);
  }
}

void MetalBackend::attend_tiles(const LayerPlan& plan) {
  mtl::AttentionParams params = attention_params(plan);
  StepBuffers& now = step();
  // As many tiles a dispatch as the time limit allows; at least one.
  for (int tile = 0; tile < tile_count_;) {
    params.first_tile = tile;
    double work = 0;
    do {
      work += tile_work_[tile++] * shape_.q_heads;
    } while (tile < tile_count_ && work + tile_work_[tile] * shape_.q_heads <= policy_.attention_work);
    encoder_.dispatch(*kernels_.sdpa_tile, params,
                      {reads(slot(Slot::kAttnQ)), reads(slot(Slot::kAttnQGate)), reads(pool_->kv()),
                       constant(now.tiles), constant(now.rows), constant(now.pages), writes(slot(Slot::kMixed))},
                      {static_cast<size_t>(tile - params.first_tile), static_cast<size_t>(shape_.q_heads)},
                      mtl::kAttnThreads, work);
  }
}

}  // namespace calla::metal
