#include "backend/cuda/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/create.h"

namespace calla::cuda {
namespace {

// A recorded step has fixed places for so many rows, sequences and heads.
constexpr int kMaxRecordedRows = 32;
constexpr size_t kFirstBlockBytes = size_t{4} << 20;

struct MechanismName {
  const char* name;
  bool Mechanisms::*member;
};
constexpr MechanismName kMechanisms[] = {
    {"graphs", &Mechanisms::graphs},
    {"dependent-launch", &Mechanisms::dependent_launch},
    {"gqa-packing", &Mechanisms::gqa_packing},
    {"split-kv", &Mechanisms::split_kv},
    {"fused-choice", &Mechanisms::fused_choice},
    {"expert-list", &Mechanisms::expert_list},
    {"token-program", &Mechanisms::token_program},
    {"rows-program", &Mechanisms::rows_program},
    {"state-log", &Mechanisms::state_log},
    {"fused-gdn", &Mechanisms::fused_gdn},
    {"weight-stream", &Mechanisms::weight_stream},
    {"wgmma", &Mechanisms::wgmma},
};

}  // namespace

Mechanisms Mechanisms::without(const std::vector<std::string>& names) {
  Mechanisms m;
  for (const std::string& name : names) {
    std::string known;
    bool found = false;
    for (const MechanismName& mechanism : kMechanisms) {
      known += (known.empty() ? "" : ", ") + std::string(mechanism.name);
      if (name != mechanism.name) continue;
      m.*mechanism.member = false;
      found = true;
    }
    if (!found) throw UsageError("--ablate: the cuda backend has no mechanism '" + name + "'; known: " + known);
  }
  return m;
}

std::vector<std::string> Mechanisms::names() {
  std::vector<std::string> names;
  for (const MechanismName& mechanism : kMechanisms) names.emplace_back(mechanism.name);
  return names;
}

CudaBackend::CudaBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options)
    : shape_(shape),
      options_(options),
      mechanisms_(Mechanisms::without(options.ablate)),
      device_(open_device()),
      weights_(shape, weights, stream_.get(), options.on_upload),
      recurrent_(shape),
      kv_(shape) {
  for (int i = 0, gdn = 0, attention = 0; i < shape.layers(); ++i)
    index_in_kind_.push_back(shape.layer_kinds[static_cast<size_t>(i)] == LayerKind::kAttention ? attention++ : gdn++);
  launch_.stream = stream_.get();
  launch_.dependent = mechanisms_.dependent_launch;
  launch_.device = device_;
  allocate_slots();
}

CudaBackend::~CudaBackend() { cudaStreamSynchronize(stream_.get()); }

void CudaBackend::allocate_slots() {
  const auto rows = static_cast<size_t>(options_.max_rows), hidden = static_cast<size_t>(shape_.hidden);
  const auto take = [&]<class T>(T*& to, size_t count) {
    slot_memory_.emplace_back(count * sizeof(T), "memory for activations");
    to = reinterpret_cast<T*>(slot_memory_.back().data());
    cuda_check(cudaMemsetAsync(to, 0, count * sizeof(T), stream_.get()), "clear activations");
  };
  int router_width = 0;
  for (const LayerOnDevice& l : weights_.layers) {
    projected_width_ = std::max(projected_width_, static_cast<size_t>(l.in.width));
    router_width = std::max(router_width, l.router.width);
  }
  const auto hidden_width = static_cast<size_t>(slot_width(Slot::kExpertHidden, shape_));
  const auto heads = static_cast<size_t>(options_.max_heads), vocab = static_cast<size_t>(shape_.vocab);
  take(slots_.residual, rows * hidden);
  take(slots_.normed, std::max(rows, heads) * hidden);
  take(slots_.projected, rows * projected_width_);
  take(slots_.attn_q, rows * static_cast<size_t>(shape_.q_width()));
  take(slots_.mixed, rows * static_cast<size_t>(shape_.mixer_width()));
  take(slots_.moe_input, rows * hidden);
  take(slots_.router_logits, rows * static_cast<size_t>(router_width));
  take(slots_.expert_ids, rows * kExpertsPerToken);
  take(slots_.expert_weights, rows * kExpertsPerToken);
  take(slots_.shared_gate, rows);
  take(slots_.hidden, rows * hidden_width);
  take(slots_.logits, heads * vocab);

  convolved_ = DeviceArray<float>(rows * static_cast<size_t>(shape_.gdn_conv_width()), "memory for activations");
  block_scalars_ = DeviceArray<float>(gdn_blocks(rows) * static_cast<size_t>(shape_.gdn_value_heads) * kBlockScalars,
                                      "memory for activations");
  size_t partials = 0;
  for (int n = 1; n <= options_.max_rows; ++n)
    partials = std::max(partials, static_cast<size_t>(n) * static_cast<size_t>(splits(n)));
  partial_ =
      DeviceArray<float>(partials * static_cast<size_t>(shape_.q_heads) * kPartialFloats, "memory for split attention");
  if (wgmma()) {
    const auto tiles = static_cast<size_t>(max_expert_tiles(options_.max_rows, shape_.experts));
    pairs_ = DeviceArray<int32_t>(rows * kExpertsPerToken, "memory for grouping");
    expert_tiles_ = DeviceArray<ExpertTile>(tiles, "memory for grouping");
    expert_tile_count_ = DeviceArray<int32_t>(1, "memory for grouping");
    expert_out_ = DeviceArray<uint16_t>(rows * (kExpertsPerToken + 1) * hidden, "memory for activations");
  }
  const bool fits = shape_.mixer_width() == token::kMixed &&
                    std::all_of(weights_.layers.begin(), weights_.layers.end(), token_program_fits);
  if (fits && mechanisms_.rows_program && options_.max_rows > 1 && rows_program_runs(device_)) {
    rows_words_ = DeviceArray<RowsWords>(rows::kMost - 1, "memory for the program of several rows");
    cuda_check(cudaMemsetAsync(rows_words_.data(), 0, rows_words_.size_bytes(), stream_.get()), "clear memory");
  }
  if (fits && mechanisms_.token_program && token_program_runs(device_)) {
    token_words_ = DeviceArray<TokenWords>(1, "memory for the token program");
    cuda_check(cudaMemsetAsync(token_words_.data(), 0, sizeof(TokenWords), stream_.get()), "clear memory");
    const uint32_t first = 1;
    cuda_check(
        cudaMemcpyAsync(&token_words_.data()->generation, &first, sizeof first, cudaMemcpyHostToDevice, stream_.get()),
        "first generation");
  }
  sample_weights_ = DeviceArray<float>(heads * vocab, "memory for sampling");
  pick_best_ = DeviceArray<uint64_t>(heads, "memory for sampling");
  pick_arrived_ = DeviceArray<uint32_t>(heads, "memory for sampling");
  cuda_check(cudaMemsetAsync(pick_best_.data(), 0, pick_best_.size_bytes(), stream_.get()), "clear sampling memory");
  cuda_check(cudaMemsetAsync(pick_arrived_.data(), 0, pick_arrived_.size_bytes(), stream_.get()),
             "clear sampling memory");

  std::vector<double> frequency(static_cast<size_t>(shape_.rotary_dim / 2));
  for (size_t i = 0; i < frequency.size(); ++i)
    frequency[i] = std::pow(static_cast<double>(shape_.rope_theta), -2.0 * static_cast<double>(i) / shape_.rotary_dim);
  inverse_frequency_ = DeviceArray<double>(frequency.size(), "memory for RoPE");
  cuda_check(cudaMemcpyAsync(inverse_frequency_.data(), frequency.data(), inverse_frequency_.size_bytes(),
                             cudaMemcpyHostToDevice, stream_.get()),
             "RoPE table");
  stream_.synchronize();
  results_ = PinnedArray<TokenId>(heads * kStepsInFlight, "page-locked memory for picked tokens");
}

void CudaBackend::allocate_state(const StateMemoryPlan& plan) {
  check(recurrent_.slots() == 0, "allocate_state is called once");
  // Programs of several rows keep logs; a step has no more sequences than heads.
  const bool logs = mechanisms_.state_log && rows_words_.size() > 0 && options_.max_heads > 1;
  recurrent_.allocate(plan.recurrent_slots,
                      logs ? std::min({plan.recurrent_slots, options_.max_heads, kMostProgramRows}) : 0, stream_.get());
  kv_.allocate(plan.kv_pages, stream_.get());
}

std::string CudaBackend::description() const {
  std::string text = "cuda: " + device_.name + ", sm_" + std::to_string(device_.major) + std::to_string(device_.minor) +
                     ", " + std::to_string(weights_.bytes() >> 20) + " MiB of weights";
  if (token_words_.size() > 0 || rows_words_.size() > 0) text += ", a token's layers as one kernel between attentions";
  if (weights_.unpacked_matrices() > 0)
    text +=
        ", " + std::to_string(weights_.unpacked_matrices()) + " matrices in a format that only the plain kernels read";
  return text;
}

int CudaBackend::splits(int rows) const {
  if (!mechanisms_.split_kv) return 1;
  return std::max(1, device_.multiprocessors / (shape_.kv_heads * rows));
}

// ---- a step -------------------------------------------------------------------------------------------------------

void CudaBackend::build_block(const Batch& batch, InFlight& to) {
  const size_t rows = batch.tokens.size(), sequences = batch.sequences.size(), heads = batch.heads.size();
  const bool fixed = mode_ != Mode::kEager;
  BlockLayout at;
  size_t end = 0;
  const auto place = [&](size_t& offset, size_t bytes) {
    offset = end;
    end += align(bytes);
  };
  place(at.heads, sizeof(StepHead) * (fixed ? kMaxRecordedRows : heads));
  place(at.sequences, sizeof(StepSequence) * (fixed ? kMaxRecordedRows : sequences));
  place(at.tokens, sizeof(TokenId) * (fixed ? kMaxRecordedRows : rows));
  size_t tile_count = 0, words = 0;
  for (const SequenceRows& s : batch.sequences) {
    tile_count += static_cast<size_t>((s.rows + kAttentionTileTokens - 1) / kAttentionTileTokens);
    words += s.kv_pages.size();
  }
  for (const HeadRow& h : batch.heads) words += h.allowed.size();
  place(at.tiles, sizeof(AttentionTile) * (fixed ? 0 : tile_count));
  place(at.words, sizeof(int32_t) * words);
  at.bytes = end;

  if (at.bytes > block_.size()) {
    stream_.synchronize();
    graphs_.clear();  // they point to the old block
    block_ = DeviceBytes(std::max(at.bytes * 2, kFirstBlockBytes), "memory for step parameters");
    if (mode_ == Mode::kReplay) mode_ = Mode::kEager;
    if (mode_ == Mode::kRecording) mode_ = Mode::kEager;
    return build_block(batch, to);
  }
  if (to.block.size() < block_.size()) to.block = PinnedArray<std::byte>(block_.size(), "page-locked step parameters");

  step_slots_.clear();
  for (const SequenceRows& s : batch.sequences) {
    check(s.recurrent_slot >= 0 && s.recurrent_slot < recurrent_.slots(), "a valid slot");
    step_slots_.push_back(s.recurrent_slot);
  }
  step_logs_.assign(sequences, 0);
  keeps_logs_ = in_rows_program(static_cast<int>(rows), static_cast<int>(sequences)) &&
                sequences <= static_cast<size_t>(recurrent_.logs());
  if (keeps_logs_) {
    recurrent_.open_logs(step_slots_, step_logs_, stream_.get());
  } else {
    for (const int slot : step_slots_) recurrent_.settle(slot, stream_.get());
  }

  std::byte* host = to.block.data();
  auto* word = reinterpret_cast<int32_t*>(host + at.words);
  int32_t word_count = 0;
  auto* tile = reinterpret_cast<AttentionTile*>(host + at.tiles);
  int first_row = 0;
  std::vector<int> first_rows;
  cached_bytes_ = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const SequenceRows& from = batch.sequences[s];
    check(from.rows > 0, "a sequence has rows");
    check(static_cast<int>(from.kv_pages.size()) * kKvPageRows >= from.position + from.rows, "pages for every row");
    const StepSequence sequence{from.recurrent_slot, first_row, from.rows, from.position, word_count, step_logs_[s]};
    std::memcpy(host + at.sequences + s * sizeof sequence, &sequence, sizeof sequence);
    std::memcpy(word + word_count, from.kv_pages.data(), from.kv_pages.size_bytes());
    word_count += static_cast<int32_t>(from.kv_pages.size());
    if (!fixed)
      for (int i = 0; i < from.rows; i += kAttentionTileTokens) *tile++ = {static_cast<int32_t>(s), i};
    cached_bytes_ += 2.0 * 2 * shape_.kv_width() * (from.position + from.rows);
    first_rows.push_back(first_row);
    first_row += from.rows;
  }
  check(first_row == static_cast<int>(rows), "the sequences' rows add up to the tokens");
  std::memcpy(host + at.tokens, batch.tokens.data(), batch.tokens.size_bytes());
  for (size_t i = 0; i < heads; ++i) {
    const HeadRow& from = batch.heads[i];
    const auto s = static_cast<size_t>(from.sequence);
    const SequenceRows& sequence = batch.sequences[s];
    StepHead head;
    head.row = from.row;
    head.slot = sequence.recurrent_slot;
    head.pick = from.pick;
    head.sampling = from.sampling;
    const int position = sequence.position + from.row - first_rows[s] + 1;  // of the token to be picked
    head.uniform = draw_uniform(from.sampling.seed, static_cast<uint64_t>(position));
    head.result = static_cast<int32_t>(&to - in_flight_.data()) * options_.max_heads + static_cast<int32_t>(i);
    if (from.pick && !from.allowed.empty()) {
      check(from.allowed.size() * 32 >= static_cast<size_t>(shape_.vocab), "the token mask covers the vocabulary");
      head.mask_offset = word_count;
      std::memcpy(word + word_count, from.allowed.data(), from.allowed.size_bytes());
      word_count += static_cast<int32_t>(from.allowed.size());
    }
    std::memcpy(host + at.heads + i * sizeof head, &head, sizeof head);
  }
  cuda_check(cudaMemcpyAsync(block_.data(), host, at.bytes, cudaMemcpyHostToDevice, stream_.get()), "step parameters");

  step_.heads = reinterpret_cast<const StepHead*>(block_.data() + at.heads);
  step_.sequences = reinterpret_cast<const StepSequence*>(block_.data() + at.sequences);
  step_.tokens = reinterpret_cast<const TokenId*>(block_.data() + at.tokens);
  step_.pages = reinterpret_cast<const int32_t*>(block_.data() + at.words);
  step_.masks = reinterpret_cast<const uint32_t*>(block_.data() + at.words);
  step_.rows = static_cast<int>(rows);
  step_.sequence_count = static_cast<int>(sequences);
  step_.head_count = static_cast<int>(heads);
  tiles_ = reinterpret_cast<const AttentionTile*>(block_.data() + at.tiles);
  tile_count_ = static_cast<int>(tile_count);
}

bool CudaBackend::begin(const Batch& batch) {
  const int rows = static_cast<int>(batch.tokens.size()), heads = static_cast<int>(batch.heads.size());
  check(rows > 0 && rows <= options_.max_rows, "batch rows within max_rows");
  check(heads <= options_.max_heads, "heads within max_heads");
  check(recurrent_.slots() > 0, "allocate_state comes before the first step");
  if (mode_ == Mode::kRecording) end_recording(false);  // an exception cut the last step short

  InFlight& mine = in_flight_[(last_step_ + 1) % kStepsInFlight];
  mine.done.synchronize();
  mine.heads = heads;
  want_logits_ = batch.want_logits;
  choice_pending_ = false;
  pending_projection_ = -1;
  put_off_ = PutOff::kNothing;
  program_.count = 0;
  program_bytes_ = 0;
  bool any_pick = false;
  sampled_ = false;
  for (const HeadRow& head : batch.heads) {
    any_pick |= head.pick;
    sampled_ |= head.pick && (head.sampling.temperature > 0 || head.sampling.has_penalties() || !head.allowed.empty());
  }
  std::fill_n(results_.data() + (last_step_ + 1) % kStepsInFlight * static_cast<size_t>(options_.max_heads), heads,
              TokenId{-1});

  const bool one_row_each = rows == static_cast<int>(batch.sequences.size());
  const bool recordable = options_.replay_steps && mechanisms_.graphs && one_row_each && rows <= kMaxRecordedRows &&
                          heads <= kMaxRecordedRows;
  int pages = 0;
  for (const SequenceRows& s : batch.sequences)
    pages = std::max(pages, (s.position + s.rows + kKvPageRows - 1) / kKvPageRows);
  deep_attention_ = pages > 2 * splits(rows);
  key_ = {rows, heads, any_pick, sampled_, deep_attention_};
  mode_ = Mode::kEager;
  if (recordable && !profiler_) {
    const auto found = graphs_.find(key_);
    if (found == graphs_.end()) {
      graphs_.emplace(key_, std::nullopt);  // the first time runs as it is, which also loads the kernels
    } else {
      mode_ = found->second ? Mode::kReplay : Mode::kRecording;
    }
  }
  try {
    build_block(batch, mine);
    if (mode_ == Mode::kRecording || profiler_)
      cuda_check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "start recording a step");
  } catch (...) {
    mode_ = Mode::kEager;  // nothing is being recorded that would have to be ended
    throw;
  }
  if (profiler_) mode_ = Mode::kProfiling;
  return mode_ != Mode::kReplay;
}

void CudaBackend::end_recording(bool keep) {
  cudaGraph_t captured = nullptr;
  mode_ = Mode::kEager;
  const cudaError_t status = cudaStreamEndCapture(stream_.get(), &captured);
  if (status != cudaSuccess && !keep) {  // what cut the step short spoilt the recording too; it has been told
    (void)cudaGetLastError();
    return;
  }
  cuda_check(status, "record a step");
  Graph graph(captured);
  if (!keep) {
    graph.launch(stream_.get());
    stream_.synchronize();
    return;
  }
  std::optional<Graph>& place = graphs_[key_];
  place = std::move(graph);
  place->launch(stream_.get());
}

// Runs the captured step, and then its kernels one by one.
void CudaBackend::end_profiling() {
  mode_ = Mode::kEager;
  cudaGraph_t captured = nullptr, copy = nullptr;
  cuda_check(cudaStreamEndCapture(stream_.get(), &captured), "record a step");
  const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, decltype(&cudaGraphDestroy)> owner(captured,
                                                                                               &cudaGraphDestroy);
  cuda_check(cudaGraphClone(&copy, captured), "copy a step");
  Graph(copy).launch(stream_.get());
  stream_.synchronize();
  profiled_ = profiler_->measure(captured, stream_.get());
}

std::vector<KernelTime> CudaBackend::profile(FunctionRef<void()> step) {
  profiler_ = std::make_unique<StepProfiler>();
  profiled_.clear();
  try {
    step();
  } catch (...) {
    profiler_ = nullptr;
    if (mode_ == Mode::kProfiling) {
      mode_ = Mode::kEager;
      cudaGraph_t captured = nullptr;
      (void)cudaStreamEndCapture(stream_.get(), &captured);
      if (captured != nullptr) cudaGraphDestroy(captured);
      (void)cudaGetLastError();
    }
    throw;
  }
  profiler_ = nullptr;
  return std::move(profiled_);
}

void CudaBackend::require_eager() {
  check(mode_ != Mode::kReplay, "a replayed step has no stages to look between (see BackendOptions::replay_steps)");
  if (mode_ == Mode::kRecording) end_recording(false);
}

StepId CudaBackend::submit() {
  settle();
  if (mode_ == Mode::kProfiling) {
    end_profiling();
  } else if (mode_ == Mode::kRecording) {
    end_recording(true);
  } else if (mode_ == Mode::kReplay) {
    graphs_[key_]->launch(stream_.get());
  }
  mode_ = Mode::kEager;
  InFlight& mine = in_flight_[++last_step_ % kStepsInFlight];
  if (want_logits_ && mine.heads > 0) {
    const size_t n = static_cast<size_t>(mine.heads) * static_cast<size_t>(shape_.vocab);
    if (mine.logits.size() < n) mine.logits = PinnedArray<float>(n, "page-locked memory for logits");
    cuda_check(
        cudaMemcpyAsync(mine.logits.data(), slots_.logits, n * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()),
        "logits");
  }
  mine.done.record(stream_.get());
  return last_step_;
}

void CudaBackend::wait(StepId step) {
  check(step + kStepsInFlight > last_step_ && step <= last_step_, "a step that is still in flight");
  in_flight_[step % kStepsInFlight].done.synchronize();
}

std::span<const float> CudaBackend::logits(StepId step, int head_index) {
  const auto vocab = static_cast<size_t>(shape_.vocab);
  return std::span<const float>(in_flight_[step % kStepsInFlight].logits.span())
      .subspan(static_cast<size_t>(head_index) * vocab, vocab);
}

std::span<const TokenId> CudaBackend::picked(StepId step) {
  const InFlight& of = in_flight_[step % kStepsInFlight];
  return std::span<const TokenId>(results_.span())
      .subspan(step % kStepsInFlight * static_cast<size_t>(options_.max_heads), static_cast<size_t>(of.heads));
}

}  // namespace calla::cuda

namespace calla {

BackendInfo cuda_backend_info() {
  const std::string reason = cuda::why_no_device();
  BackendInfo info{"cuda", "NVIDIA GPUs (Hopper first, Ampere and later)", reason.empty(), reason, true};
  info.ablations = cuda::Mechanisms::names();
  info.prefill_rows = 4096;  // a tenth of a second on an H200, at more than twice the speed of 512
  return info;
}

std::unique_ptr<Backend> create_cuda_backend(const ModelShape& shape, const ModelWeights& weights,
                                             const BackendOptions& options) {
  return std::make_unique<cuda::CudaBackend>(shape, weights, options);
}

}  // namespace calla
