// CudaBackend's stages: which kernels each one launches.
#include <cstring>

#include <algorithm>
#include <utility>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/linear_rows.h"
#include "backend/cuda/linear_stream.h"
#include "backend/cuda/plain.h"
#include "base/bf16.h"

namespace calla::cuda {

namespace {

constexpr int kFewRows = 32;

TokenMatrix matrix(const PackedView& v) { return {v.codes, v.scales}; }

}  // namespace

Launch CudaBackend::launch_after_any() const {
  Launch launch = launch_;
  launch.dependent = false;
  return launch;
}

// A projection of one to eight rows, in the form that fits the GPU.
void CudaBackend::project_rows(const PackedView& w, const GemvInput& in, int rows, float* out, size_t out_stride,
                               int columns, bool add) const {
  if (mechanisms_.weight_stream && stream_fits(device_, w, rows)) {
    gemv_stream(launch_, w, in, rows, out, out_stride, columns, add);
  } else {
    gemv(launch_, w, in, rows, out, out_stride, columns, add);
  }
}

// The programs: stages are put off, and run as one kernel when something else is asked for.
TokenPhase& CudaBackend::add_phase(TokenPhaseKind kind, double bytes) {
  // A phase receives the row of the phase in front of it, if that one sends it; else from its slot.
  const auto front = program_.count > 0 ? program_.phases[program_.count - 1].kind : kind;
  const bool follows = kind == TokenPhaseKind::kOut       ? front == TokenPhaseKind::kGdn
                       : kind == TokenPhaseKind::kExperts ? front == TokenPhaseKind::kOut
                                                          : front == TokenPhaseKind::kExperts;
  if (!follows || program_.count == kMostTokenPhases) run_program();
  program_bytes_ += bytes;
  TokenPhase& phase = program_.phases[program_.count++];
  phase = {};
  phase.kind = kind;
  return phase;
}

void CudaBackend::run_program() {
  if (program_.count == 0) return;
  program_.sequence = step_.sequences;
  program_.slot_floats = recurrent_.slot_floats();
  program_.log_parts = recurrent_.log_parts();
  program_.keeps_logs = keeps_logs_;
  program_.eps = shape_.rms_eps;
  program_.a = slots_;
  count_bytes(std::exchange(program_bytes_, 0));
  if (step_.rows == 1) {
    program_.words = token_words_.data();
    run_token_program(launch_, program_);
  } else {
    // More rows than a program takes go through several, shared out evenly.
    const int parts = (step_.rows + rows::kMost - 1) / rows::kMost;
    for (int part = 0; part < parts; ++part) {
      const int first = step_.rows * part / parts, rows = step_.rows * (part + 1) / parts - first;
      run_rows_program(launch_, program_, first, rows, rows_words_.data() + (rows - 2));
    }
  }
  program_.count = 0;
}

void CudaBackend::embed() { embed_rows(launch_, weights_.embedding, step_, recurrent_.last_picked(), slots_.residual); }

// out = or += w x for rows of fp16 activations.
void CudaBackend::multiply(const Linear& w, const __half* x, size_t x_stride, int rows, float* out, size_t out_stride,
                           bool add) {
  if (!w.packed) {
    for (size_t i = 0; i < w.raw.size(); ++i)
      linear_plain(launch_, w.raw[i], x, x_stride, rows, out + w.columns[i], out_stride, add);
    return;
  }
  // A lone matrix need not be padded in the output (lm_head); parts side by side are.
  const int columns = w.rows.size() == 1 ? w.rows[0] : w.width;
  // The matrix form writes pairs of outputs. With few rows it needs enough blocks of 64 outputs to read weights at speed;
  // a narrow matrix is read faster by the decode form, several times over.
  const bool wide = w.view.tiles / 4 >= device_.multiprocessors;
  if (rows > kMaxGemvRows && wgmma() && (rows > kFewRows || wide) && columns % 2 == 0 && out_stride % 2 == 0) {
    GemmParams p;
    p.w = w.view;
    p.x = x;
    p.x_stride = x_stride;
    p.out = out;
    p.out_stride = out_stride;
    p.rows = rows;
    p.columns = columns;
    return gemm(launch_, p, add ? GemmOutput::kAdd : GemmOutput::kStore);
  }
  if (rows > 1 && mechanisms_.weight_stream && linear_rows_fit(device_, w.view, rows))
    return linear_rows(launch_, w.view, x, x_stride, rows, out, out_stride, columns, add);
  for (int row = 0; row < rows; row += kMaxGemvRows) {
    GemvInput in;
    in.half = x + static_cast<size_t>(row) * x_stride;
    in.stride = x_stride;
    project_rows(w.view, in, std::min(kMaxGemvRows, rows - row), out + static_cast<size_t>(row) * out_stride,
                 out_stride, columns, add);
  }
}

// Of the experts that the rows choose, if no two choose the same one, and the shared expert.
double CudaBackend::expert_bytes(const LayerOnDevice& l) const {
  const int chosen = std::min(step_.rows * kExpertsPerToken, shape_.experts);
  return static_cast<double>(l.experts.bytes) * chosen + static_cast<double>(l.shared.bytes);
}

// RMSNorm and the layer's input projections.
void CudaBackend::project(const LayerOnDevice& l) {
  count_bytes(static_cast<double>(l.in.bytes));
  const auto hidden = static_cast<size_t>(shape_.hidden), width = static_cast<size_t>(l.in.width);
  if (one_pass_norm() && l.in.packed) {
    GemvInput in;
    in.residual = slots_.residual;
    in.norm = l.input_norm;
    in.eps = shape_.rms_eps;
    in.stride = hidden;
    return project_rows(l.in.view, in, step_.rows, slots_.projected, width, l.in.width, false);
  }
  norm_rows(launch_, slots_.residual, nullptr, l.input_norm, shape_.rms_eps, step_.rows, shape_.hidden, slots_.normed);
  multiply(l.in, slots_.normed, hidden, step_.rows, slots_.projected, width, false);
}

void CudaBackend::project_gdn(int index) {
  if (in_program()) {
    pending_projection_ = index;
  } else {
    project(layer(index));
  }
}
void CudaBackend::project_attention(int index) {
  const LayerOnDevice& l = layer(index);
  if (!in_program()) return project(l);
  TokenPhase& phase = add_phase(TokenPhaseKind::kProject, static_cast<double>(l.in.bytes));
  phase.norm = l.input_norm;
  phase.tiles = l.in.view.tiles;
  phase.weights = matrix(l.in.view);
}

GdnParams CudaBackend::gdn_params(int index) const {
  const LayerOnDevice& l = layer(index);
  GdnParams p;
  p.step = step_;
  p.projected = slots_.projected;
  p.stride = static_cast<size_t>(l.in.width);
  p.z_column = l.in.columns[1];
  p.a_column = l.in.columns[2];
  p.b_column = l.in.columns[3];
  p.conv = l.conv;
  p.decay_rate = l.decay_rate;
  p.dt_bias = l.dt_bias;
  p.norm = l.gdn_norm;
  p.eps = shape_.rms_eps;
  p.key_heads = shape_.gdn_key_heads;
  p.value_heads = shape_.gdn_value_heads;
  p.state = recurrent_.layer(index_in_kind_[static_cast<size_t>(index)]);
  p.slot_floats = recurrent_.slot_floats();
  p.mixed = slots_.mixed;
  p.mixed_stride = static_cast<size_t>(shape_.mixer_width());
  p.convolved = convolved_.data();
  p.block_scalars = block_scalars_.data();
  return p;
}

void CudaBackend::settle_projection() {
  run_program();
  if (pending_projection_ >= 0) project(layer(std::exchange(pending_projection_, -1)));
}

void CudaBackend::mix_gdn(int index) {
  const double state = 1.0 * sizeof(float) * step_.sequence_count * shape_.gdn_value_heads * kGdnHeadDim * kGdnHeadDim;
  // In and out; with a log, of kLogTokens / 2 tokens on average, out with the last of each kLogTokens + 1 only.
  const double log_share = static_cast<double>(sizeof(StateLog)) / (kStatePartFloats * sizeof(float));
  const double state_bytes = state * (keeps_logs_ ? 1 + log_share + (1 + log_share) / (kLogTokens + 1) : 2.0);
  if (pending_projection_ == index && in_program()) {
    const LayerOnDevice& l = layer(index);
    pending_projection_ = -1;
    TokenPhase& phase = add_phase(TokenPhaseKind::kGdn, static_cast<double>(l.in.bytes) + state_bytes);
    phase.norm = l.input_norm;
    phase.weights = matrix(l.in.view);
    phase.conv = l.conv;
    phase.decay_rate = l.decay_rate;
    phase.dt_bias = l.dt_bias;
    phase.gdn_norm = l.gdn_norm;
    phase.state = recurrent_.layer(index_in_kind_[static_cast<size_t>(index)]);
    phase.log = keeps_logs_ ? recurrent_.layer_log(index_in_kind_[static_cast<size_t>(index)]) : nullptr;
    program_.projected_width = l.in.width;
    program_.z_column = l.in.columns[1];
    program_.a_column = l.in.columns[2];
    program_.b_column = l.in.columns[3];
    return;
  }
  settle();
  count_bytes(state_bytes);
  // Somebody looks between the stages of a step that keeps logs: the states are behind.
  if (keeps_logs_)
    for (const int slot : step_slots_) recurrent_.apply_log(slot, stream_.get());
  const Launch launch = keeps_logs_ ? launch_after_any() : launch_;
  const bool one_row_each = step_.rows == step_.sequence_count;
  if (one_row_each && mechanisms_.fused_gdn && gdn_decode_fits(device_, shape_.gdn_key_heads, shape_.gdn_value_heads)) {
    gdn_decode(launch, gdn_params(index));
  } else {
    gdn_prefill(launch, gdn_params(index));
  }
}

AttentionParams CudaBackend::attention_params(int index) const {
  const LayerOnDevice& l = layer(index);
  AttentionParams p;
  p.step = step_;
  p.projected = slots_.projected;
  p.stride = static_cast<size_t>(l.in.width);
  p.k_column = l.in.columns[1];
  p.v_column = l.in.columns[2];
  p.q_norm = l.q_norm;
  p.k_norm = l.k_norm;
  p.inverse_frequency = inverse_frequency_.data();
  p.rotary_dim = shape_.rotary_dim;
  p.eps = shape_.rms_eps;
  p.q_heads = shape_.q_heads;
  p.kv_heads = shape_.kv_heads;
  p.attn_q = slots_.attn_q;
  p.cache = kv_.layer(index_in_kind_[static_cast<size_t>(index)]);
  p.mixed = slots_.mixed;
  p.mixed_stride = static_cast<size_t>(shape_.mixer_width());
  p.partial = partial_.data();
  p.splits = splits(step_.rows);
  p.deep = deep_attention_;
  return p;
}

void CudaBackend::prepare_attention(int index) {
  run_program();
  attention_prepare(launch_, attention_params(index));
}

void CudaBackend::attend(int index) {
  run_program();
  count_bytes(cached_bytes_);
  const bool one_row_each = step_.rows == step_.sequence_count;
  if (!decode_rows() && !one_row_each && wgmma()) {
    attention_tiles(launch_, attention_params(index), tiles_, tile_count_);
  } else {
    attention_rows(launch_, attention_params(index), mechanisms_.gqa_packing);
  }
}

void CudaBackend::project_residual(int index) {
  const LayerOnDevice& l = layer(index);
  if (in_program()) {
    add_phase(TokenPhaseKind::kOut, static_cast<double>(l.out.bytes)).weights = matrix(l.out.view);
    return;
  }
  count_bytes(static_cast<double>(l.out.bytes));
  multiply(l.out, slots_.mixed, static_cast<size_t>(shape_.mixer_width()), step_.rows, slots_.residual,
           static_cast<size_t>(shape_.hidden), true);
}

// In a program route, experts_up and experts_down are one phase. Whoever looks in between gets them one by one.
void CudaBackend::settle() {
  settle_projection();
  const PutOff what = std::exchange(put_off_, PutOff::kNothing);
  if (what != PutOff::kNothing) {
    route_now(put_off_layer_);
    group_rows(put_off_layer_);
  }
  if (what == PutOff::kRouteAndUp) experts_up_now(put_off_layer_);
}

void CudaBackend::route(int index) {
  if (!in_program()) return route_now(index);
  put_off_ = PutOff::kRoute;
  put_off_layer_ = index;
}

void CudaBackend::route_now(int index) {
  const LayerOnDevice& l = layer(index);
  count_bytes(static_cast<double>(l.router.bytes));
  const auto hidden = static_cast<size_t>(shape_.hidden), width = static_cast<size_t>(l.router.width);
  if (one_pass_norm() && l.router.packed) {
    GemvInput in;
    in.residual = slots_.residual;
    in.norm = l.post_norm;
    in.eps = shape_.rms_eps;
    in.normed_out = slots_.moe_input;
    in.stride = hidden;
    project_rows(l.router.view, in, step_.rows, slots_.router_logits, width, l.router.width, false);
  } else {
    norm_rows(launch_, slots_.residual, nullptr, l.post_norm, shape_.rms_eps, step_.rows, shape_.hidden,
              slots_.moe_input);
    multiply(l.router, slots_.moe_input, hidden, step_.rows, slots_.router_logits, width, false);
  }
  choice_pending_ =
      (decode_rows() || listed_experts(l)) && l.experts.packed && mechanisms_.fused_choice && shape_.experts <= 256;
  if (!choice_pending_) choose_rows(launch_, slots_, step_.rows, shape_.experts, l.router.width, l.router.columns[1]);
}

void CudaBackend::group_rows(int index) {
  // Behind a route() that has been put off there is nothing to group yet; settle() does it if it comes to that.
  if (put_off_ == PutOff::kNothing && grouped_experts(layer(index)))
    group_by_expert(launch_, slots_.expert_ids, step_.rows, shape_.experts,
                    {pairs_.data(), expert_tiles_.data(), expert_tile_count_.data()});
}

// One product of the grouped experts and the same of the shared expert. Rows of x and out are [row][choice].
void CudaBackend::multiply_experts(const PackedView& routed, const PackedView& shared, const __half* x, size_t x_stride,
                                   size_t x_choice_stride, std::byte* out, size_t out_stride, size_t out_choice_stride,
                                   int columns, int shared_columns, GemmOutput output) {
  GemmParams p;
  p.w = routed;
  p.x = x;
  p.x_stride = x_stride;
  p.x_choice_stride = x_choice_stride;
  p.out = out;
  p.out_stride = out_stride;
  p.out_choice_stride = out_choice_stride;
  p.rows = step_.rows;
  p.columns = columns;
  p.pairs = pairs_.data();
  p.tiles = expert_tiles_.data();
  p.tile_count = expert_tile_count_.data();
  p.max_tiles = max_expert_tiles(step_.rows, shape_.experts);
  gemm(launch_, p, output);
  p.w = shared;
  p.x = x + kExpertsPerToken * x_choice_stride;
  p.out = out + kExpertsPerToken * out_choice_stride * 2;  // both outputs have 16 bits
  p.columns = shared_columns;
  p.pairs = nullptr;
  gemm(launch_, p, output);
}

ExpertsDecode CudaBackend::experts_decode(const LayerOnDevice& l) const {
  ExpertsDecode e;
  e.experts = &l.experts;
  e.shared = &l.shared;
  e.slots = slots_;
  e.rows = step_.rows;
  e.router_width = l.router.width;
  e.shared_column = l.router.columns[1];
  e.choose = choice_pending_;
  return e;
}

void CudaBackend::experts_up(int index) {
  if (put_off_ == PutOff::kRoute && put_off_layer_ == index) {
    put_off_ = PutOff::kRouteAndUp;
    return;
  }
  settle();
  experts_up_now(index);
}

void CudaBackend::experts_up_now(int index) {
  const LayerOnDevice& l = layer(index);
  count_bytes(expert_bytes(l) * 2 / 3);
  if (grouped_experts(l)) {
    multiply_experts(
        l.experts.up, l.shared.up, slots_.moe_input, static_cast<size_t>(shape_.hidden), 0,
        reinterpret_cast<std::byte*>(slots_.hidden), static_cast<size_t>(slot_width(Slot::kExpertHidden, shape_)),
        static_cast<size_t>(shape_.expert_width), shape_.expert_width, shape_.shared_expert_width, GemmOutput::kSwiglu);
  } else if (l.experts.packed) {
    const ExpertsDecode e = experts_decode(l);
    if (listed_experts(l)) return experts_up_rows(launch_, e);
    stream_experts(e) ? experts_up_stream(launch_, e) : experts_up_decode(launch_, e);
  } else {
    experts_up_plain(launch_, l.experts, l.shared, slots_, step_.rows, shape_.hidden);
  }
}

void CudaBackend::experts_down(int index) {
  const LayerOnDevice& l = layer(index);
  if (put_off_ == PutOff::kRouteAndUp && put_off_layer_ == index) {
    put_off_ = PutOff::kNothing;
    choice_pending_ = false;  // the kernel leaves it
    TokenPhase& phase = add_phase(TokenPhaseKind::kExperts, static_cast<double>(l.router.bytes) + expert_bytes(l));
    phase.norm = l.post_norm;
    phase.weights = matrix(l.experts.up);
    phase.down = matrix(l.experts.down);
    phase.shared_up = matrix(l.shared.up);
    phase.shared_down = matrix(l.shared.down);
    phase.router = matrix(l.router.view);
    return;
  }
  count_bytes(expert_bytes(l) / 3);
  settle();
  if (grouped_experts(l)) {
    const auto hidden = static_cast<size_t>(shape_.hidden);
    multiply_experts(l.experts.down, l.shared.down, slots_.hidden,
                     static_cast<size_t>(slot_width(Slot::kExpertHidden, shape_)),
                     static_cast<size_t>(shape_.expert_width), reinterpret_cast<std::byte*>(expert_out_.data()),
                     (kExpertsPerToken + 1) * hidden, hidden, shape_.hidden, shape_.hidden, GemmOutput::kBf16);
    sum_experts(launch_, slots_, expert_out_.data(), step_.rows, shape_.hidden);
  } else if (l.experts.packed) {
    // Given choices may come from the kernel right in front, so they must be waited for.
    const ExpertsDecode e = experts_decode(l);
    const Launch launch = choice_pending_ ? launch_ : launch_after_any();
    if (listed_experts(l)) return experts_down_rows(launch, e);
    stream_experts(e) ? experts_down_stream(launch, e) : experts_down_decode(launch, e);
  } else {
    experts_down_plain(launch_, l.experts, l.shared, slots_, step_.rows, shape_.hidden);
  }
}

void CudaBackend::head() {
  run_program();
  const Linear& w = weights_.head;
  count_bytes(static_cast<double>(w.bytes));
  const auto hidden = static_cast<size_t>(shape_.hidden), vocab = static_cast<size_t>(shape_.vocab);
  const int heads = step_.head_count;
  if (heads == 1 && w.packed) {
    GemvInput in;
    in.residual = slots_.residual;
    in.norm = weights_.final_norm;
    in.eps = shape_.rms_eps;
    in.stride = hidden;
    in.heads = step_.heads;
    return project_rows(w.view, in, 1, slots_.logits, vocab, shape_.vocab, false);
  }
  norm_rows(launch_, slots_.residual, step_.heads, weights_.final_norm, shape_.rms_eps, heads, shape_.hidden,
            slots_.normed);
  multiply(w, slots_.normed, hidden, heads, slots_.logits, vocab, false);
}

void CudaBackend::pick() {
  PickParams p;
  p.step = step_;
  p.logits = slots_.logits;
  p.vocab = shape_.vocab;
  p.counts = recurrent_.counts();
  p.last_picked = recurrent_.last_picked();
  p.results = results_.data();
  p.weights = sample_weights_.data();
  p.best = pick_best_.data();
  p.arrived = pick_arrived_.data();
  if (sampled_) {
    pick_sampled(launch_, p);
  } else {
    pick_greedy(launch_, p);
  }
}

// ---- slots as fp32 rows -------------------------------------------------------------------------------------------

CudaBackend::SlotMemory CudaBackend::slot_memory(Slot slot) const {
  const LayerOnDevice* gdn = nullptr;
  const LayerOnDevice* attention = nullptr;
  for (const LayerOnDevice& l : weights_.layers) (l.conv != nullptr ? gdn : attention) = &l;
  const auto part = [&](const LayerOnDevice* l, size_t i) {
    check(l != nullptr, "a slot of a kind of layer that the model has");
    return SlotMemory{slots_.projected + l->in.columns[i], 4, static_cast<size_t>(l->in.width)};
  };
  const auto width = static_cast<size_t>(slot_width(slot, shape_));
  switch (slot) {
    case Slot::kResidual:
      return {slots_.residual, 4, width};
    case Slot::kGdnQkv:
      return part(gdn, 0);
    case Slot::kGdnZ:
      return part(gdn, 1);
    case Slot::kGdnA:
      return part(gdn, 2);
    case Slot::kGdnB:
      return part(gdn, 3);
    case Slot::kAttnQGate:
      return part(attention, 0);
    case Slot::kAttnK:
      return part(attention, 1);
    case Slot::kAttnV:
      return part(attention, 2);
    case Slot::kAttnQ:
      return {slots_.attn_q, 2, width};
    case Slot::kMixed:
      return {slots_.mixed, 2, width};
    case Slot::kMoeInput:
      return {slots_.moe_input, 2, width};
    case Slot::kExpertIds:
      return {slots_.expert_ids, 4, width};
    case Slot::kExpertWeights:
      return {slots_.expert_weights, 4, width};
    case Slot::kSharedGate:
      return {slots_.shared_gate, 4, width};
    case Slot::kExpertHidden:
      return {slots_.hidden, 2, width};
    case Slot::kLogits:
      return {slots_.logits, 4, width};
  }
  check(false, "unknown slot");
  return {};
}

namespace {

bool is_choice(Slot slot) {
  return slot == Slot::kExpertIds || slot == Slot::kExpertWeights || slot == Slot::kSharedGate;
}

float decode_element(Slot slot, const std::byte* from) {
  if (slot == Slot::kExpertIds) {
    int32_t id;
    std::memcpy(&id, from, sizeof id);
    return static_cast<float>(id);
  }
  if (slot == Slot::kAttnQ) {
    bf16 value;
    std::memcpy(&value, from, sizeof value);
    return to_float(value);
  }
  if (slot == Slot::kMixed || slot == Slot::kMoeInput || slot == Slot::kExpertHidden) {
    __half value;
    std::memcpy(&value, from, sizeof value);
    return __half2float(value) / (slot == Slot::kExpertHidden ? kHiddenScale : 1.0f);
  }
  float value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void encode_element(Slot slot, float value, std::byte* to) {
  if (slot == Slot::kExpertIds) {
    const auto id = static_cast<int32_t>(value);
    std::memcpy(to, &id, sizeof id);
  } else if (slot == Slot::kAttnQ) {
    const bf16 rounded = to_bf16(value);
    std::memcpy(to, &rounded, sizeof rounded);
  } else if (slot == Slot::kMixed || slot == Slot::kMoeInput || slot == Slot::kExpertHidden) {
    const __half rounded = __float2half(value * (slot == Slot::kExpertHidden ? kHiddenScale : 1.0f));
    std::memcpy(to, &rounded, sizeof rounded);
  } else {
    std::memcpy(to, &value, sizeof value);
  }
}

}  // namespace

void CudaBackend::read_slot(Slot slot, std::span<float> out) {
  require_eager();
  settle();
  if (choice_pending_ && is_choice(slot)) {
    const LayerOnDevice& l = weights_.layers.front();
    choose_rows(launch_after_any(), slots_, step_.rows, shape_.experts, l.router.width, l.router.columns[1]);
  }
  const SlotMemory memory = slot_memory(slot);
  const auto width = static_cast<size_t>(slot_width(slot, shape_)), size = static_cast<size_t>(memory.element_bytes);
  const size_t rows = out.size() / width;
  std::vector<std::byte> raw(rows * width * size);
  cuda_check(cudaMemcpy2DAsync(raw.data(), width * size, memory.data, memory.stride * size, width * size, rows,
                               cudaMemcpyDeviceToHost, stream_.get()),
             "read a slot");
  stream_.synchronize();
  for (size_t i = 0; i < rows * width; ++i) out[i] = decode_element(slot, raw.data() + i * size);
}

void CudaBackend::write_slot(Slot slot, std::span<const float> in) {
  require_eager();
  settle();
  if (is_choice(slot)) choice_pending_ = false;
  const SlotMemory memory = slot_memory(slot);
  const auto width = static_cast<size_t>(slot_width(slot, shape_)), size = static_cast<size_t>(memory.element_bytes);
  const size_t rows = in.size() / width;
  std::vector<std::byte> raw(rows * width * size);
  for (size_t i = 0; i < rows * width; ++i) encode_element(slot, in[i], raw.data() + i * size);
  cuda_check(cudaMemcpy2DAsync(memory.data, memory.stride * size, raw.data(), width * size, width * size, rows,
                               cudaMemcpyHostToDevice, stream_.get()),
             "write a slot");
  stream_.synchronize();
}

}  // namespace calla::cuda
