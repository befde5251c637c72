// Steps of the CUDA backend as the engine drives them: recorded and replayed, chunked, snapshotted. Skipped where there
// is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "backend/create.h"
#include "backend/weights_outline.h"
#include "base/error.h"
#include "model/forward.h"
#include "selftest/random_model.h"
#include "tests/backend/backend_over.h"

namespace calla {
namespace {

class CudaStep : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_backend_info().available) GTEST_SKIP() << cuda_backend_info().reason;
  }
  std::unique_ptr<Backend> make(std::vector<std::string> ablate = {}) {
    BackendOptions options;
    options.max_rows = 128;
    options.max_heads = 8;
    options.ablate = std::move(ablate);
    auto backend = create_cuda_backend(model_.shape(), model_.weights(), options);
    backend->allocate_state({4, 16});
    for (int slot = 0; slot < 4; ++slot) backend->clear_recurrent(slot);
    return backend;
  }

  // One step of one sequence; returns the pick of the last row.
  TokenId run(Backend& backend, int slot, const std::vector<int32_t>& pages, int position,
              const std::vector<TokenId>& tokens, const SamplingParams& sampling = {}) {
    const SequenceRows sequence{slot, pages, position, static_cast<int>(tokens.size())};
    HeadRow head;
    head.row = static_cast<int>(tokens.size()) - 1;
    head.pick = true;
    head.sampling = sampling;
    Batch batch;
    batch.tokens = tokens;
    batch.sequences = std::span(&sequence, 1);
    batch.heads = std::span(&head, 1);
    const StepId step = forward(backend, model_.shape(), batch);
    backend.wait(step);
    return backend.picked(step)[0];
  }

  // A prompt in chunks, then tokens picked one by one on the device.
  std::vector<TokenId> generate(Backend& backend, int slot, const std::vector<int32_t>& pages, int chunk, int count,
                                const SamplingParams& sampling = {}) {
    TokenId last = 0;
    int position = 0;
    for (; position < static_cast<int>(prompt_.size()); position += chunk) {
      const int end = std::min(position + chunk, static_cast<int>(prompt_.size()));
      last = run(backend, slot, pages, position, {prompt_.begin() + position, prompt_.begin() + end}, sampling);
    }
    std::vector<TokenId> out = {last};
    for (position = static_cast<int>(prompt_.size()); static_cast<int>(out.size()) < count; ++position)
      out.push_back(run(backend, slot, pages, position, {kLastPicked}, sampling));
    return out;
  }

  const RandomModel model_{tiny_shape(4), 21};
  const std::vector<TokenId> prompt_ = [] {
    std::vector<TokenId> tokens(100);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>((i * 797 + 31) % 4096);
    return tokens;
  }();
};

TEST_F(CudaStep, ReplayedStepsPickTheSameTokens) {
  const auto recorded = make(), plain = make({"graphs"});
  EXPECT_EQ(generate(*recorded, 0, {3, 1, 7}, 100, 40), generate(*plain, 0, {0, 1, 2}, 100, 40));
}

TEST_F(CudaStep, ChunksDoNotChangeThePick) {
  const auto backend = make();
  const auto whole = generate(*backend, 0, {3, 1, 7}, 100, 20);
  EXPECT_EQ(generate(*backend, 1, {4, 5, 6}, 33, 20), whole);
  EXPECT_EQ(generate(*backend, 2, {8, 9, 10}, 7, 20), whole);
}

TEST_F(CudaStep, SamplingDependsOnTheSeedAlone) {
  const auto backend = make();
  SamplingParams sampling;
  sampling.temperature = 0.8f;
  sampling.top_k = 50;
  sampling.top_p = 0.9f;
  sampling.seed = 5;
  const auto first = generate(*backend, 0, {3, 1, 7}, 100, 20, sampling);
  EXPECT_EQ(generate(*backend, 1, {4, 5, 6}, 100, 20, sampling), first);
  sampling.seed = 6;
  EXPECT_NE(generate(*backend, 2, {8, 9, 10}, 100, 20, sampling), first);
}

TEST_F(CudaStep, ACopiedStateContinuesLikeTheOriginal) {
  const auto backend = make();
  generate(*backend, 0, {0, 1}, 100, 1);
  backend->copy_recurrent(0, 1);
  backend->copy_kv_page(1, 2, 36);
  std::vector<TokenId> original, copy;
  for (int i = 0; i < 12; ++i) original.push_back(run(*backend, 0, {0, 1}, 100 + i, {kLastPicked}));
  for (int i = 0; i < 12; ++i) copy.push_back(run(*backend, 1, {0, 2}, 100 + i, {kLastPicked}));
  EXPECT_EQ(copy, original);
}

TEST_F(CudaStep, AnExportedStateContinuesInAnotherBackend) {
  const auto from = make(), to = make();
  generate(*from, 0, {0, 1}, 100, 1);
  std::vector<std::byte> slot(from->recurrent_slot_bytes()), page(from->kv_page_bytes());
  from->export_recurrent(0, slot);
  to->import_recurrent(3, slot);
  for (int i = 0; i < 2; ++i) {
    from->export_kv_page(i, page);
    to->import_kv_page(5 + i, page);
  }
  std::vector<TokenId> original, moved;
  for (int i = 0; i < 12; ++i) original.push_back(run(*from, 0, {0, 1}, 100 + i, {kLastPicked}));
  for (int i = 0; i < 12; ++i) moved.push_back(run(*to, 3, {5, 6}, 100 + i, {kLastPicked}));
  EXPECT_EQ(moved, original);
}

TEST_F(CudaStep, RowsOfABatchDoNotDisturbEachOther) {
  const auto backend = make();
  const auto alone = generate(*backend, 0, {0, 1, 2}, 100, 1);
  generate(*backend, 1, {3, 4, 5}, 100, 1);
  backend->copy_recurrent(0, 2);
  backend->copy_kv_page(1, 7, 36);
  std::vector<TokenId> single;
  for (int i = 0; i < 8; ++i) single.push_back(run(*backend, 0, {0, 1, 2}, 100 + i, {kLastPicked}));
  const std::vector<int32_t> a = {3, 4, 5}, b = {0, 7, 8};
  for (int i = 0; i < 8; ++i) {
    const std::vector<TokenId> tokens = {kLastPicked, kLastPicked};
    const std::vector<SequenceRows> sequences = {{1, a, 100 + i, 1}, {2, b, 100 + i, 1}};
    std::vector<HeadRow> heads(2);
    heads[0].pick = heads[1].pick = true;
    heads[1].row = heads[1].sequence = 1;
    Batch batch;
    batch.tokens = tokens;
    batch.sequences = sequences;
    batch.heads = heads;
    const StepId step = forward(*backend, model_.shape(), batch);
    backend->wait(step);
    EXPECT_EQ(backend->picked(step)[1], single[static_cast<size_t>(i)]);
  }
}

// Four layers of the real widths, a first token for each of some sequences.
class CudaProgram : public CudaStep {
 protected:
  using Rows = std::vector<std::vector<float>>;  // of each sequence

  // A backend and the first step of sequences that start with the given tokens.
  class FirstStep {
   public:
    FirstStep(const CudaProgram& test, std::vector<TokenId> tokens, std::vector<std::string> ablate)
        : shape_(test.shape_), tokens_(std::move(tokens)), pages_(tokens_.size()), heads_(tokens_.size()) {
      const int count = static_cast<int>(tokens_.size());
      BackendOptions options;
      options.max_rows = options.max_heads = count;
      options.ablate = std::move(ablate);
      options.replay_steps = false;
      backend_ = create_cuda_backend(shape_, test.weights_, options);
      backend_->allocate_state({count, count});
      for (int i = 0; i < count; ++i) {
        backend_->clear_recurrent(i);
        pages_[static_cast<size_t>(i)] = i;
        sequences_.push_back({i, std::span(&pages_[static_cast<size_t>(i)], 1), 0, 1});
        heads_[static_cast<size_t>(i)].row = heads_[static_cast<size_t>(i)].sequence = i;
      }
      batch_.tokens = tokens_;
      batch_.sequences = sequences_;
      batch_.heads = heads_;
      batch_.want_logits = true;
    }
    Rows logits() {
      const StepId step = forward(*backend_, shape_, batch_);
      backend_->wait(step);
      Rows logits;
      for (size_t i = 0; i < tokens_.size(); ++i) {
        const std::span<const float> row = backend_->logits(step, static_cast<int>(i));
        logits.emplace_back(row.begin(), row.end());
      }
      return logits;
    }

    // The same layer by layer.
    void begin() {
      backend_->begin(batch_);
      backend_->embed();
    }
    void run_layer(int layer) { forward_layer(*backend_, shape_, layer); }
    void end() { backend_->wait(backend_->submit()); }
    Rows read(Slot slot) {
      const auto width = static_cast<size_t>(slot_width(slot, shape_));
      std::vector<float> all(width * tokens_.size());
      backend_->read_slot(slot, all);
      Rows rows;
      for (size_t i = 0; i < tokens_.size(); ++i)
        rows.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(i * width),
                          all.begin() + static_cast<std::ptrdiff_t>((i + 1) * width));
      return rows;
    }
    void write(Slot slot, const Rows& rows) {
      std::vector<float> all;
      for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
      backend_->write_slot(slot, all);
    }

   private:
    const ModelShape& shape_;
    std::vector<TokenId> tokens_;
    std::vector<int32_t> pages_;
    std::vector<SequenceRows> sequences_;
    std::vector<HeadRow> heads_;
    Batch batch_;
    std::unique_ptr<Backend> backend_;
  };

  Rows first_logits(const std::vector<TokenId>& tokens, std::vector<std::string> ablate) {
    return FirstStep(*this, tokens, std::move(ablate)).logits();
  }
  static std::vector<TokenId> some_tokens(int count) {
    std::vector<TokenId> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(1234 + 777 * i);
    return tokens;
  }
  static double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += std::pow(double{a[i]} - b[i], 2);
      norm += double{b[i]} * b[i];
    }
    return std::sqrt(difference / norm);
  }
  // Weights of the experts in `ids` that are not in `others`, in ascending order.
  static std::vector<float> weights_of_others(const std::vector<float>& ids, const std::vector<float>& weights,
                                              const std::vector<float>& others) {
    std::vector<float> found;
    for (size_t i = 0; i < ids.size(); ++i)
      if (std::find(others.begin(), others.end(), ids[i]) == others.end()) found.push_back(weights[i]);
    std::sort(found.begin(), found.end());
    return found;
  }

  const std::vector<std::string> no_programs_ = {"token-program", "rows-program"};
  const ModelShape shape_ = real_shape(4);
  const ModelWeights weights_ = outline_weights(shape_, 17);
};

// 1: the token program; 11: two programs. Each layer gets the same input in both. Where two experts are as good as each
// other a row may choose the other one, and its output then differs: but only there, as their weights show.
TEST_F(CudaProgram, EachLayerComputesWhatItsStagesDo) {
  int compared = 0;
  for (const int count : {1, 2, 5, 8, 11}) {
    FirstStep program(*this, some_tokens(count), {}), stages(*this, some_tokens(count), no_programs_);
    program.begin();
    stages.begin();
    for (int layer = 0; layer < shape_.layers(); ++layer) {
      program.run_layer(layer);
      stages.run_layer(layer);
      const Rows ids = program.read(Slot::kExpertIds), expected_ids = stages.read(Slot::kExpertIds);
      const Rows weights = program.read(Slot::kExpertWeights), expected_weights = stages.read(Slot::kExpertWeights);
      const Rows residual = program.read(Slot::kResidual), expected = stages.read(Slot::kResidual);
      for (size_t row = 0; row < residual.size(); ++row) {
        const std::string where =
            "row " + std::to_string(row) + " of " + std::to_string(count) + ", layer " + std::to_string(layer);
        const std::vector<float> other = weights_of_others(ids[row], weights[row], expected_ids[row]);
        const std::vector<float> instead = weights_of_others(expected_ids[row], expected_weights[row], ids[row]);
        ASSERT_EQ(other.size(), instead.size()) << where << ": an expert is chosen twice";
        for (size_t i = 0; i < other.size(); ++i)
          EXPECT_NEAR(other[i], instead[i], 0.02 * instead[i]) << where << ": another expert, which is no tie";
        if (!other.empty()) continue;
        EXPECT_LT(relative_error(residual[row], expected[row]), 4e-3) << where;
        ++compared;
      }
      program.write(Slot::kResidual, expected);
    }
    program.end();
    stages.end();
  }
  EXPECT_GT(compared, 27 * shape_.layers() * 3 / 4) << "ties are rare";
}

// A whole step, in programs of many phases. 2e-3 to 6e-3 are seen: fixed point or fp16 against fp16, through four layers; far
// more where a row chose another expert, so the middle row is judged.
TEST_F(CudaProgram, AStepComputesWhatItsStagesDo) {
  for (const int count : {1, 2, 5, 8, 11}) {
    const std::vector<TokenId> tokens = some_tokens(count);
    const Rows program = first_logits(tokens, {}), stages = first_logits(tokens, no_programs_);
    std::vector<double> errors;
    for (size_t i = 0; i < tokens.size(); ++i) errors.push_back(relative_error(program[i], stages[i]));
    std::sort(errors.begin(), errors.end());
    EXPECT_LT(errors[errors.size() / 2], 1e-2) << count << " sequences";
    EXPECT_LT(errors.back(), 2) << count << " sequences";
  }
}

TEST_F(CudaProgram, APlaceAmongTheRowsDoesNotMatter) {
  const std::vector<TokenId> tokens = some_tokens(8);
  const Rows forwards = first_logits(tokens, {});
  Rows backwards = first_logits({tokens.rbegin(), tokens.rend()}, {});
  std::reverse(backwards.begin(), backwards.end());
  EXPECT_EQ(forwards, backwards);
}

// Sequences that come, go, are copied, moved and looked at, with logs of their states and without. The first layer's states
// depend on little else; those of later layers also on ties between experts, so of them only gross faults show.
class CudaLogs : public CudaProgram {
 protected:
  struct States {
    std::vector<float> state, conv;
  };

  static States read_states(Backend& backend, const ModelShape& shape, int layer, int slot) {
    States s{std::vector<float>(static_cast<size_t>(shape.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim),
             std::vector<float>(3 * static_cast<size_t>(shape.gdn_conv_width()))};
    backend.read_gdn_state(layer, slot, s.state, s.conv);
    return s;
  }

  // Looks between the stages of a step, if told to: at a projection before it is used, and at a slot's state when two layers
  // have run.
  class Looking : public BackendOver {
   public:
    Looking(const ModelShape& shape, std::unique_ptr<Backend> inner) : BackendOver(std::move(inner)), shape_(shape) {}
    bool begin(const Batch& batch) override {
      rows_ = batch.tokens.size();
      return BackendOver::begin(batch);
    }
    void mix_gdn(int layer) override {
      if (watched && layer == 0) look_at(Slot::kGdnQkv);
      BackendOver::mix_gdn(layer);
    }
    void experts_down(int layer) override {
      BackendOver::experts_down(layer);
      if (!watched || layer != 1) return;
      look_at(Slot::kResidual);
      read_states(*this, shape_, 0, *watched);
    }

    std::optional<int> watched;  // a slot

   private:
    void look_at(Slot slot) {
      std::vector<float> out(static_cast<size_t>(slot_width(slot, shape_)) * rows_);
      read_slot(slot, out);
    }
    const ModelShape& shape_;
    size_t rows_ = 0;
  };

  class Sequences {
   public:
    // There are as many logs as there may be rows.
    Sequences(const CudaLogs& test, int slots, int rows, bool replay, std::vector<std::string> ablate)
        : shape_(test.shape_), positions_(static_cast<size_t>(slots)), pages_(static_cast<size_t>(slots)) {
      BackendOptions options;
      options.max_rows = options.max_heads = rows;
      options.replay_steps = replay;
      options.ablate = std::move(ablate);
      backend_ = std::make_unique<Looking>(shape_, create_cuda_backend(shape_, test.weights_, options));
      backend_->allocate_state({slots, slots});
      for (int slot = 0; slot < slots; ++slot) {
        clear(slot);
        pages_[static_cast<size_t>(slot)] = slot;
      }
    }
    Backend& backend() { return *backend_; }
    void clear(int slot) {
      backend_->clear_recurrent(slot);
      position(slot) = 0;
    }
    // `count` steps of a token of each slot.
    void step(const std::vector<int>& slots, int count) {
      for (; count > 0; --count) {
        fill(slots);
        backend_->wait(forward(*backend_, shape_, batch_));
      }
    }
    // A step of which somebody looks at the first layer's projection, and at a state while it goes on.
    void look(const std::vector<int>& slots) {
      fill(slots);
      backend_->watched = slots[0];
      backend_->wait(forward(*backend_, shape_, batch_));
      backend_->watched.reset();
    }
    void copy(int from, int to) {
      backend_->copy_recurrent(from, to);
      backend_->copy_kv_page(from, to, position(from));
      position(to) = position(from);
    }
    void move(int from, int to) {
      std::vector<std::byte> slot(backend_->recurrent_slot_bytes());
      backend_->export_recurrent(from, slot);
      backend_->import_recurrent(to, slot);
      backend_->copy_kv_page(from, to, kKvPageRows);
      position(to) = position(from);
      clear(from);
    }
    States read(int layer, int slot) { return read_states(*backend_, shape_, layer, slot); }

   private:
    int& position(int slot) { return positions_[static_cast<size_t>(slot)]; }
    void fill(const std::vector<int>& slots) {
      tokens_.clear();
      sequences_.clear();
      for (const int slot : slots) {
        tokens_.push_back((31 * slot + 797 * position(slot)) % 4096);
        sequences_.push_back({slot, std::span(&pages_[static_cast<size_t>(slot)], 1), position(slot)++, 1});
      }
      batch_.tokens = tokens_;
      batch_.sequences = sequences_;
    }

    const ModelShape& shape_;
    std::vector<int> positions_;
    std::vector<int32_t> pages_;
    std::vector<TokenId> tokens_;
    std::vector<SequenceRows> sequences_;
    Batch batch_;
    std::unique_ptr<Looking> backend_;
  };

  template <class Script>
  void expect_same(int slots, int rows, const Script& script, const std::string& what, bool replay = true) {
    Sequences with(*this, slots, rows, replay, {}), without(*this, slots, rows, replay, {"state-log"});
    script(with);
    script(without);
    double worst[3] = {};
    for (int layer = 0; layer < 3; ++layer) {
      for (int slot = 0; slot < slots; ++slot) {
        const std::string where = what + ", layer " + std::to_string(layer) + ", slot " + std::to_string(slot);
        const States a = with.read(layer, slot), b = without.read(layer, slot);
        const bool empty = std::all_of(b.state.begin(), b.state.end(), [](float v) { return v == 0; });
        if (layer == 0) {
          EXPECT_EQ(a.conv, b.conv) << where;
        }
        if (empty) {
          EXPECT_EQ(a.state, b.state) << where;
          continue;
        }
        const double error = relative_error(a.state, b.state);
        EXPECT_LT(error, layer == 0 ? 1e-5 : 0.25) << where;
        worst[layer] = std::max(worst[layer], error);
      }
    }
    for (int layer = 0; layer < 3; ++layer)
      RecordProperty("layer" + std::to_string(layer), std::to_string(worst[layer]));
  }
  static std::vector<int> first_slots(int count) {
    std::vector<int> slots(static_cast<size_t>(count));
    std::iota(slots.begin(), slots.end(), 0);
    return slots;
  }
};

TEST_F(CudaLogs, AStateIsWhatItWouldBeAfterAnyNumberOfTokens) {
  for (int steps = 1; steps <= 10; ++steps)
    expect_same(
        3, 3,
        [&](Sequences& s) {
          s.step({0, 1, 2}, steps);
        },
        std::to_string(steps) + " steps");
}

TEST_F(CudaLogs, SequencesComeAndGo) {
  expect_same(
      5, 3,
      [](Sequences& s) {
        s.step({0, 1}, 2);
        s.step({2, 0, 1}, 3);  // logs of different lengths
        s.step({1, 2}, 1);
        s.step({3, 4}, 2);  // there are three logs, so two are settled
        s.step({4, 0}, 5);
        s.step({2}, 1);  // the token program
        s.step({2, 3}, 7);
      },
      "coming and going");
}

// Eight rows of which some are written and some are not; several programs a step.
TEST_F(CudaLogs, ManySequences) {
  expect_same(
      11, 11,
      [](Sequences& s) {
        s.step({0, 1, 2}, 1);
        s.step({3, 4, 0, 5, 1, 6, 7, 2}, 1);
        s.step({7, 6, 5, 4}, 1);
        s.step(first_slots(8), 4);
        s.step({10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, 3);
        s.step(first_slots(11), 2);
      },
      "up to eleven rows");
  expect_same(
      32, 32,
      [](Sequences& s) {
        s.step({30, 31, 0, 17}, 2);
        s.step(first_slots(32), 6);
        s.step(first_slots(25), 1);
      },
      "up to 32 rows");
}

TEST_F(CudaLogs, StatesAreCopiedMovedAndCleared) {
  expect_same(
      5, 3,
      [](Sequences& s) {
        s.step({0, 1}, 2);
        s.copy(0, 3);
        s.step({3, 1}, 2);
        s.copy(3, 1);  // over a slot that has a log
        s.copy(0, 0);
        s.step({0, 1, 3}, 1);
        s.move(3, 2);
        s.clear(1);
        s.step({1, 2}, 3);
        s.move(2, 1);  // likewise
        s.step({0, 1}, 2);
      },
      "copied, moved and cleared");
}

TEST_F(CudaLogs, StatesAreReadAndWrittenInBetween) {
  expect_same(
      4, 3,
      [](Sequences& s) {
        s.step({0, 1, 2}, 2);
        s.look({0, 1, 2});
        s.step({1, 3}, 2);
        s.look({3, 0});
        s.step({0, 1, 2}, 1);
        States other = s.read(0, 1);
        for (float& v : other.state) v *= 0.5f;
        s.backend().write_gdn_state(0, 1, other.state, other.conv);
        s.step({0, 1, 2}, 3);
      },
      "looked at", false);
}

TEST_F(CudaStep, AnUnknownMechanismIsNamed) {
  try {
    make({"warp-drive"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("warp-drive"), std::string::npos);
  }
}

}  // namespace
}  // namespace calla
