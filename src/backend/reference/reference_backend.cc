// The reference backend: each stage of backend.h in plain loops over rows, in the order in which
// docs/model.md states it. Read it to learn what a stage does; every other backend is tested against it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <new>

#include "backend/create.h"
#include "backend/reference/reference_math.h"
#include "base/check.h"
#include "base/error.h"

namespace calla {
namespace {

using namespace reference;

constexpr int kSlots = static_cast<int>(Slot::kLogits) + 1;

// Zeroes that take no memory until they are touched: the pool is sized for what sequences may need, not for what they do.
template <class T>
class ZeroedArray {
 public:
  ZeroedArray() = default;
  explicit ZeroedArray(size_t count)
      : data_(static_cast<T*>(std::calloc(std::max<size_t>(count, 1), sizeof(T)))), count_(count) {
    if (!data_) throw std::bad_alloc();
  }
  std::span<T> span() const { return {data_.get(), count_}; }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }  // NOLINT(cppcoreguidelines-owning-memory): from calloc
  };
  std::unique_ptr<T, Free> data_;
  size_t count_ = 0;
};

std::span<float> row_of(std::vector<float>& buffer, int row, int width) {
  return std::span(buffer).subspan(static_cast<size_t>(row) * width, width);
}

class ReferenceBackend final : public Backend {
 public:
  ReferenceBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options)
      : shape_(shape), weights_(weights), options_(options) {
    for (int i = 0; i < kSlots; ++i) {
      const auto slot = static_cast<Slot>(i);
      const int rows = slot == Slot::kLogits ? options.max_heads : options.max_rows;
      slots_[i].resize(static_cast<size_t>(rows) * slot_width(slot, shape));
    }
    for (int layer = 0, gdn = 0, attention = 0; layer < shape.layers(); ++layer)
      index_in_kind_.push_back(shape.layer_kinds[layer] == LayerKind::kAttention ? attention++ : gdn++);
  }

  std::string name() const override { return "reference"; }
  std::string description() const override { return "reference: plain fp32 loops on one thread (slow; for checking)"; }

  // --- sequence state ---
  void allocate_state(const StateMemoryPlan& plan) override {
    recurrent_ = ZeroedArray<float>(static_cast<size_t>(plan.recurrent_slots) * floats_per_slot());
    counts_ = ZeroedArray<TokenCount>(static_cast<size_t>(plan.recurrent_slots) * shape_.vocab);
    last_picked_.assign(plan.recurrent_slots, 0);
    kv_ = ZeroedArray<float>(static_cast<size_t>(plan.kv_pages) * floats_per_page());
  }
  size_t recurrent_slot_bytes() const override {
    return floats_per_slot() * sizeof(float) + shape_.vocab * sizeof(TokenCount) + sizeof(TokenId);
  }
  size_t kv_page_bytes() const override { return floats_per_page() * sizeof(float); }
  void clear_recurrent(int slot) override {
    std::ranges::fill(slot_state(slot), 0.0f);
    std::ranges::fill(counts(slot), TokenCount{0});
    last_picked_[slot] = 0;
  }
  void copy_recurrent(int from, int to) override {
    std::ranges::copy(slot_state(from), slot_state(to).begin());
    std::ranges::copy(counts(from), counts(to).begin());
    last_picked_[to] = last_picked_[from];
  }
  void copy_kv_page(int from, int to, int /*rows*/) override { std::ranges::copy(page(from), page(to).begin()); }
  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) override {
    std::ranges::fill(counts(slot), TokenCount{0});
    for (TokenId token : generated) count_token(slot, token);
    for (TokenId token : prompt) counts(slot)[token] |= kInPrompt;
  }
  std::string state_layout() const override { return "reference-1"; }
  void export_recurrent(int slot, std::span<std::byte> out) override {
    check(out.size() == recurrent_slot_bytes(), "export size");
    const size_t a = floats_per_slot() * sizeof(float), b = shape_.vocab * sizeof(TokenCount);
    std::memcpy(out.data(), slot_state(slot).data(), a);
    std::memcpy(out.data() + a, counts(slot).data(), b);
    std::memcpy(out.data() + a + b, &last_picked_[slot], sizeof(TokenId));
  }
  void import_recurrent(int slot, std::span<const std::byte> in) override {
    check(in.size() == recurrent_slot_bytes(), "import size");
    const size_t a = floats_per_slot() * sizeof(float), b = shape_.vocab * sizeof(TokenCount);
    std::memcpy(slot_state(slot).data(), in.data(), a);
    std::memcpy(counts(slot).data(), in.data() + a, b);
    std::memcpy(&last_picked_[slot], in.data() + a + b, sizeof(TokenId));
  }
  void export_kv_page(int id, std::span<std::byte> out) override {
    std::memcpy(out.data(), page(id).data(), kv_page_bytes());
  }
  void import_kv_page(int id, std::span<const std::byte> in) override {
    std::memcpy(page(id).data(), in.data(), kv_page_bytes());
  }
  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override {
    std::ranges::copy(gdn_state(layer, slot), state.begin());
    std::ranges::copy(conv_state(layer, slot), conv.begin());
  }
  void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) override {
    std::ranges::copy(state, gdn_state(layer, slot).begin());
    std::ranges::copy(conv, conv_state(layer, slot).begin());
  }
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override {
    for (int head = 0; head < shape_.kv_heads; ++head)
      for (int row = 0; row < rows; ++row) {
        const size_t at = (static_cast<size_t>(head) * rows + row) * kHeadDim;
        std::ranges::copy(kv_row(layer, pages, row, head, 0), k.begin() + at);
        std::ranges::copy(kv_row(layer, pages, row, head, 1), v.begin() + at);
      }
  }
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v) override {
    for (int head = 0; head < shape_.kv_heads; ++head)
      for (int row = 0; row < rows; ++row) {
        const size_t at = (static_cast<size_t>(head) * rows + row) * kHeadDim;
        std::ranges::copy(k.subspan(at, kHeadDim), kv_row(layer, pages, row, head, 0).begin());
        std::ranges::copy(v.subspan(at, kHeadDim), kv_row(layer, pages, row, head, 1).begin());
      }
  }

  // --- a step ---
  bool begin(const Batch& batch) override {
    rows_ = static_cast<int>(batch.tokens.size());
    check(rows_ > 0 && rows_ <= options_.max_rows, "batch rows within max_rows");
    check(batch.heads.size() <= static_cast<size_t>(options_.max_heads), "heads within max_heads");
    batch_ = batch;
    picked_.assign(batch.heads.size(), -1);
    return true;
  }

  void embed() override {
    for_each_row([&](const SequenceRows& sequence, int row, int /*position*/) {
      TokenId token = batch_.tokens[row];
      if (token == kLastPicked) token = last_picked_[sequence.recurrent_slot];
      weight_row(weights_.embedding, token, row_of(slot(Slot::kResidual), row, shape_.hidden));
    });
  }

  void project_gdn(int layer) override {
    const GdnWeights& w = *weights_.layers[layer].gdn;
    const std::vector<float> x = normed(weights_.layers[layer].input_norm);
    matmul(w.in_qkv, x, slot(Slot::kGdnQkv), rows_);
    matmul(w.in_z, x, slot(Slot::kGdnZ), rows_);
    matmul(w.in_a, x, slot(Slot::kGdnA), rows_);
    matmul(w.in_b, x, slot(Slot::kGdnB), rows_);
  }

  void mix_gdn(int layer) override {
    const GdnWeights& w = *weights_.layers[layer].gdn;
    const int channels = shape_.gdn_conv_width(), key_width = shape_.gdn_key_width();
    const int heads_per_key = shape_.gdn_value_heads / shape_.gdn_key_heads;
    for_each_row([&](const SequenceRows& sequence, int row, int /*position*/) {
      const std::span<float> input = row_of(slot(Slot::kGdnQkv), row, channels);
      const std::span<float> tail = conv_state(layer, sequence.recurrent_slot);  // [3][channels], oldest first
      std::vector<float> c(channels);
      for (int i = 0; i < channels; ++i) {
        const float* taps = &w.conv[static_cast<size_t>(i) * kConvWidth];
        c[i] = silu(taps[0] * tail[i] + taps[1] * tail[channels + i] + taps[2] * tail[2 * channels + i] +
                    taps[3] * input[i]);
      }
      std::copy(tail.begin() + channels, tail.end(), tail.begin());
      std::ranges::copy(input, tail.begin() + 2 * channels);

      for (int head = 0; head < shape_.gdn_key_heads; ++head) {
        l2norm(std::span(c).subspan(head * kGdnHeadDim, kGdnHeadDim), 1 / std::sqrt(float{kGdnHeadDim}));
        l2norm(std::span(c).subspan(key_width + head * kGdnHeadDim, kGdnHeadDim), 1);
      }
      for (int head = 0; head < shape_.gdn_value_heads; ++head) {
        const int key_head = head / heads_per_key;
        const float a = slot(Slot::kGdnA)[static_cast<size_t>(row) * shape_.gdn_value_heads + head];
        const float b = slot(Slot::kGdnB)[static_cast<size_t>(row) * shape_.gdn_value_heads + head];
        const float decay = std::exp(-std::exp(w.a_log[head]) * softplus(a + w.dt_bias[head]));
        std::array<float, kGdnHeadDim> o{};
        gated_delta_step(gdn_state(layer, sequence.recurrent_slot)
                             .subspan(static_cast<size_t>(head) * kGdnHeadDim * kGdnHeadDim, kGdnHeadDim * kGdnHeadDim),
                         std::span(c).subspan(key_head * kGdnHeadDim, kGdnHeadDim),
                         std::span(c).subspan(key_width + key_head * kGdnHeadDim, kGdnHeadDim),
                         std::span(c).subspan(2 * key_width + head * kGdnHeadDim, kGdnHeadDim), decay, sigmoid(b), o);
        const std::span<float> out =
            row_of(slot(Slot::kMixed), row, shape_.mixer_width()).subspan(head * kGdnHeadDim, kGdnHeadDim);
        rmsnorm(o, w.norm, shape_.rms_eps, out);
        const std::span<float> z =
            row_of(slot(Slot::kGdnZ), row, shape_.gdn_value_width()).subspan(head * kGdnHeadDim, kGdnHeadDim);
        for (int i = 0; i < kGdnHeadDim; ++i) out[i] *= silu(z[i]);
      }
    });
  }

  void project_attention(int layer) override {
    const AttentionWeights& w = *weights_.layers[layer].attention;
    const std::vector<float> x = normed(weights_.layers[layer].input_norm);
    matmul(w.q, x, slot(Slot::kAttnQGate), rows_);
    matmul(w.k, x, slot(Slot::kAttnK), rows_);
    matmul(w.v, x, slot(Slot::kAttnV), rows_);
  }

  void prepare_attention(int layer) override {
    const AttentionWeights& w = *weights_.layers[layer].attention;
    for_each_row([&](const SequenceRows& sequence, int row, int position) {
      const std::span<float> q_gate = row_of(slot(Slot::kAttnQGate), row, 2 * shape_.q_width());
      const std::span<float> q = row_of(slot(Slot::kAttnQ), row, shape_.q_width());
      for (int head = 0; head < shape_.q_heads; ++head) {
        const std::span<float> out = q.subspan(head * kHeadDim, kHeadDim);
        rmsnorm(q_gate.subspan(head * 2 * kHeadDim, kHeadDim), w.q_norm, shape_.rms_eps, out);
        rope(out, position, shape_.rotary_dim, shape_.rope_theta);
      }
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const std::span<float> k = kv_row(layer, sequence.kv_pages, position, head, 0);
        rmsnorm(row_of(slot(Slot::kAttnK), row, shape_.kv_width()).subspan(head * kHeadDim, kHeadDim), w.k_norm,
                shape_.rms_eps, k);
        rope(k, position, shape_.rotary_dim, shape_.rope_theta);
        std::ranges::copy(row_of(slot(Slot::kAttnV), row, shape_.kv_width()).subspan(head * kHeadDim, kHeadDim),
                          kv_row(layer, sequence.kv_pages, position, head, 1).begin());
      }
    });
  }

  void attend(int layer) override {
    const float scale = 1 / std::sqrt(float{kHeadDim});
    for_each_row([&](const SequenceRows& sequence, int row, int position) {
      for (int head = 0; head < shape_.q_heads; ++head) {
        const int kv_head = head / kGqaFactor;
        const std::span<float> q = row_of(slot(Slot::kAttnQ), row, shape_.q_width()).subspan(head * kHeadDim, kHeadDim);
        std::vector<float> scores(position + 1);
        for (int t = 0; t <= position; ++t) {
          const std::span<float> k = kv_row(layer, sequence.kv_pages, t, kv_head, 0);
          double sum = 0;
          for (int i = 0; i < kHeadDim; ++i) sum += static_cast<double>(q[i]) * k[i];
          scores[t] = static_cast<float>(sum) * scale;
        }
        softmax(scores);
        std::array<double, kHeadDim> sum{};
        for (int t = 0; t <= position; ++t) {
          const std::span<float> v = kv_row(layer, sequence.kv_pages, t, kv_head, 1);
          for (int i = 0; i < kHeadDim; ++i) sum[i] += static_cast<double>(scores[t]) * v[i];
        }
        const std::span<float> gate =
            row_of(slot(Slot::kAttnQGate), row, 2 * shape_.q_width()).subspan(head * 2 * kHeadDim + kHeadDim, kHeadDim);
        const std::span<float> out =
            row_of(slot(Slot::kMixed), row, shape_.mixer_width()).subspan(head * kHeadDim, kHeadDim);
        for (int i = 0; i < kHeadDim; ++i) out[i] = static_cast<float>(sum[i]) * sigmoid(gate[i]);
      }
    });
  }

  void project_residual(int layer) override {
    const LayerWeights& w = weights_.layers[layer];
    const WeightMatrix& out = w.gdn ? w.gdn->out : w.attention->out;
    std::vector<float> x(static_cast<size_t>(rows_) * out.k), y(static_cast<size_t>(rows_) * out.n);
    for (int row = 0; row < rows_; ++row)
      std::ranges::copy(row_of(slot(Slot::kMixed), row, shape_.mixer_width()).first(out.k),
                        row_of(x, row, out.k).begin());
    matmul(out, x, y, rows_);
    for (size_t i = 0; i < y.size(); ++i) slot(Slot::kResidual)[i] += y[i];
  }

  void route(int layer) override {
    const LayerWeights& w = weights_.layers[layer];
    const std::vector<float> x = normed(w.post_norm);
    std::ranges::copy(x, slot(Slot::kMoeInput).begin());
    std::vector<float> logits(static_cast<size_t>(rows_) * shape_.experts), shared(rows_);
    matmul(w.moe.router, x, logits, rows_);
    matmul(w.moe.shared_expert_gate, x, shared, rows_);
    for (int row = 0; row < rows_; ++row) {
      const std::span<float> p = row_of(logits, row, shape_.experts);
      softmax(p);
      const std::vector<int> chosen = top_k(p, kExpertsPerToken);
      double sum = 0;
      for (int id : chosen) sum += p[id];
      for (int i = 0; i < kExpertsPerToken; ++i) {
        slot(Slot::kExpertIds)[static_cast<size_t>(row) * kExpertsPerToken + i] = static_cast<float>(chosen[i]);
        slot(Slot::kExpertWeights)[static_cast<size_t>(row) * kExpertsPerToken + i] =
            static_cast<float>(p[chosen[i]] / sum);
      }
      slot(Slot::kSharedGate)[row] = sigmoid(shared[row]);
    }
  }

  void group_rows(int /*layer*/) override {}

  void experts_up(int layer) override {
    const MoeWeights& w = weights_.layers[layer].moe;
    for (int row = 0; row < rows_; ++row) {
      const std::span<float> x = row_of(slot(Slot::kMoeInput), row, shape_.hidden);
      std::span<float> out = row_of(slot(Slot::kExpertHidden), row, slot_width(Slot::kExpertHidden, shape_));
      const auto up = [&](const WeightMatrix& gate_proj, const WeightMatrix& up_proj) {
        std::vector<float> gate(gate_proj.n), value(up_proj.n);
        matmul(gate_proj, x, gate, 1);
        matmul(up_proj, x, value, 1);
        for (int i = 0; i < gate_proj.n; ++i) out[i] = silu(gate[i]) * value[i];
        out = out.subspan(gate_proj.n);
      };
      for (int i = 0; i < kExpertsPerToken; ++i) {
        const int id = expert_id(row, i);
        up(w.expert_gate_proj.expert(id), w.expert_up_proj.expert(id));
      }
      up(w.shared_gate_proj, w.shared_up_proj);
    }
  }

  void experts_down(int layer) override {
    const MoeWeights& w = weights_.layers[layer].moe;
    for (int row = 0; row < rows_; ++row) {
      std::span<float> hidden = row_of(slot(Slot::kExpertHidden), row, slot_width(Slot::kExpertHidden, shape_));
      std::vector<double> sum(shape_.hidden);
      std::vector<float> y(shape_.hidden);
      const auto down = [&](const WeightMatrix& down_proj, float weight) {
        matmul(down_proj, hidden.first(down_proj.k), y, 1);
        for (int i = 0; i < shape_.hidden; ++i) sum[i] += static_cast<double>(weight) * y[i];
        hidden = hidden.subspan(down_proj.k);
      };
      for (int i = 0; i < kExpertsPerToken; ++i)
        down(w.expert_down_proj.expert(expert_id(row, i)),
             slot(Slot::kExpertWeights)[static_cast<size_t>(row) * kExpertsPerToken + i]);
      down(w.shared_down_proj, slot(Slot::kSharedGate)[row]);
      const std::span<float> residual = row_of(slot(Slot::kResidual), row, shape_.hidden);
      for (int i = 0; i < shape_.hidden; ++i) residual[i] += static_cast<float>(sum[i]);
    }
  }

  void head() override {
    std::vector<float> x(shape_.hidden);
    for (size_t i = 0; i < batch_.heads.size(); ++i) {
      rmsnorm(row_of(slot(Slot::kResidual), batch_.heads[i].row, shape_.hidden), weights_.final_norm, shape_.rms_eps,
              x);
      matmul(weights_.lm_head, x, row_of(slot(Slot::kLogits), static_cast<int>(i), shape_.vocab), 1);
    }
  }

  void pick() override {
    for (size_t i = 0; i < batch_.heads.size(); ++i) {
      const HeadRow& head = batch_.heads[i];
      if (!head.pick) continue;
      const SequenceRows& sequence = batch_.sequences[head.sequence];
      int first_row = 0;
      for (int s = 0; s < head.sequence; ++s) first_row += batch_.sequences[s].rows;
      const int position = sequence.position + (head.row - first_row) + 1;  // of the token picked now
      const std::span<float> logits = row_of(slot(Slot::kLogits), static_cast<int>(i), shape_.vocab);
      std::vector<float> scratch(logits.begin(), logits.end());
      const TokenId token = pick_token(scratch, head.sampling, counts(sequence.recurrent_slot), head.allowed,
                                       static_cast<uint64_t>(position));
      picked_[i] = token;
      if (token < 0) continue;
      count_token(sequence.recurrent_slot, token);
      last_picked_[sequence.recurrent_slot] = token;
    }
  }

  StepId submit() override {
    Step& step = steps_[++last_step_ % kStepsInFlight];
    const size_t n = batch_.want_logits ? batch_.heads.size() * shape_.vocab : 0;
    step.logits.assign(slot(Slot::kLogits).begin(), slot(Slot::kLogits).begin() + static_cast<std::ptrdiff_t>(n));
    step.picked = picked_;
    return last_step_;
  }
  void wait(StepId /*step*/) override {}
  std::span<const float> logits(StepId step, int head_index) override {
    return row_of(steps_[step % kStepsInFlight].logits, head_index, shape_.vocab);
  }
  std::span<const TokenId> picked(StepId step) override { return steps_[step % kStepsInFlight].picked; }

  void read_slot(Slot which, std::span<float> out) override {
    std::copy_n(slot(which).begin(), out.size(), out.begin());
  }
  void write_slot(Slot which, std::span<const float> in) override {
    std::copy_n(in.begin(), in.size(), slot(which).begin());
  }

 private:
  struct Step {
    std::vector<float> logits;
    std::vector<TokenId> picked;
  };

  size_t conv_floats() const { return static_cast<size_t>(kConvWidth - 1) * shape_.gdn_conv_width(); }
  size_t gdn_floats() const { return static_cast<size_t>(shape_.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim; }
  size_t floats_per_slot() const { return shape_.gdn_layers() * (gdn_floats() + conv_floats()); }
  // A page: [attention layer][key, value][kv_head][kKvPageRows][256].
  size_t floats_per_page() const {
    return static_cast<size_t>(shape_.attention_layers()) * 2 * shape_.kv_heads * kKvPageRows * kHeadDim;
  }
  std::span<float> slot_state(int slot) {
    return recurrent_.span().subspan(slot * floats_per_slot(), floats_per_slot());
  }
  std::span<float> gdn_state(int layer, int slot) {
    return slot_state(slot).subspan(index_in_kind_[layer] * (gdn_floats() + conv_floats()), gdn_floats());
  }
  std::span<float> conv_state(int layer, int slot) {
    return slot_state(slot).subspan(index_in_kind_[layer] * (gdn_floats() + conv_floats()) + gdn_floats(),
                                    conv_floats());
  }
  std::span<TokenCount> counts(int slot) {
    return counts_.span().subspan(static_cast<size_t>(slot) * shape_.vocab, shape_.vocab);
  }
  void count_token(int slot, TokenId token) {
    TokenCount& count = counts(slot)[token];
    if ((count & ~kInPrompt) != (kInPrompt - 1)) ++count;
  }
  std::span<float> page(int id) { return kv_.span().subspan(id * floats_per_page(), floats_per_page()); }
  std::span<float> kv_row(int layer, std::span<const int32_t> pages, int position, int head, int key_or_value) {
    const size_t row =
        ((static_cast<size_t>(index_in_kind_[layer]) * 2 + key_or_value) * shape_.kv_heads + head) * kKvPageRows +
        position % kKvPageRows;
    return page(pages[position / kKvPageRows]).subspan(row * kHeadDim, kHeadDim);
  }
  std::vector<float>& slot(Slot which) { return slots_[static_cast<int>(which)]; }
  int expert_id(int row, int i) {
    return static_cast<int>(slot(Slot::kExpertIds)[static_cast<size_t>(row) * kExpertsPerToken + i]);
  }
  std::vector<float> normed(const FloatVector& weight) {
    std::vector<float> out(static_cast<size_t>(rows_) * shape_.hidden);
    for (int row = 0; row < rows_; ++row)
      rmsnorm(row_of(slot(Slot::kResidual), row, shape_.hidden), weight, shape_.rms_eps,
              row_of(out, row, shape_.hidden));
    return out;
  }
  // body(sequence, row, position of the row in its sequence)
  template <class Body>
  void for_each_row(Body body) {
    int row = 0;
    for (const SequenceRows& sequence : batch_.sequences)
      for (int i = 0; i < sequence.rows; ++i, ++row) body(sequence, row, sequence.position + i);
  }

  const ModelShape shape_;
  const ModelWeights& weights_;
  const BackendOptions options_;
  std::vector<int> index_in_kind_;  // of a layer among the layers of its kind
  std::array<std::vector<float>, kSlots> slots_;
  ZeroedArray<float> recurrent_;
  ZeroedArray<TokenCount> counts_;
  std::vector<TokenId> last_picked_;
  ZeroedArray<float> kv_;
  Batch batch_;
  int rows_ = 0;
  std::vector<TokenId> picked_;
  std::array<Step, kStepsInFlight> steps_;
  StepId last_step_ = 0;
};

}  // namespace

BackendInfo reference_backend_info() {
  return {"reference", "plain fp32 loops, one thread; slow, for checking the others", true, ""};
}

std::unique_ptr<Backend> create_reference_backend(const ModelShape& shape, const ModelWeights& weights,
                                                  const BackendOptions& options) {
  if (!options.ablate.empty()) throw UsageError("--ablate: the reference backend has nothing to switch off");
  return std::make_unique<ReferenceBackend>(shape, weights, options);
}

}  // namespace calla
