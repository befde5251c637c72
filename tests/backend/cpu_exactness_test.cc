// What a row computes does not depend on the chunk it comes in, on the other sequences of its batch, or on
// the number of threads: bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "backend/create.h"
#include "model/forward.h"
#include "selftest/random_model.h"

namespace calla {
namespace {

constexpr int kPages = 40;

// A backend with a few sequences, each with its own slot and pages.
class Engine {
 public:
  Engine(const RandomModel& model, int threads, bool full_precision = false) : shape_(model.shape()) {
    BackendOptions options;
    options.threads = threads;
    options.max_rows = 700;
    options.full_precision = full_precision;
    backend_ = create_cpu_backend(shape_, model.weights(), options);
    backend_->allocate_state({4, 4 * kPages});
    pages_.resize(4 * kPages);
    std::iota(pages_.begin(), pages_.end(), 0);
  }

  struct Part {
    int sequence, position;
    std::vector<TokenId> tokens;
  };
  // Runs one step; returns the logits after the last row of each part.
  std::vector<std::vector<float>> step(const std::vector<Part>& parts) {
    std::vector<TokenId> tokens;
    std::vector<SequenceRows> sequences;
    std::vector<HeadRow> heads;
    for (const Part& part : parts) {
      tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
      sequences.push_back({part.sequence, std::span(pages_).subspan(part.sequence * kPages, kPages), part.position,
                           static_cast<int>(part.tokens.size())});
      HeadRow head;
      head.row = static_cast<int>(tokens.size()) - 1;
      head.sequence = static_cast<int>(heads.size());
      heads.push_back(head);
    }
    const StepId id = forward(*backend_, shape_, {tokens, sequences, heads, true});
    backend_->wait(id);
    std::vector<std::vector<float>> out;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto logits = backend_->logits(id, static_cast<int>(i));
      out.emplace_back(logits.begin(), logits.end());
    }
    return out;
  }

  std::vector<std::byte> recurrent(int sequence) {
    std::vector<std::byte> bytes(backend_->recurrent_slot_bytes());
    backend_->export_recurrent(sequence, bytes);
    return bytes;
  }

  Backend& backend() { return *backend_; }

 private:
  const ModelShape& shape_;
  std::unique_ptr<Backend> backend_;
  std::vector<int32_t> pages_;
};

std::vector<TokenId> random_tokens(int n, uint64_t seed, int vocab) {
  std::vector<TokenId> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = static_cast<TokenId>(draw_uniform(seed, i) * static_cast<float>(vocab));
  return tokens;
}

std::vector<float> prefill(Engine& engine, int sequence, const std::vector<TokenId>& tokens, int chunk) {
  std::vector<float> logits;
  const int n = static_cast<int>(tokens.size());
  for (int from = 0; from < n; from += chunk) {
    const int end = std::min(n, from + chunk);
    logits = engine.step({{sequence, from, {tokens.begin() + from, tokens.begin() + end}}})[0];
  }
  return logits;
}

class CpuExactness : public testing::TestWithParam<bool> {
 protected:
  CpuExactness() : shape_(small_shape()), model_(shape_, 3) {}
  static ModelShape small_shape() {
    ModelShape shape = tiny_shape(4);
    shape.vocab = 512;
    return shape;
  }
  const ModelShape shape_;
  const RandomModel model_;
};

TEST_P(CpuExactness, ChunksOfAnySize) {
  const std::vector<TokenId> tokens = random_tokens(560, 1, shape_.vocab);
  Engine whole(model_, 2, GetParam());
  const std::vector<float> expected = prefill(whole, 0, tokens, 560);
  for (int chunk : {1, 7, 64, 200, 512}) {
    Engine engine(model_, 1, GetParam());
    EXPECT_EQ(prefill(engine, 0, tokens, chunk), expected) << "chunks of " << chunk;
    EXPECT_TRUE(engine.recurrent(0) == whole.recurrent(0)) << "chunks of " << chunk;
  }
}

TEST_P(CpuExactness, AnyNumberOfThreads) {
  const std::vector<TokenId> tokens = random_tokens(530, 2, shape_.vocab);
  Engine one(model_, 1, GetParam());
  const std::vector<float> expected = prefill(one, 0, tokens, 530);
  const std::vector<float> next = one.step({{0, 530, {5}}})[0];
  for (int threads : {2, 3, 5}) {
    Engine engine(model_, threads, GetParam());
    EXPECT_EQ(prefill(engine, 0, tokens, 530), expected) << threads << " threads";
    EXPECT_EQ(engine.step({{0, 530, {5}}})[0], next) << threads << " threads";
  }
}

TEST_P(CpuExactness, ConcurrentSequences) {
  const std::vector<int> lengths = {3, 70, 129};
  std::vector<std::vector<TokenId>> tokens;
  for (int i = 0; i < 3; ++i) tokens.push_back(random_tokens(lengths[i] + 6, 10 + i, shape_.vocab));
  std::vector<std::vector<std::vector<float>>> solo(3);
  for (int i = 0; i < 3; ++i) {
    Engine engine(model_, 2, GetParam());
    prefill(engine, i, {tokens[i].begin(), tokens[i].begin() + lengths[i]}, 64);
    for (int t = 0; t < 6; ++t) solo[i].push_back(engine.step({{i, lengths[i] + t, {tokens[i][lengths[i] + t]}}})[0]);
  }
  Engine engine(model_, 2, GetParam());
  for (int i = 0; i < 3; ++i) prefill(engine, i, {tokens[i].begin(), tokens[i].begin() + lengths[i]}, 50);
  for (int t = 0; t < 6; ++t) {
    std::vector<Engine::Part> parts;
    for (int i = 2; i >= 0; --i) parts.push_back({i, lengths[i] + t, {tokens[i][lengths[i] + t]}});
    const auto logits = engine.step(parts);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(logits[2 - i], solo[i][t]) << "sequence " << i << ", token " << t;
  }
}

TEST_P(CpuExactness, StateTravels) {
  const std::vector<TokenId> tokens = random_tokens(100, 4, shape_.vocab);
  Engine engine(model_, 2, GetParam());
  prefill(engine, 0, tokens, 100);
  Backend& backend = engine.backend();
  backend.copy_recurrent(0, 1);
  const std::vector<std::byte> slot = engine.recurrent(0);
  EXPECT_TRUE(engine.recurrent(1) == slot);
  for (int page = 0; page < 2; ++page) {
    backend.copy_kv_page(page, kPages + page, kKvPageRows);
    std::vector<std::byte> bytes(backend.kv_page_bytes());
    backend.export_kv_page(page, bytes);
    backend.import_kv_page(2 * kPages + page, bytes);
  }
  backend.import_recurrent(2, slot);
  const std::vector<float> expected = engine.step({{0, 100, {7}}})[0];
  EXPECT_EQ(engine.step({{1, 100, {7}}})[0], expected);
  EXPECT_EQ(engine.step({{2, 100, {7}}})[0], expected);
  backend.clear_recurrent(1);
  EXPECT_TRUE(engine.recurrent(1) == std::vector<std::byte>(slot.size()));
}

// A token that is not finite must not pass unseen: NaN reaches the logits, and no token is picked.
TEST_P(CpuExactness, NanShows) {
  Engine engine(model_, 1, GetParam());
  Backend& backend = engine.backend();
  std::vector<int32_t> pages = {0};
  const TokenId token = 3;
  const SequenceRows sequence{0, pages, 0, 1};
  HeadRow head;
  head.pick = true;
  backend.begin({{&token, 1}, {&sequence, 1}, {&head, 1}, true});
  std::vector<float> x(shape_.hidden, 1.0f);
  x[17] = NAN;
  backend.write_slot(Slot::kResidual, x);
  backend.head();
  backend.pick();
  const StepId id = backend.submit();
  backend.wait(id);
  EXPECT_TRUE(std::isnan(backend.logits(id, 0)[5]));
  EXPECT_EQ(backend.picked(id)[0], -1);
}

INSTANTIATE_TEST_SUITE_P(Precision, CpuExactness, testing::Bool(),
                         [](const auto& param) { return param.param ? "Full" : "Default"; });

}  // namespace
}  // namespace calla
