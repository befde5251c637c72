// The backend's frame: memory, batches, steps, slots. The stages are in stages_*.cc.
#include "backend/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/attention_scratch.h"
#include "backend/cpu/bandwidth.h"
#include "backend/create.h"
#include "base/check.h"
#include "base/error.h"

namespace calla::cpu {
namespace {

constexpr int kSlotCount = static_cast<int>(Slot::kLogits) + 1;

bool ablated(const BackendOptions& options, const std::string& name) {
  return std::find(options.ablate.begin(), options.ablate.end(), name) != options.ablate.end();
}

void check_ablate(const BackendOptions& options) {
  for (const std::string& name : options.ablate)
    if (name != "avx512") throw UsageError("--ablate " + name + ": the cpu backend knows: avx512");
}

}  // namespace

const char* stage_name(Stage stage) {
  constexpr std::array<const char*, kStages> kNames = {"embed",
                                                       "project_gdn",
                                                       "mix_gdn",
                                                       "project_attention",
                                                       "prepare_attention",
                                                       "attend",
                                                       "project_residual",
                                                       "route",
                                                       "group_rows",
                                                       "experts_up",
                                                       "experts_down",
                                                       "head",
                                                       "pick"};
  return kNames[static_cast<size_t>(stage)];
}

CpuBackend::CpuBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options)
    : shape_(shape),
      weights_(weights),
      options_(options),
      kernels_(choose_kernels(!ablated(options, "avx512"))),
      threads_(options.threads),
      linear_(kernels_, threads_, options.full_precision),
      pool_(shape, options.full_precision),
      inputs_(options.max_rows, std::max(shape.hidden, shape.mixer_width())),
      routed_inputs_(options.max_rows * kExpertsPerToken, shape.expert_width),
      shared_inputs_(options.max_rows, shape.shared_expert_width) {
  check_ablate(options);
  const auto rows = static_cast<size_t>(options.max_rows);
  for (int i = 0; i < kSlotCount; ++i) {
    const auto which = static_cast<Slot>(i);
    const bool elsewhere = which == Slot::kLogits || which == Slot::kExpertHidden;
    slots_.emplace_back(elsewhere ? 0 : rows * slot_width(which, shape), slot_name(which));
  }
  normed_ = MappedArray<float>(rows * shape.hidden, "normalised rows");
  router_logits_ = MappedArray<float>(rows * shape.experts, "router logits");
  routed_hidden_ = MappedArray<float>(rows * kExpertsPerToken * shape.expert_width, "expert activations");
  shared_hidden_ = MappedArray<float>(rows * shape.shared_expert_width, "shared expert activations");
  down_products_ =
      MappedArray<float>(kFewRows * (kExpertsPerToken + 1) * static_cast<size_t>(shape.hidden), "down projections");
  gdn_scratch_ = MappedArray<float>(threads_.threads() * rows * (4 * kGdnHeadDim + 2), "GDN scratch");
  rope_ = MappedArray<float>(rows * shape.rotary_dim, "RoPE table");
  for (int i = 0; i < shape.rotary_dim / 2; ++i)
    rope_frequencies_.push_back(std::pow(static_cast<double>(shape.rope_theta), -2.0 * i / shape.rotary_dim));
  attention_ = std::make_unique<AttentionScratch>(threads_.threads());
  pickers_.resize(static_cast<size_t>(threads_.threads()));
  for (const LayerWeights& layer : weights.layers) {
    std::vector<float>& taps = conv_taps_.emplace_back();
    if (!layer.gdn) continue;
    const int channels = shape.gdn_conv_width();
    taps.resize(static_cast<size_t>(channels) * kConvWidth);
    for (int c = 0; c < channels; ++c)
      for (int j = 0; j < kConvWidth; ++j)
        taps[static_cast<size_t>(j) * channels + c] = layer.gdn->conv[static_cast<size_t>(c) * kConvWidth + j];
  }
  expert_starts_.resize(static_cast<size_t>(shape.experts) + 1);
  tokens_.reserve(rows);
  positions_.reserve(rows);
  groups_.reserve(shape.experts);
  entry_rows_.reserve(rows * kExpertsPerToken);
  entry_ids_.reserve(rows * kExpertsPerToken);
  entry_weights_.reserve(rows * kExpertsPerToken);
  for (Step& step : steps_)
    step.logits = MappedArray<float>(static_cast<size_t>(options.max_heads) * shape.vocab, "logits");
}

CpuBackend::~CpuBackend() = default;

std::string CpuBackend::description() const {
  return "cpu: " + kernels_.name + ", " + std::to_string(threads_.threads()) +
         (threads_.threads() == 1 ? " thread, " : " threads, ") +
         (options_.full_precision ? "fp32 activations and KV cache" : "16-bit activations, fp16 KV cache");
}

void CpuBackend::export_recurrent(int slot, std::span<std::byte> out) {
  check(out.size() == pool_.slot_bytes(), "size of an exported slot");
  std::ranges::copy(pool_.slot(slot), out.begin());
}

void CpuBackend::import_recurrent(int slot, std::span<const std::byte> in) {
  check(in.size() == pool_.slot_bytes(), "size of an imported slot");
  std::ranges::copy(in, pool_.slot(slot).begin());
}

void CpuBackend::export_kv_page(int page, std::span<std::byte> out) {
  check(out.size() == pool_.page_bytes(), "size of an exported page");
  std::ranges::copy(pool_.page(page), out.begin());
}

void CpuBackend::import_kv_page(int page, std::span<const std::byte> in) {
  check(in.size() == pool_.page_bytes(), "size of an imported page");
  std::ranges::copy(in, pool_.page(page).begin());
}

double CpuBackend::probe_read_bandwidth() { return cpu::probe_read_bandwidth(threads_); }

std::vector<KernelTime> CpuBackend::profile(FunctionRef<void()> step) {
  profile_.reset();
  step();
  std::vector<KernelTime> times;
  for (int i = 0; i < kStages; ++i) {
    const auto stage = static_cast<Stage>(i);
    const StageTime& time = profile_[stage];
    if (time.calls > 0) times.push_back({stage_name(stage), time.calls, time.seconds, time.bytes});
  }
  return times;
}

bool CpuBackend::begin(const Batch& batch) {
  batch_ = batch;
  rows_ = static_cast<int>(batch.tokens.size());
  check(rows_ > 0 && rows_ <= options_.max_rows, "batch rows within max_rows");
  check(batch.heads.size() <= static_cast<size_t>(options_.max_heads), "heads within max_heads");
  tokens_.clear();
  positions_.clear();
  ranges_.clear();
  for (const SequenceRows& sequence : batch.sequences) {
    ranges_.push_back({&sequence, static_cast<int>(positions_.size())});
    for (int i = 0; i < sequence.rows; ++i) {
      TokenId token = batch.tokens[positions_.size()];
      if (token == kLastPicked) token = pool_.last_token(sequence.recurrent_slot);
      check(token >= 0 && token < shape_.vocab, "token id within the vocabulary");
      tokens_.push_back(token);
      positions_.push_back(sequence.position + i);
    }
  }
  check(positions_.size() == batch.tokens.size(), "the sequences' rows add up to the batch");
  const int half = shape_.rotary_dim / 2;
  for (int row = 0; row < rows_; ++row) {
    float* table = rope_.data() + static_cast<size_t>(row) * shape_.rotary_dim;
    for (int i = 0; i < half; ++i) {
      const double angle = positions_[row] * rope_frequencies_[i];
      table[i] = static_cast<float>(std::cos(angle));
      table[half + i] = static_cast<float>(std::sin(angle));
    }
  }
  current().picked.assign(batch.heads.size(), -1);
  current().has_logits = false;
  return true;
}

StepId CpuBackend::submit() {
  Step& step = current();
  step.id = ++last_step_;
  step.has_logits = batch_.want_logits;
  return last_step_;
}

void CpuBackend::wait(StepId step) {
  check(step > 0 && step <= last_step_ && step + kStepsInFlight > last_step_, "a step in flight");
}

std::span<const float> CpuBackend::logits(StepId step, int head_index) {
  const Step& done = steps_[step % kStepsInFlight];
  check(done.id == step && done.has_logits, "logits of a recent step that asked for them");
  return done.logits.span().subspan(static_cast<size_t>(head_index) * shape_.vocab, shape_.vocab);
}

std::span<const TokenId> CpuBackend::picked(StepId step) {
  const Step& done = steps_[step % kStepsInFlight];
  check(done.id == step, "picks of a recent step");
  return done.picked;
}

void CpuBackend::read_slot(Slot which, std::span<float> out) {
  const auto width = static_cast<size_t>(slot_width(which, shape_));
  check(out.size() % width == 0, "whole rows");
  if (which == Slot::kLogits) {
    std::copy_n(current().logits.data(), out.size(), out.begin());
  } else if (which == Slot::kExpertHidden) {
    const size_t routed = static_cast<size_t>(kExpertsPerToken) * shape_.expert_width, shared = width - routed;
    for (size_t i = 0; i < out.size() / width; ++i) {
      std::copy_n(routed_hidden_.data() + i * routed, routed, out.begin() + i * width);
      std::copy_n(shared_hidden_.data() + i * shared, shared, out.begin() + i * width + routed);
    }
  } else {
    std::copy_n(slot(which), out.size(), out.begin());
  }
}

void CpuBackend::write_slot(Slot which, std::span<const float> in) {
  const auto width = static_cast<size_t>(slot_width(which, shape_));
  check(in.size() % width == 0, "whole rows");
  if (which == Slot::kLogits) {
    std::ranges::copy(in, current().logits.data());
  } else if (which == Slot::kExpertHidden) {
    const size_t routed = static_cast<size_t>(kExpertsPerToken) * shape_.expert_width, shared = width - routed;
    for (size_t i = 0; i < in.size() / width; ++i) {
      std::copy_n(in.begin() + i * width, routed, routed_hidden_.data() + i * routed);
      std::copy_n(in.begin() + i * width + routed, shared, shared_hidden_.data() + i * shared);
    }
  } else {
    std::ranges::copy(in, slot(which));
  }
}

}  // namespace calla::cpu

namespace calla {

BackendInfo cpu_backend_info() {
  BackendInfo info{"cpu", "any machine: AVX-512, AVX2, NEON; weights used as they lie in the file", true, ""};
  info.ablations = {"avx512"};
  return info;
}

std::unique_ptr<Backend> create_cpu_backend(const ModelShape& shape, const ModelWeights& weights,
                                            const BackendOptions& options) {
  return std::make_unique<cpu::CpuBackend>(shape, weights, options);
}

}  // namespace calla
