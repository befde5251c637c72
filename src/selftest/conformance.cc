#include "selftest/conformance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/create.h"
#include "backend/reference/reference_math.h"
#include "base/check.h"

namespace calla {
namespace {

// ||a - b|| / ||b||, infinite if `a` has a NaN.
double relative_error(std::span<const float> a, std::span<const float> b) {
  check(a.size() == b.size(), "compared sizes");
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    norm += static_cast<double>(b[i]) * b[i];
  }
  if (!std::isfinite(difference)) return INFINITY;
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-20);
}

class Noise {
 public:
  explicit Noise(uint64_t seed) : seed_(seed) {}
  float uniform() { return draw_uniform(seed_, ++count_) * 2 - 1; }
  int below(int n) { return static_cast<int>(draw_uniform(seed_, ++count_) * static_cast<float>(n)); }
  // Roughly normal, rounded to bf16 so that a backend which stores activations as bf16 starts from the same
  // numbers.
  std::vector<float> normal(size_t n, float scale = 1) {
    std::vector<float> v(n);
    for (float& x : v) x = to_float(to_bf16(scale * 1.22f * (uniform() + uniform())));
    return v;
  }

 private:
  uint64_t seed_;
  uint64_t count_ = 0;
};

// The subject and the reference side by side, on one batch.
class Pair {
 public:
  Pair(const BackendFactory& factory, const RandomModel& model, const ConformanceOptions& options)
      : model_(model), shape_(model.shape()), options_(options), noise_(options.seed) {
    BackendOptions backend_options = options.backend;
    backend_options.replay_steps = false;
    int rows = 1, heads = 1;
    for (const BatchCase& batch : options.batches) {
      int total = 0, pages = 0;
      for (const BatchCase::Rows& sequence : batch.sequences) {
        total += sequence.rows;
        pages += pages_for(sequence.position + sequence.rows);
      }
      rows = std::max(rows, total);
      heads = std::max(heads, static_cast<int>(batch.sequences.size()) + 1);
      plan_.kv_pages = std::max(plan_.kv_pages, pages);
      plan_.recurrent_slots = std::max(plan_.recurrent_slots, static_cast<int>(batch.sequences.size()) + 1);
    }
    backend_options.max_rows = rows;
    backend_options.max_heads = heads;
    subject_ = factory(shape_, model.weights(), backend_options);
    BackendOptions plain;
    plain.max_rows = rows;
    plain.max_heads = heads;
    const BackendFactory& make_reference = options.reference ? options.reference : create_reference_backend;
    reference_ = make_reference(shape_, model.weights(), plain);
    subject_->allocate_state(plan_);
    reference_->allocate_state(plan_);
  }

  std::vector<StageResult> run() {
    for (const BatchCase& batch : options_.batches) {
      batch_name_ = batch.name;
      make_batch(batch);
      for (int layer = 0; layer < shape_.layers(); ++layer) {
        const auto& kinds = shape_.layer_kinds;
        const bool first_of_kind = std::find(kinds.begin(), kinds.end(), kinds[layer]) == kinds.begin() + layer;
        if (first_of_kind) run_layer(layer);
      }
      run_ends();
    }
    return results_;
  }

 private:
  static int pages_for(int rows) { return (rows + kKvPageRows - 1) / kKvPageRows; }

  void make_batch(const BatchCase& batch) {
    sequences_.clear();
    tokens_.clear();
    heads_.clear();
    pages_.assign(batch.sequences.size(), {});
    // Pages are handed out in a scattered order: a backend must go through the table.
    std::vector<int32_t> free(plan_.kv_pages);
    std::iota(free.begin(), free.end(), 0);
    for (size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[noise_.below(static_cast<int>(i))]);
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      const BatchCase::Rows& rows = batch.sequences[s];
      for (int i = 0; i < pages_for(rows.position + rows.rows); ++i) {
        pages_[s].push_back(free.back());
        free.pop_back();
      }
      sequences_.push_back({static_cast<int>(batch.sequences.size() - s), pages_[s], rows.position, rows.rows});
      for (int i = 0; i < rows.rows; ++i) tokens_.push_back(noise_.below(shape_.vocab));
      HeadRow head;
      head.row = static_cast<int>(tokens_.size()) - 1;
      head.sequence = static_cast<int>(s);
      head.pick = true;
      heads_.push_back(head);
    }
    batch_.tokens = tokens_;
    batch_.sequences = sequences_;
    batch_.heads = heads_;
    batch_.want_logits = true;
    rows_ = static_cast<int>(tokens_.size());
  }

  // Random contents for the slots named, the same in both backends.
  void fill(std::initializer_list<Slot> slots) {
    for (Slot slot : slots) {
      std::vector<float> values = noise_.normal(static_cast<size_t>(rows_) * slot_width(slot, shape_));
      if (slot == Slot::kExpertIds) {
        for (int row = 0; row < rows_; ++row) {
          std::vector<int> ids(shape_.experts);
          std::iota(ids.begin(), ids.end(), 0);
          for (int i = 0; i < kExpertsPerToken; ++i) {
            std::swap(ids[i], ids[i + noise_.below(shape_.experts - i)]);
            values[static_cast<size_t>(row) * kExpertsPerToken + i] = static_cast<float>(ids[i]);
          }
        }
      } else if (slot == Slot::kExpertWeights || slot == Slot::kSharedGate) {
        for (float& v : values) v = 0.1f + 0.2f * std::abs(v);
      }
      subject_->write_slot(slot, values);
      reference_->write_slot(slot, values);
    }
  }

  void compare(const std::string& stage, const std::string& what, std::span<const float> out,
               std::span<const float> expected, double tolerance) {
    StageResult result{stage, what, batch_name_, relative_error(out, expected), tolerance, false};
    result.ok = result.error <= tolerance;
    results_.push_back(result);
  }

  std::vector<float> read(Backend& backend, Slot slot, int rows) {
    std::vector<float> values(static_cast<size_t>(rows) * slot_width(slot, shape_));
    backend.read_slot(slot, values);
    return values;
  }

  void compare_slots(const std::string& stage, std::initializer_list<Slot> slots) {
    for (Slot slot : slots)
      compare(stage, slot_name(slot), read(*subject_, slot, rows_), read(*reference_, slot, rows_), options_.tolerance);
  }

  // kMixed has room for the widest mixer; a layer uses its first `width` columns.
  void compare_mixed(const std::string& stage, int width) {
    const auto columns = [&](Backend& backend) {
      const std::vector<float> all = read(backend, Slot::kMixed, rows_);
      std::vector<float> used;
      for (int row = 0; row < rows_; ++row) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row) * shape_.mixer_width();
        used.insert(used.end(), begin, begin + width);
      }
      return used;
    };
    compare(stage, slot_name(Slot::kMixed), columns(*subject_), columns(*reference_), options_.tolerance);
  }

  bool wanted(const std::string& stage) const {
    return options_.stages.empty() ||
           std::find(options_.stages.begin(), options_.stages.end(), stage) != options_.stages.end();
  }

  // begin, body on both, comparison, submit.
  template <class Body, class Check>
  void stage(const std::string& name, std::initializer_list<Slot> inputs, Body body, Check check_outputs) {
    if (!wanted(name)) return;
    check(subject_->begin(batch_), "replay_steps is off");
    reference_->begin(batch_);
    fill(inputs);
    body(*subject_);
    body(*reference_);
    check_outputs();
    subject_->wait(subject_->submit());
    reference_->wait(reference_->submit());
  }

  void run_layer(int layer) {
    if (shape_.layer_kinds[layer] == LayerKind::kGatedDeltaNet) {
      stage(
          "project_gdn", {Slot::kResidual}, [&](Backend& b) { b.project_gdn(layer); },
          [&] {
            compare_slots("project_gdn", {Slot::kGdnQkv, Slot::kGdnZ, Slot::kGdnA, Slot::kGdnB});
          });
      write_gdn_states(layer);
      stage(
          "mix_gdn", {Slot::kGdnQkv, Slot::kGdnZ, Slot::kGdnA, Slot::kGdnB}, [&](Backend& b) { b.mix_gdn(layer); },
          [&] {
            compare_mixed("mix_gdn", shape_.gdn_value_width());
            compare_gdn_states("mix_gdn", layer);
          });
      // In a row, as a step runs them: a backend may have merged the stages.
      write_gdn_states(layer);
      stage(
          "gdn layer", {Slot::kResidual},
          [&](Backend& b) {
            b.project_gdn(layer);
            b.mix_gdn(layer);
          },
          [&] {
            compare_mixed("gdn layer", shape_.gdn_value_width());
            compare_gdn_states("gdn layer", layer);
            compare_slots("gdn layer", {Slot::kGdnQkv, Slot::kGdnZ, Slot::kGdnA, Slot::kGdnB});
          });
    } else {
      stage(
          "project_attention", {Slot::kResidual}, [&](Backend& b) { b.project_attention(layer); },
          [&] {
            compare_slots("project_attention", {Slot::kAttnQGate, Slot::kAttnK, Slot::kAttnV});
          });
      write_kv(layer);
      stage(
          "prepare_attention", {Slot::kAttnQGate, Slot::kAttnK, Slot::kAttnV},
          [&](Backend& b) { b.prepare_attention(layer); },
          [&] {
            compare_slots("prepare_attention", {Slot::kAttnQ});
            compare_kv("prepare_attention", layer);
          });
      write_kv(layer);
      stage(
          "attend", {Slot::kAttnQ, Slot::kAttnQGate}, [&](Backend& b) { b.attend(layer); },
          [&] { compare_mixed("attend", shape_.q_width()); });
      write_kv(layer);
      stage(
          "attention layer", {Slot::kResidual},
          [&](Backend& b) {
            b.project_attention(layer);
            b.prepare_attention(layer);
            b.attend(layer);
          },
          [&] {
            compare_mixed("attention layer", shape_.q_width());
            compare_kv("attention layer", layer);
            compare_slots("attention layer", {Slot::kAttnQ});
          });
    }
    stage(
        "project_residual", {Slot::kResidual, Slot::kMixed}, [&](Backend& b) { b.project_residual(layer); },
        [&] { compare_slots("project_residual", {Slot::kResidual}); });
    stage(
        "route", {Slot::kResidual}, [&](Backend& b) { b.route(layer); },
        [&] {
          compare_slots("route", {Slot::kMoeInput, Slot::kSharedGate});
          compare_routing(layer);
        });
    stage(
        "experts_up", {Slot::kMoeInput, Slot::kExpertIds, Slot::kExpertWeights, Slot::kSharedGate},
        [&](Backend& b) {
          b.group_rows(layer);
          b.experts_up(layer);
        },
        [&] { compare_slots("experts_up", {Slot::kExpertHidden}); });
    stage(
        "experts_down",
        {Slot::kResidual, Slot::kMoeInput, Slot::kExpertIds, Slot::kExpertWeights, Slot::kSharedGate,
         Slot::kExpertHidden},
        [&](Backend& b) {
          b.group_rows(layer);
          b.experts_down(layer);
        },
        [&] { compare_slots("experts_down", {Slot::kResidual}); });
    // All of them at once, which a backend may run as one.
    stage(
        "experts", {Slot::kResidual},
        [&](Backend& b) {
          b.route(layer);
          b.group_rows(layer);
          b.experts_up(layer);
          b.experts_down(layer);
        },
        [&] {
          compare_slots("experts", {Slot::kMoeInput, Slot::kSharedGate});
          compare_after_experts(layer);
        });
  }

  // embed, head and pick.
  void run_ends() {
    stage(
        "embed", {}, [](Backend& b) { b.embed(); }, [&] { compare_slots("embed", {Slot::kResidual}); });
    stage(
        "head", {Slot::kResidual}, [](Backend& b) { b.head(); },
        [&] {
          const int n = static_cast<int>(heads_.size());
          compare("head", "logits", read(*subject_, Slot::kLogits, n), read(*reference_, Slot::kLogits, n),
                  options_.tolerance);
        });
    run_pick();
  }

  void run_pick() {
    if (!wanted("pick")) return;
    const size_t words = (static_cast<size_t>(shape_.vocab) + 31) / 32;
    int total = 0, wrong = 0;
    for (int round = 0; round < 6; ++round) {
      std::vector<std::vector<uint32_t>> masks(heads_.size());
      for (size_t i = 0; i < heads_.size(); ++i) {
        SamplingParams& sampling = heads_[i].sampling;
        sampling = SamplingParams{};
        sampling.seed = options_.seed * 100 + static_cast<uint64_t>(round);
        if (round >= 1) sampling.temperature = 0.7f;
        if (round == 2) sampling.top_k = 20, sampling.top_p = 0.95f;
        if (round == 3) sampling.min_p = 0.05f, sampling.presence_penalty = 1.5f, sampling.frequency_penalty = 0.3f;
        if (round == 4) sampling.top_p = 0.5f, sampling.repetition_penalty = 1.3f;
        if (round == 5) {
          for (size_t w = 0; w < words; ++w) masks[i].push_back(w % 7 == 3 ? 0x10010u : 0);
          heads_[i].allowed = masks[i];
        }
        const int slot = sequences_[heads_[i].sequence].recurrent_slot;
        std::vector<TokenId> prompt, generated;
        for (int t = 0; t < 40; ++t) (t % 2 ? prompt : generated).push_back(noise_.below(shape_.vocab / 8));
        subject_->set_token_counts(slot, prompt, generated);
        reference_->set_token_counts(slot, prompt, generated);
      }
      const std::vector<float> logits = noise_.normal(heads_.size() * shape_.vocab, 3);
      check(subject_->begin(batch_), "replay_steps is off");
      reference_->begin(batch_);
      subject_->write_slot(Slot::kLogits, logits);
      reference_->write_slot(Slot::kLogits, logits);
      subject_->pick();
      reference_->pick();
      const StepId a = subject_->submit(), b = reference_->submit();
      subject_->wait(a);
      reference_->wait(b);
      for (size_t i = 0; i < heads_.size(); ++i, ++total) wrong += subject_->picked(a)[i] != reference_->picked(b)[i];
      for (HeadRow& head : heads_) head.allowed = {}, head.sampling = {};
    }
    StageResult result{"pick", "tokens", batch_name_, static_cast<double>(wrong) / total, 0, wrong == 0};
    results_.push_back(result);
  }

  void write_gdn_states(int layer) {
    for (const SequenceRows& sequence : sequences_) {
      const auto state = noise_.normal(static_cast<size_t>(shape_.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim, 0.3f);
      const auto conv = noise_.normal(static_cast<size_t>(kConvWidth - 1) * shape_.gdn_conv_width());
      subject_->write_gdn_state(layer, sequence.recurrent_slot, state, conv);
      reference_->write_gdn_state(layer, sequence.recurrent_slot, state, conv);
    }
  }

  void compare_gdn_states(const std::string& name, int layer) {
    std::vector<float> states[2], convs[2];
    for (int which = 0; which < 2; ++which)
      for (const SequenceRows& sequence : sequences_) {
        std::vector<float> state(static_cast<size_t>(shape_.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim);
        std::vector<float> conv(static_cast<size_t>(kConvWidth - 1) * shape_.gdn_conv_width());
        (which ? *reference_ : *subject_).read_gdn_state(layer, sequence.recurrent_slot, state, conv);
        states[which].insert(states[which].end(), state.begin(), state.end());
        convs[which].insert(convs[which].end(), conv.begin(), conv.end());
      }
    compare(name, "recurrent state", states[0], states[1], options_.tolerance);
    compare(name, "conv state", convs[0], convs[1], options_.tolerance);
  }

  void write_kv(int layer) {
    for (const SequenceRows& sequence : sequences_) {
      const int rows = sequence.position + sequence.rows;
      const size_t n = static_cast<size_t>(shape_.kv_heads) * rows * kHeadDim;
      const auto k = noise_.normal(n), v = noise_.normal(n);
      subject_->write_kv(layer, sequence.kv_pages, rows, k, v);
      reference_->write_kv(layer, sequence.kv_pages, rows, k, v);
    }
  }

  void compare_kv(const std::string& name, int layer) {
    std::vector<float> ks[2], vs[2];
    for (int which = 0; which < 2; ++which)
      for (const SequenceRows& sequence : sequences_) {
        const int rows = sequence.position + sequence.rows;
        std::vector<float> k(static_cast<size_t>(shape_.kv_heads) * rows * kHeadDim), v(k.size());
        (which ? *reference_ : *subject_).read_kv(layer, sequence.kv_pages, rows, k, v);
        ks[which].insert(ks[which].end(), k.begin(), k.end());
        vs[which].insert(vs[which].end(), v.begin(), v.end());
      }
    compare(name, "k cache", ks[0], ks[1], options_.tolerance);
    compare(name, "v cache", vs[0], vs[1], options_.tolerance);
  }

  // Rows whose eighth and ninth expert are not closer than the tolerance: elsewhere the choice is rounding.
  std::vector<int> rows_with_clear_choice(int layer) {
    const MoeWeights& moe = model_.weights().layers[layer].moe;
    const auto x = read(*reference_, Slot::kMoeInput, rows_);
    std::vector<float> p(static_cast<size_t>(rows_) * shape_.experts);
    reference::matmul(moe.router, x, p, rows_);
    std::vector<int> rows;
    for (int row = 0; row < rows_; ++row) {
      const auto probabilities = std::span(p).subspan(static_cast<size_t>(row) * shape_.experts, shape_.experts);
      reference::softmax(probabilities);
      const std::vector<int> best = reference::top_k(probabilities, kExpertsPerToken + 1);
      if (1 - probabilities[best[8]] / probabilities[best[7]] >= 4 * options_.tolerance) rows.push_back(row);
    }
    return rows;
  }

  // The residual stream after all of the mixture of experts.
  void compare_after_experts(int layer) {
    const auto all = read(*subject_, Slot::kResidual, rows_), all_expected = read(*reference_, Slot::kResidual, rows_);
    std::vector<float> out, expected;
    for (int row : rows_with_clear_choice(layer)) {
      const auto at = static_cast<std::ptrdiff_t>(row) * shape_.hidden;
      out.insert(out.end(), all.begin() + at, all.begin() + at + shape_.hidden);
      expected.insert(expected.end(), all_expected.begin() + at, all_expected.begin() + at + shape_.hidden);
    }
    compare("experts", slot_name(Slot::kResidual), out, expected, options_.tolerance);
  }

  // The chosen experts as a dense row of weights, for rows with a clear choice.
  void compare_routing(int layer) {
    const auto ids = read(*subject_, Slot::kExpertIds, rows_), weights = read(*subject_, Slot::kExpertWeights, rows_);
    const auto expected_ids = read(*reference_, Slot::kExpertIds, rows_);
    const auto expected_weights = read(*reference_, Slot::kExpertWeights, rows_);
    std::vector<float> dense[2];
    for (int row : rows_with_clear_choice(layer)) {
      for (int which = 0; which < 2; ++which) {
        std::vector<float> w(shape_.experts);
        for (int i = 0; i < kExpertsPerToken; ++i) {
          const size_t at = static_cast<size_t>(row) * kExpertsPerToken + i;
          const float id = which ? expected_ids[at] : ids[at];
          if (id >= 0 && id < static_cast<float>(shape_.experts))
            w[static_cast<size_t>(id)] += which ? expected_weights[at] : weights[at];
        }
        dense[which].insert(dense[which].end(), w.begin(), w.end());
      }
    }
    compare("route", "expert weights", dense[0], dense[1], options_.tolerance);
  }

  const RandomModel& model_;
  const ModelShape& shape_;
  const ConformanceOptions& options_;
  Noise noise_;
  StateMemoryPlan plan_;
  std::unique_ptr<Backend> subject_;
  std::unique_ptr<Backend> reference_;
  std::string batch_name_;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<SequenceRows> sequences_;
  std::vector<TokenId> tokens_;
  std::vector<HeadRow> heads_;
  Batch batch_;
  int rows_ = 0;
  std::vector<StageResult> results_;
};

}  // namespace

std::vector<BatchCase> default_batch_cases() {
  return {
      {"decode at 0", {{0, 1}}},
      {"decode at 5", {{5, 1}}},
      {"decode at 200", {{200, 1}}},
      {"decode of 3", {{0, 1}, {77, 1}, {192, 1}}},
      {"decode of 8", {{1, 1}, {2, 1}, {63, 1}, {64, 1}, {65, 1}, {127, 1}, {128, 1}, {129, 1}}},
      {"prefill 7", {{0, 7}}},
      {"prefill 64", {{0, 64}}},
      {"prefill 33 at 130", {{130, 33}}},
      {"prefill 97", {{0, 97}}},
      {"ragged 5 + 1 + 17", {{3, 5}, {64, 1}, {60, 17}}},
  };
}

std::vector<StageResult> run_conformance(const BackendFactory& factory, const RandomModel& model,
                                         const ConformanceOptions& options) {
  return Pair(factory, model, options).run();
}

}  // namespace calla
