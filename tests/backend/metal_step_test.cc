// Whole steps of the Metal backend: tokens handed over on the device, two steps in flight, barriers, counts, failures.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "backend/create.h"
#include "base/error.h"
#include "model/forward.h"
#include "selftest/random_model.h"
#include "tests/backend/metal_device.h"

namespace calla {
namespace {

using metal::EncoderCounts;
using metal::MetalBackend;
using metal::MetalTestOptions;

BackendOptions small_options() {
  BackendOptions options;
  options.max_rows = 64;
  options.max_heads = 4;
  return options;
}

// One sequence on a backend: a prompt in chunks, then tokens.
class Conversation {
 public:
  // `slots`: conversations that share the pool's pages.
  Conversation(Backend& backend, const ModelShape& shape, int slot = 0, int slots = 2)
      : backend_(backend), shape_(shape), slot_(slot), slots_(slots) {
    backend_.clear_recurrent(slot);
  }

  StepId step(std::vector<TokenId> tokens, bool want_head) {
    tokens_ = std::move(tokens);
    add_pages(position_ + static_cast<int>(tokens_.size()));
    const std::array sequences = {SequenceRows{slot_, pages_, position_, static_cast<int>(tokens_.size())}};
    HeadRow head;
    head.row = static_cast<int>(tokens_.size()) - 1;
    head.pick = true;
    head.sampling = sampling;
    const std::array heads = {head};
    Batch batch;
    batch.tokens = tokens_;
    batch.sequences = sequences;
    if (want_head) batch.heads = heads;
    batch.want_logits = true;
    position_ += static_cast<int>(tokens_.size());
    return forward(backend_, shape_, batch);
  }

  // Positions before the first token, with a cache of some numbers.
  void skip(int positions) {
    position_ = positions;
    add_pages(positions);
    const std::vector<float> values(static_cast<size_t>(positions) * shape_.kv_width(), 0.5f);
    for (int layer = 0; layer < shape_.layers(); ++layer)
      if (shape_.layer_kinds[layer] == LayerKind::kAttention)
        backend_.write_kv(layer, pages_, positions, values, values);
  }

  SamplingParams sampling;

 private:
  void add_pages(int positions) {
    while (static_cast<int>(pages_.size()) * kKvPageRows < positions)
      pages_.push_back(static_cast<int32_t>(pages_.size()) * slots_ + slot_);
  }

  Backend& backend_;
  const ModelShape& shape_;
  const int slot_;
  const int slots_;
  int position_ = 0;
  std::vector<int32_t> pages_;
  std::vector<TokenId> tokens_;
};

std::vector<TokenId> prompt(int n) {
  std::vector<TokenId> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = (i * 37 + 11) % 4096;
  return tokens;
}

// The prompt in one chunk, then `count` tokens, each step submitted before the one before it is read.
std::vector<TokenId> generate(Backend& backend, const ModelShape& shape, int count, const SamplingParams& sampling) {
  Conversation talk(backend, shape);
  talk.sampling = sampling;
  std::vector<TokenId> picked;
  StepId pending = talk.step(prompt(20), true);
  for (int i = 1; i < count; ++i) {
    const StepId next = talk.step({kLastPicked}, true);
    backend.wait(pending);
    picked.push_back(backend.picked(pending)[0]);
    pending = next;
  }
  backend.wait(pending);
  picked.push_back(backend.picked(pending)[0]);
  return picked;
}

// Weights of one and of nothing: every sum is exact, and ids alone decide what is kept and drawn.
TEST(MetalPick, TiedTokensAreKeptAndDrawnInOrderOfIds) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(2), 23);
  const ModelShape& shape = model.shape();
  ASSERT_GT(shape.vocab, 3000);
  MetalBackend metal(shape, model.weights(), small_options());
  metal.allocate_state({1, 1});
  metal.clear_recurrent(0);
  const std::array<int32_t, 1> pages = {0};
  const std::array sequences = {SequenceRows{0, pages, 0, 1}};
  const std::array<TokenId, 1> tokens = {0};
  int different = 0;
  TokenId first = -1;
  for (const int tied : {1, 3, 700, 1024, 1025, 3000}) {
    std::vector<float> logits(shape.vocab, -500.0f);
    for (int i = 0; i < tied; ++i) logits[shape.vocab - 1 - i * (shape.vocab / tied)] = 2.0f;
    for (const int top_k : {0, 1, 2, 20, 1023, 1500}) {
      for (const float top_p : {1.0f, 0.5f}) {
        HeadRow head;
        head.pick = true;
        head.sampling.temperature = 1;
        head.sampling.top_k = top_k;
        head.sampling.top_p = top_p;
        head.sampling.seed = static_cast<uint64_t>(tied) * 100 + top_k;
        const std::array heads = {head};
        Batch batch;
        batch.tokens = tokens;
        batch.sequences = sequences;
        batch.heads = heads;
        batch.want_logits = true;
        metal.begin(batch);
        metal.write_slot(Slot::kLogits, logits);
        metal.pick();
        const StepId step = metal.submit();
        metal.wait(step);
        std::vector<float> copy = logits;
        const TokenId expected = pick_token(copy, head.sampling, {}, {}, 1);
        EXPECT_EQ(metal.picked(step)[0], expected) << tied << " tied, top_k " << top_k << ", top_p " << top_p;
        if (first < 0) first = expected;
        different += expected != first ? 1 : 0;
      }
    }
  }
  EXPECT_GT(different, 30);
}

TEST(MetalSteps, TokensGoFromStepToStepOnTheDevice) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(4), 21);
  const ModelShape& shape = model.shape();
  MetalBackend metal(shape, model.weights(), small_options());
  metal.allocate_state({1, 4});
  SamplingParams sampling;
  sampling.temperature = 0.8f;
  sampling.top_k = 40;
  sampling.seed = 5;
  for (const SamplingParams& s : {SamplingParams{}, sampling}) {
    const std::vector<TokenId> ahead = generate(metal, shape, 6, s);
    // The same, each token brought to the CPU and back.
    Conversation talk(metal, shape);
    talk.sampling = s;
    StepId step = talk.step(prompt(20), true);
    std::vector<TokenId> one_by_one;
    for (int i = 0; i < 6; ++i) {
      metal.wait(step);
      one_by_one.push_back(metal.picked(step)[0]);
      if (i < 5) step = talk.step({one_by_one.back()}, true);
    }
    EXPECT_EQ(ahead, one_by_one);
  }
}

// Chunks must not matter: logits of the last prompt row, in one chunk and in three.
TEST(MetalSteps, ChunksDoNotChangeTheResult) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(4), 22);
  MetalBackend metal(model.shape(), model.weights(), small_options());
  metal.allocate_state({2, 8});
  const std::vector<TokenId> tokens = prompt(50);
  Conversation whole(metal, model.shape(), 0), parts(metal, model.shape(), 1);
  const StepId a = whole.step(tokens, true);
  metal.wait(a);
  const std::span<const float> a_logits = metal.logits(a, 0);
  const std::vector<float> expected(a_logits.begin(), a_logits.end());
  parts.step({tokens.begin(), tokens.begin() + 33}, false);
  parts.step({tokens.begin() + 33, tokens.begin() + 34}, false);
  const StepId b = parts.step({tokens.begin() + 34, tokens.end()}, true);
  metal.wait(b);
  const std::span<const float> got = metal.logits(b, 0);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  EXPECT_LT(std::sqrt(difference / norm), 0.02);
}

// A step that is cut into many command buffers, its attention into many dispatches, gives the very same logits: a fence
// orders them.
TEST(MetalSteps, LongWorkIsCutIntoCommandBuffers) {
  const RandomModel model(tiny_shape(4), 28);
  std::vector<float> logits[2];
  for (int cut = 0; cut < 2; ++cut) {
    const MetalDevice device("m4max", true);
    MetalTestOptions test_options;
    if (cut == 1) test_options.work_limit = 1e6;
    MetalBackend metal(model.shape(), model.weights(), small_options(), test_options);
    metal.allocate_state({1, 2});
    Conversation talk(metal, model.shape());
    const StepId step = talk.step(prompt(50), true);
    metal.wait(step);
    const std::span<const float> got = metal.logits(step, 0);
    logits[cut].assign(got.begin(), got.end());
    if (cut == 0) {
      EXPECT_EQ(metal.step_counts().command_buffers, 1);
    } else {
      EXPECT_GT(metal.step_counts().command_buffers, 10);
    }
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST(MetalSteps, StateIsCopiedAndExported) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(4), 23);
  const ModelShape& shape = model.shape();
  MetalBackend metal(shape, model.weights(), small_options());
  metal.allocate_state({3, 4});
  Conversation talk(metal, shape, 0);
  metal.wait(talk.step(prompt(10), true));
  metal.copy_recurrent(0, 1);
  std::vector<std::byte> bytes(metal.recurrent_slot_bytes());
  metal.export_recurrent(0, bytes);
  metal.import_recurrent(2, bytes);
  std::vector<float> states[3], tails[3];
  for (int slot = 0; slot < 3; ++slot) {
    states[slot].resize(static_cast<size_t>(shape.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim);
    tails[slot].resize(static_cast<size_t>(3) * shape.gdn_conv_width());
    metal.read_gdn_state(1, slot, states[slot], tails[slot]);
  }
  EXPECT_EQ(states[0], states[1]);
  EXPECT_EQ(states[0], states[2]);
  EXPECT_EQ(tails[0], tails[1]);
  EXPECT_EQ(tails[0], tails[2]);
  EXPECT_NE(states[0], std::vector<float>(states[0].size()));

  std::vector<float> k[2], v[2];
  for (auto* x : {&k[0], &k[1], &v[0], &v[1]}) x->resize(static_cast<size_t>(10) * shape.kv_width());
  metal.copy_kv_page(0, 3, 10);
  metal.read_kv(3, std::array<int32_t, 1>{0}, 10, k[0], v[0]);
  metal.read_kv(3, std::array<int32_t, 1>{3}, 10, k[1], v[1]);
  EXPECT_EQ(k[0], k[1]);
  EXPECT_EQ(v[0], v[1]);
}

// Forty layers at tiny widths: what is counted does not depend on widths. Context lengths on both sides of each switch.
TEST(MetalSteps, DispatchesOfADecodeToken) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(40), 24);
  const auto counts_at = [&](int fixed_from) {
    MetalTestOptions test_options;
    test_options.fixed_block_from = fixed_from;
    MetalBackend metal(model.shape(), model.weights(), small_options(), test_options);
    metal.allocate_state({1, 2});
    Conversation talk(metal, model.shape());
    metal.wait(talk.step(prompt(7), true));
    metal.wait(talk.step({kLastPicked}, true));
    return metal.step_counts();
  };
  const EncoderCounts short_context = counts_at(0);
  EXPECT_EQ(short_context.dispatches, 30 * 7 + 10 * 7 + 4);
  EXPECT_LE(short_context.phases, 300);
  EXPECT_EQ(short_context.command_buffers, 1);
  RecordProperty("dispatches", short_context.dispatches);
  RecordProperty("phases", short_context.phases);
}

#ifndef __APPLE__
TEST(MetalFailures, AFailedStepIsAnErrorAndSoIsTheOneThatBuiltOnIt) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(4), 25);
  MetalBackend metal(model.shape(), model.weights(), small_options());
  metal.allocate_state({1, 4});
  for (const softmetal::Failure failure :
       {softmetal::Failure::kTimeout, softmetal::Failure::kInteractivity, softmetal::Failure::kOutOfMemory}) {
    Conversation talk(metal, model.shape());
    metal.wait(talk.step(prompt(5), true));
    softmetal::inject(failure);
    const StepId lost = talk.step({kLastPicked}, true);
    const StepId next = talk.step({kLastPicked}, true);
    EXPECT_THROW(metal.wait(lost), DeviceError);
    EXPECT_THROW(metal.wait(next), DeviceError);
  }
  // The next request is served.
  Conversation talk(metal, model.shape());
  const StepId step = talk.step(prompt(5), true);
  EXPECT_NO_THROW(metal.wait(step));
  EXPECT_GE(metal.picked(step)[0], 0);
}

TEST(MetalFailures, TooLittleMemoryIsRefusedWithTheNumber) {
  const MetalDevice device;
  softmetal::Options options = softmetal::options();
  options.recommended_working_set = uint64_t{64} << 20;
  softmetal::set_options(options);
  const RandomModel model(tiny_shape(4), 26);
  MetalBackend metal(model.shape(), model.weights(), small_options());
  try {
    metal.allocate_state({100, 1000});
    FAIL() << "no refusal";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("iogpu.wired_limit_mb="), std::string::npos) << error.what();
  }
}

// Every barrier that the tracker puts into a step is needed: without it, softmetal sees two dispatches meet, or the second
// one read what the first has not written, and the step fails. `run` takes a step on a new backend, after `context`
// positions; returns how many barriers a step has.
int expect_each_barrier_needed(const RandomModel& model, int context, int rows, const MetalTestOptions& options,
                               const SamplingParams& sampling = {}) {
  int phases = 1;
  for (int barrier = -1; barrier < phases - 1; ++barrier) {
    const MetalDevice device("m5max", true);
    MetalTestOptions test_options = options;
    test_options.drop_barrier = barrier;
    MetalBackend metal(model.shape(), model.weights(), small_options(), test_options);
    metal.allocate_state({1, (context + rows) / kKvPageRows + 1});
    Conversation talk(metal, model.shape(), 0, 1);
    talk.sampling = sampling;
    talk.skip(context);
    metal.set_token_counts(0, {}, {});  // waits: the clearing of the slot is no part of the step
    const StepId step = talk.step(prompt(rows), true);
    phases = metal.step_counts().phases;
    if (barrier < 0) {
      EXPECT_NO_THROW(metal.wait(step));
      continue;
    }
    EXPECT_THROW(metal.wait(step), DeviceError) << "barrier " << barrier;
    EXPECT_FALSE(softmetal::take_findings().empty()) << "barrier " << barrier;
  }
  return phases - 1;
}

ModelShape one_layer_of_each() {
  ModelShape shape = tiny_shape(4);
  shape.layer_kinds = {LayerKind::kGatedDeltaNet, LayerKind::kAttention};
  return shape;
}

TEST(MetalBarriers, EachOneOfADecodeTokenIsNeeded) {
  EXPECT_EQ(expect_each_barrier_needed(RandomModel(tiny_shape(4), 27), 0, 1, {}), 4 * 7 + 3);
}
// Key ranges: attention and its merge. And a token that is drawn.
TEST(MetalBarriers, EachOneOfALongContextIsNeeded) {
  MetalTestOptions options;
  options.fixed_block_from = 512;
  SamplingParams sampling;
  sampling.temperature = 1;
  EXPECT_EQ(expect_each_barrier_needed(RandomModel(one_layer_of_each(), 28), 600, 1, options, sampling), 2 * 7 + 1 + 4);
}
// GEMMs, the scan, tiled attention, grouped experts.
TEST(MetalBarriers, EachOneOfAPrefillChunkIsNeeded) {
  EXPECT_GT(expect_each_barrier_needed(RandomModel(one_layer_of_each(), 29), 5, 33, {}), 20);
}
#endif

}  // namespace
}  // namespace calla
