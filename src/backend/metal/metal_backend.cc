#include "backend/metal/metal_backend.h"

#include <algorithm>
#include <cstring>

#include "backend/create.h"
#include "backend/metal/bandwidth.h"
#include "backend/metal/tensor_check.h"
#include "base/bf16.h"
#include "base/check.h"
#include "base/error.h"

namespace calla::metal {
namespace {

enum class SlotType { kBf16, kFloat, kInt };

SlotType type_of(Slot slot) {
  switch (slot) {
    case Slot::kResidual:
    case Slot::kGdnA:
    case Slot::kGdnB:
    case Slot::kExpertWeights:
    case Slot::kSharedGate:
    case Slot::kLogits:
      return SlotType::kFloat;
    case Slot::kExpertIds:
      return SlotType::kInt;
    default:
      return SlotType::kBf16;
  }
}

size_t bytes_of(SlotType type) { return type == SlotType::kBf16 ? sizeof(bf16) : sizeof(float); }

int mask_words(const ModelShape& shape) { return (shape.vocab + 31) / 32; }
int pick_slices(const ModelShape& shape) { return (shape.vocab + mtl::kPickSlice - 1) / mtl::kPickSlice; }

Policy make_policy(const Ablations& ablations, const MetalTestOptions& test_options) {
  Policy policy;
  if (test_options.fixed_block_from > 0) policy.fixed_block_from = test_options.fixed_block_from;
  if (test_options.work_limit > 0) policy.attention_work = test_options.work_limit;
  if (ablations.split_kv) policy.fixed_block_from = INT32_MAX;
  return policy;
}

EncoderOptions encoder_options(const Ablations& ablations, const MetalTestOptions& test_options) {
  EncoderOptions options;
  options.serial = ablations.concurrent;
  options.drop_barrier = test_options.drop_barrier;
  if (test_options.work_limit > 0) options.work_limit = test_options.work_limit;
  return options;
}

void check_shape(const ModelShape& shape) {
  check(kHeadDim == mtl::kHeadSize && kGdnHeadDim == mtl::kStateSize && kExpertsPerToken == mtl::kTopExperts &&
            kConvWidth == mtl::kTaps && kKvPageRows == mtl::kPageRows && kGqaFactor % mtl::kPackedHeads == 0,
        "params.h agrees with shape.h");
  if (shape.rotary_dim != 2 * mtl::kRotaryPairs)
    throw CheckpointError("config.json: " + std::to_string(shape.rotary_dim) +
                          " rotary dimensions; the Metal kernels have 64");
  if (shape.experts > mtl::kMaxExperts)
    throw CheckpointError("config.json: " + std::to_string(shape.experts) +
                          " experts; the Metal kernels route at most 1024");
}

}  // namespace

MetalBackend::MetalBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options,
                           const MetalTestOptions& test_options)
    : shape_(shape),
      options_(options),
      ablations_(parse_ablations(options.ablate)),
      test_options_(test_options),
      policy_(make_policy(ablations_, test_options)),
      residency_(device_),
      encoder_(device_, encoder_options(ablations_, test_options)) {
  check_shape(shape);
  size_t weight_bytes = 0;
  for (const WeightMatrix* m : matrices_of(weights)) weight_bytes += m->bytes();
  const std::string refusal = working_set_refusal(device_.traits(), weight_bytes, "the model");
  if (!refusal.empty()) throw DeviceError(refusal);
  weights_.emplace(device_, weights);
  allocate_activations();
  choose_matrix_units(weights);
  plan_ = make_plan(device_, *weights_, shape_, weights, ablations_, tensor_ops_);
  make_kernels();
  residency_.hold_all();
}

MetalBackend::~MetalBackend() {
  // The GPU must be done with the buffers before they go; how the work ended no longer matters.
  for (StepBuffers& step : steps_)
    for (const auto& command_buffer : step.command_buffers) command_buffer->waitUntilCompleted();
  for (const auto& command_buffer : encoder_.take()) command_buffer->waitUntilCompleted();
}

void MetalBackend::choose_matrix_units(const ModelWeights& weights) {
  if (!device_.traits().tensor_ops || ablations_.tensor_ops) return;
  const LayerWeights& layer = weights.layers.front();
  const BoundMatrix matrix = bind_matrix(*weights_, layer.gdn ? layer.gdn->out : layer.attention->out, "out_proj");
  const int most = test_options_.tensor_check_rows > 0 ? test_options_.tensor_check_rows : options_.max_rows;
  const int rows = std::min(most, options_.max_rows);  // the slots hold no more
  const std::string problem =
      check_tensor_ops(device_, matrix, rows, {slot(Slot::kMixed), slot(Slot::kResidual), scratch_.pair_out});
  tensor_ops_ = problem.empty();
  if (!tensor_ops_) tensor_note_ = "not with tensor operations: " + problem;
}

void MetalBackend::make_kernels() {
  kernels_.rmsnorm = &device_.kernel("rmsnorm");
  kernels_.gdn_step = &device_.kernel("gdn_step");
  kernels_.gdn_conv = &device_.kernel("gdn_conv");
  kernels_.gdn_scan = &device_.kernel("gdn_scan");
  kernels_.gdn_gated_norm = &device_.kernel("gdn_gated_norm");
  kernels_.prepare_qkv = &device_.kernel("prepare_qkv");
  const char* sdpa = ablations_.gqa_packing    ? "sdpa_decode_unpacked"
                     : ablations_.coalesced_kv ? "sdpa_decode_apart"
                                               : "sdpa_decode";
  for (int single = 0; single < 2; ++single)
    for (int fold = 0; fold < 2; ++fold)
      for (int fixed = 0; fixed < 2; ++fixed)
        kernels_.sdpa_decode[single][fold][fixed] = &device_.kernel(
            sdpa, {bool_constant(7, single != 0), bool_constant(8, fold != 0), bool_constant(9, fixed != 0)});
  kernels_.sdpa_merge = &device_.kernel("sdpa_merge");
  kernels_.sdpa_tile = &device_.kernel(tensor_ops_ ? "sdpa_tile_tensor" : "sdpa_tile");
  kernels_.router_topk = &device_.kernel("router_topk");
  kernels_.moe_group_rows = &device_.kernel("moe_group_rows");
  kernels_.experts_combine = &device_.kernel("experts_combine");
  kernels_.swiglu = &device_.kernel("swiglu");
  kernels_.pick_max = &device_.kernel("pick_max");
  kernels_.pick_weights = &device_.kernel("pick_weights");
  kernels_.pick_token = &device_.kernel("pick_token");
}

void MetalBackend::allocate_activations() {
  const auto rows = static_cast<size_t>(options_.max_rows);
  const auto heads = static_cast<size_t>(options_.max_heads);
  for (size_t i = 0; i < static_cast<size_t>(Slot::kLogits); ++i) {
    const auto which = static_cast<Slot>(i);
    slots_[i] = device_.allocate(rows * slot_width(which, shape_) * bytes_of(type_of(which)), slot_name(which));
  }
  const size_t hidden = shape_.hidden;
  scratch_.normed = device_.allocate(rows * hidden * sizeof(bf16), "normed");
  scratch_.conv_out = device_.allocate(rows * shape_.gdn_conv_width() * sizeof(bf16), "conv_out");
  scratch_.gates = device_.allocate(rows * shape_.gdn_value_heads * 2 * sizeof(float), "gates");
  scratch_.scan_out = device_.allocate(rows * shape_.gdn_value_width() * sizeof(float), "scan_out");
  scratch_.router_logits = device_.allocate(rows * shape_.experts * sizeof(float), "router_logits");
  scratch_.shared_logit = device_.allocate(rows * sizeof(float), "shared_logit");
  scratch_.sorted = device_.allocate(rows * mtl::kPairs * sizeof(int32_t), "sorted");
  const size_t blocks = rows * mtl::kPairs / 16 + shape_.experts + 2;  // every expert may end with a partial block
  scratch_.blocks = device_.allocate(blocks * sizeof(mtl::ExpertBlock), "blocks");
  scratch_.groups = device_.allocate(6 * sizeof(uint32_t), "groups");
  // With chains taken apart it also holds the gates and the ups.
  const size_t pair_width = std::max({shape_.hidden, 2 * shape_.expert_width, 2 * shape_.shared_expert_width});
  scratch_.pair_out = device_.allocate(rows * mtl::kPairs * pair_width * sizeof(bf16), "pair_out");
  scratch_.slice_max = device_.allocate(heads * pick_slices(shape_) * sizeof(mtl::SliceMax), "slice_max");
  scratch_.pick_weights = device_.allocate(heads * ((shape_.vocab + 3) / 4 * 4) * sizeof(float), "pick_weights");
  if (ablations_.fused_dequant) {
    const size_t weights = static_cast<size_t>(shape_.experts) * shape_.expert_width * hidden;
    for (BufferSpan& span : scratch_.expanded) span = device_.allocate(weights * sizeof(bf16), "expanded experts");
  }
  for (StepBuffers& step : steps_) {
    step.rows = device_.allocate(rows * sizeof(mtl::RowInfo), "rows");
    step.sequences = device_.allocate(rows * sizeof(mtl::SequenceInfo), "sequences");
    step.sequence_of_row = device_.allocate(rows * sizeof(int32_t), "sequence_of_row");
    step.tiles = device_.allocate(rows * sizeof(mtl::AttentionTile), "tiles");
    step.heads = device_.allocate(heads * sizeof(mtl::HeadInfo), "heads");
    step.head_rows = device_.allocate(heads * sizeof(int32_t), "head_rows");
    step.masks = device_.allocate(heads * mask_words(shape_) * sizeof(uint32_t), "masks");
    step.phases = device_.allocate(rows * std::max(shape_.gdn_layers(), 1) * sizeof(int32_t), "phases");
    step.logits = device_.allocate(heads * shape_.vocab * sizeof(float), "logits");
    step.picked = device_.allocate(heads * sizeof(int32_t), "picked");
  }
}

double MetalBackend::probe_read_bandwidth() { return metal::probe_read_bandwidth(); }

void MetalBackend::allocate_state(const StateMemoryPlan& plan) {
  check(!pool_, "allocate_state is called once");
  // A sequence's table has an entry for every page it can see; sequences may share pages.
  const int context_pages = (shape_.max_context + kKvPageRows - 1) / kKvPageRows;
  const size_t table =
      static_cast<size_t>(std::min(plan.recurrent_slots, options_.max_rows)) * std::min(plan.kv_pages, context_pages);
  const int most_keys = std::min(plan.kv_pages * kKvPageRows, shape_.max_context);
  const int most_splits = std::max(policy_.splits(most_keys), policy_.splits(policy_.fixed_block_from - 1));
  const size_t ranges = static_cast<size_t>(policy_.sdpa_rows) * shape_.q_heads * most_splits;
  const size_t table_bytes = table * sizeof(int32_t);
  const size_t partial_bytes = ranges * kHeadDim * sizeof(float);
  const size_t sum_bytes = ranges * 2 * sizeof(float);

  const size_t bytes = plan.recurrent_slots * recurrent_slot_bytes() + plan.kv_pages * kv_page_bytes() +
                       kStepsInFlight * table_bytes + partial_bytes + sum_bytes;
  const std::string refusal = working_set_refusal(
      device_.traits(), device_.allocated_bytes() + bytes,
      "the model with " + std::to_string(plan.recurrent_slots) + " sequence states and a KV cache of " +
          std::to_string(static_cast<int64_t>(plan.kv_pages) * kKvPageRows) + " tokens");
  if (!refusal.empty()) throw DeviceError(refusal);
  pool_.emplace(device_, shape_, plan);
  for (StepBuffers& step : steps_) step.pages = device_.allocate(table_bytes, "page table");
  scratch_.partials = device_.allocate(partial_bytes, "attention partials");
  scratch_.sums = device_.allocate(sum_bytes, "attention sums");
  residency_.hold_all();
}

SequenceMemory& MetalBackend::pool() {
  check(pool_.has_value(), "allocate_state comes first");
  return *pool_;
}

std::string MetalBackend::description() const {
  const DeviceTraits& traits = device_.traits();
  std::string text = "metal: " + traits.name + (traits.architecture.empty() ? "" : " (" + traits.architecture + ")");
  if (const std::string note = software_device_note(); !note.empty()) text += ", " + note;
  text += tensor_ops_ ? ", GEMM with tensor operations" : ", GEMM with simdgroup matrices";
  if (!tensor_note_.empty()) text += " (" + tensor_note_ + ")";
  for (const std::string& name : options_.ablate) text += ", without " + name;
  return text;
}

// --- the life of a step -------------------------------------------------------------------------------------------

bool MetalBackend::begin(const Batch& batch) {
  check(static_cast<int>(batch.tokens.size()) <= options_.max_rows, "rows of a batch");
  check(static_cast<int>(batch.heads.size()) <= options_.max_heads, "heads of a batch");
  pool();
  StepBuffers& now = step();
  // Step n - 2 had these buffers; its owner has waited for it, or gave up on it.
  for (const auto& command_buffer : now.command_buffers) command_buffer->waitUntilCompleted();
  now.command_buffers.clear();
  now.id = next_step_;
  residency_.touch();
  encoder_.reset_counts();
  fill_step(batch);
  return true;
}

void MetalBackend::fill_step(const Batch& batch) {
  StepBuffers& now = step();
  rows_ = static_cast<int>(batch.tokens.size());
  head_count_ = static_cast<int>(batch.heads.size());
  sequences_.assign(batch.sequences.begin(), batch.sequences.end());
  max_sequence_rows_ = max_keys_ = tile_count_ = 0;
  tile_work_.clear();
  expert_tile_ = Policy::expert_tile(rows_, shape_.experts, !ablations_.wide_tiles);

  int row = 0, page = 0;
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const SequenceRows& sequence = sequences_[s];
    const int keys = sequence.position + sequence.rows;
    const int pages = (keys + kKvPageRows - 1) / kKvPageRows;
    check(static_cast<int>(sequence.kv_pages.size()) >= pages, "pages of a sequence");
    check((page + pages) * sizeof(int32_t) <= now.pages.bytes, "entries of the page table");
    std::copy_n(sequence.kv_pages.begin(), pages, now.pages.as<int32_t>() + page);
    now.sequences.as<mtl::SequenceInfo>()[s] = {row, sequence.rows, sequence.recurrent_slot};
    for (int first = 0; first < sequence.rows; first += mtl::kAttnTileRows) {
      const int count = std::min(mtl::kAttnTileRows, sequence.rows - first);
      now.tiles.as<mtl::AttentionTile>()[tile_count_++] = {row + first, count};
      tile_work_.push_back(2.0 * mtl::kAttnTileRows * kHeadDim * (sequence.position + first + count));
    }
    for (int i = 0; i < sequence.rows; ++i, ++row) {
      now.rows.as<mtl::RowInfo>()[row] = {batch.tokens[row], sequence.recurrent_slot, sequence.position + i, page};
      now.sequence_of_row.as<int32_t>()[row] = static_cast<int32_t>(s);
    }
    page += pages;
    max_sequence_rows_ = std::max(max_sequence_rows_, sequence.rows);
    max_keys_ = std::max(max_keys_, keys);
  }
  check(row == rows_, "the sequences' rows add up to the batch");

  samples_ = false;
  for (int i = 0; i < head_count_; ++i) {
    const HeadRow& head = batch.heads[i];
    const mtl::RowInfo& of_row = now.rows.as<mtl::RowInfo>()[head.row];
    const SamplingParams& sampling = head.sampling;
    mtl::HeadInfo info{};
    info.row = head.row;
    info.slot = of_row.slot;
    info.pick = head.pick ? 1 : 0;
    info.top_k = sampling.top_k;
    info.temperature = sampling.temperature;
    info.top_p = sampling.top_p;
    info.min_p = sampling.min_p;
    info.presence_penalty = sampling.presence_penalty;
    info.frequency_penalty = sampling.frequency_penalty;
    info.repetition_penalty = sampling.repetition_penalty;
    info.has_penalties = sampling.has_penalties() ? 1 : 0;
    info.mask = -1;
    info.seed_low = static_cast<uint32_t>(sampling.seed);
    info.seed_high = static_cast<uint32_t>(sampling.seed >> 32);
    info.position = of_row.position + 1;
    if (!head.allowed.empty()) {
      const int words = mask_words(shape_);
      check(static_cast<int>(head.allowed.size()) >= words, "the token mask covers the vocabulary");
      info.mask = i * words;
      std::copy_n(head.allowed.begin(), words, now.masks.as<uint32_t>() + info.mask);
    }
    samples_ = samples_ || (head.pick && sampling.temperature > 0);
    now.heads.as<mtl::HeadInfo>()[i] = info;
    now.head_rows.as<int32_t>()[i] = head.row;
    now.picked.as<int32_t>()[i] = -1;
  }
}

void MetalBackend::flush_deferred() {
  if (deferred_prepare_ < 0) return;
  dispatch_prepare(std::exchange(deferred_prepare_, -1));
}

StepId MetalBackend::submit() {
  flush_deferred();
  StepBuffers& now = step();
  now.command_buffers = encoder_.take();
  step_counts_ = encoder_.counts();
  if (ablations_.gpu_handover)
    for (const auto& command_buffer : now.command_buffers) command_buffer->waitUntilCompleted();
  return next_step_++;
}

void MetalBackend::wait(StepId id) {
  StepBuffers& waited = steps_[id % kStepsInFlight];
  check(waited.id == id, "a step is waited for before the second one after it begins");
  try {
    wait_for(waited.command_buffers);
  } catch (const DeviceError&) {
    // What was submitted meanwhile read what this step left undone.
    failed_until_ = next_step_ - 1;
    throw;
  }
  residency_.touch();
  if (id <= failed_until_) throw DeviceError("Metal: a step before this one failed, and this one built on it");
}

void MetalBackend::synchronise() {
  flush_deferred();
  const auto command_buffers = encoder_.take();
  for (const StepBuffers& step : steps_)
    for (const auto& command_buffer : step.command_buffers) command_buffer->waitUntilCompleted();
  wait_for(command_buffers);
}

std::span<const float> MetalBackend::logits(StepId id, int head_index) {
  const StepBuffers& of = steps_[id % kStepsInFlight];
  check(of.id == id, "logits of a step that is gone");
  return {of.logits.as<float>() + static_cast<size_t>(head_index) * shape_.vocab, static_cast<size_t>(shape_.vocab)};
}

std::span<const TokenId> MetalBackend::picked(StepId id) {
  const StepBuffers& of = steps_[id % kStepsInFlight];
  check(of.id == id, "picked tokens of a step that is gone");
  return {of.picked.as<TokenId>(), of.picked.bytes / sizeof(TokenId)};
}

// --- slots and state from the CPU ---------------------------------------------------------------------------------

void MetalBackend::read_slot(Slot which, std::span<float> out) {
  synchronise();
  const BufferSpan& span = which == Slot::kLogits ? step().logits : slot(which);
  switch (type_of(which)) {
    case SlotType::kFloat:
      std::copy_n(span.as<float>(), out.size(), out.begin());
      break;
    case SlotType::kInt:
      std::transform(span.as<int32_t>(), span.as<int32_t>() + out.size(), out.begin(),
                     [](int32_t v) { return static_cast<float>(v); });
      break;
    case SlotType::kBf16:
      std::transform(span.as<bf16>(), span.as<bf16>() + out.size(), out.begin(), [](bf16 v) { return to_float(v); });
      break;
  }
}

void MetalBackend::write_slot(Slot which, std::span<const float> in) {
  synchronise();
  const BufferSpan& span = which == Slot::kLogits ? step().logits : slot(which);
  switch (type_of(which)) {
    case SlotType::kFloat:
      std::copy(in.begin(), in.end(), span.as<float>());
      break;
    case SlotType::kInt:
      std::transform(in.begin(), in.end(), span.as<int32_t>(), [](float v) { return static_cast<int32_t>(v); });
      break;
    case SlotType::kBf16:
      std::transform(in.begin(), in.end(), span.as<bf16>(), to_bf16);
      break;
  }
}

void MetalBackend::set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) {
  synchronise();
  pool().set_token_counts(slot, prompt, generated);
}

void MetalBackend::export_recurrent(int slot, std::span<std::byte> out) {
  synchronise();
  pool().export_recurrent(slot, out);
}

void MetalBackend::import_recurrent(int slot, std::span<const std::byte> in) {
  synchronise();
  pool().import_recurrent(slot, in);
}

void MetalBackend::export_kv_page(int page, std::span<std::byte> out) {
  synchronise();
  pool().export_kv_page(page, out);
}

void MetalBackend::import_kv_page(int page, std::span<const std::byte> in) {
  synchronise();
  pool().import_kv_page(page, in);
}

void MetalBackend::read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) {
  synchronise();
  pool().read_gdn(plan_.layers[layer].index_in_kind, slot, state, conv);
}

void MetalBackend::write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) {
  synchronise();
  pool().write_gdn(plan_.layers[layer].index_in_kind, slot, state, conv);
}

void MetalBackend::read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k,
                           std::span<float> v) {
  synchronise();
  pool().read_kv(plan_.layers[layer].index_in_kind, pages, rows, k, v);
}

void MetalBackend::write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                            std::span<const float> v) {
  synchronise();
  pool().write_kv(plan_.layers[layer].index_in_kind, pages, rows, k, v);
}

}  // namespace calla::metal

namespace calla {

// --- create.h -----------------------------------------------------------------------------------------------------

BackendInfo metal_backend_info() {
  BackendInfo info{"metal", "Apple silicon GPUs", metal::metal_device_present(), ""};
  if (!info.available) info.reason = "this machine lists no Metal device";
  info.software = !metal::software_device_note().empty();
  info.ablations = metal::ablation_names();
  return info;
}

std::unique_ptr<Backend> create_metal_backend(const ModelShape& shape, const ModelWeights& weights,
                                              const BackendOptions& options) {
  return std::make_unique<metal::MetalBackend>(shape, weights, options);
}

}  // namespace calla
