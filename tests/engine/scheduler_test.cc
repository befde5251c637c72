// The token loop, on every backend of this build: the cache, chunking, batching and cancelling never change an answer.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>
#include <stop_token>
#include <thread>

#include "backend/create.h"
#include "base/error.h"
#include "selftest/random_model.h"
#include "tests/backend/backend_over.h"

namespace calla {
namespace {

class Collector : public GenerationSink {
 public:
  bool on_token(const TokenEvent& event) override {
    events.push_back(event);
    tokens.push_back(event.token);
    return tokens.size() != stop_after;
  }
  void on_finished(const GenerationResult& r) override {
    ++finished;
    result = r;
    if (on_end) on_end();
  }
  void on_prompt_progress(int done, int) override {
    progress.push_back(done);
    if (on_progress) on_progress(done);
  }
  std::vector<TokenId> tokens;
  std::vector<TokenEvent> events;
  std::vector<int> progress;
  std::function<void(int)> on_progress;
  std::function<void()> on_end;
  GenerationResult result;
  int finished = 0;
  size_t stop_after = 0;
};

const RandomModel& model() {
  static const RandomModel instance(tiny_shape(4), 3);
  return instance;
}

// Fails like a card that fell off the bus, in one of the calls that the scheduler makes.
class FailingBackend : public BackendOver {
 public:
  enum class In : uint8_t { kNothing, kClear, kCopy, kBegin, kWait, kExport };
  using BackendOver::BackendOver;
  bool asynchronous() const override { return false; }
  void clear_recurrent(int slot) override { fail_in(In::kClear), BackendOver::clear_recurrent(slot); }
  void copy_recurrent(int from, int to) override { fail_in(In::kCopy), BackendOver::copy_recurrent(from, to); }
  bool begin(const Batch& batch) override { return fail_in(In::kBegin), BackendOver::begin(batch); }
  void wait(StepId step) override { BackendOver::wait(step), fail_in(In::kWait); }
  void export_recurrent(int slot, std::span<std::byte> out) override {
    fail_in(In::kExport), BackendOver::export_recurrent(slot, out);
  }
  In in = In::kNothing;
  int failures = 0;

 private:
  void fail_in(In call) {
    if (call != in) return;
    ++failures;
    throw DeviceError("the card is gone");
  }
};

struct Job {
  std::shared_ptr<Collector> sink = std::make_shared<Collector>();
  std::shared_ptr<Generation> generation;
};

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : list_backends())
    if (info.available) names.push_back(info.name);
  return names;
}

class SchedulerTest : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Scheduler> make(SchedulerOptions options = {}) {
    if (options.context == 0) options.context = 512;
    if (options.cache_snapshots < 0) options.cache_snapshots = 8;
    BackendOptions backend_options;
    backend_options.max_rows = std::max(options.prefill_chunk, options.max_sequences);
    scheduler_.reset();
    backend_ = create_backend(GetParam(), model().shape(), model().weights(), backend_options);
    return std::make_unique<Scheduler>(*backend_, model().shape(), options);
  }
  static std::vector<TokenId> prompt(int n, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<TokenId> tokens(static_cast<size_t>(n));
    for (TokenId& t : tokens) t = static_cast<TokenId>(random() % 4096);
    return tokens;
  }
  static Job start(Scheduler& scheduler, GenerationRequest request) {
    Job run;
    run.generation = std::make_shared<Generation>(std::move(request), run.sink);
    scheduler.submit(run.generation);
    return run;
  }
  static std::shared_ptr<Collector> finish(Scheduler& scheduler, GenerationRequest request) {
    Job run = start(scheduler, std::move(request));
    scheduler.run_until_finished(run.generation);
    EXPECT_EQ(run.sink->finished, 1);
    return run.sink;
  }
  static GenerationRequest request(std::vector<TokenId> tokens, int max_tokens) {
    GenerationRequest r;
    r.prompt = std::move(tokens);
    r.max_tokens = max_tokens;
    return r;
  }
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_P(SchedulerTest, ChunkSizeDoesNotChangeTheAnswer) {
  std::vector<TokenId> expected;
  for (int chunk : {1, 7, 64, 200}) {
    SchedulerOptions options;
    options.prefill_chunk = chunk;
    auto scheduler = make(options);
    const auto sink = finish(*scheduler, request(prompt(90, 1), 8));
    ASSERT_EQ(sink->tokens.size(), 8u);
    EXPECT_EQ(sink->result.reason, FinishReason::kMaxTokens);
    if (expected.empty()) expected = sink->tokens;
    EXPECT_EQ(sink->tokens, expected) << "chunk " << chunk;
    EXPECT_EQ(sink->progress.back(), 90);
  }
}

TEST_P(SchedulerTest, CacheHitEqualsColdRun) {
  auto scheduler = make();
  GenerationRequest first = request(prompt(70, 2), 6);
  first.boundaries = {20, 66};
  const auto a = finish(*scheduler, first);
  EXPECT_EQ(a->result.cached_tokens, 0);

  // The same prompt again: all but the last token could be known, the deepest snapshot is at 66.
  const auto again = finish(*scheduler, first);
  EXPECT_EQ(again->result.cached_tokens, 66);
  EXPECT_EQ(again->tokens, a->tokens);

  // A second turn: the whole conversation so far is a prefix.
  GenerationRequest second = request(first.prompt, 6);
  second.prompt.insert(second.prompt.end(), a->tokens.begin(), a->tokens.end());
  for (TokenId t : prompt(30, 3)) second.prompt.push_back(t);
  const auto warm = finish(*scheduler, second);
  EXPECT_EQ(warm->result.cached_tokens, 75);  // 70 + 6 generated, the last of which was never run

  // An edit after token 40 falls back to the snapshot at 20.
  GenerationRequest edited = second;
  edited.prompt[40] ^= 1;
  edited.boundaries = {};
  const auto edit = finish(*scheduler, edited);
  EXPECT_EQ(edit->result.cached_tokens, 20);

  auto fresh = make();
  EXPECT_EQ(finish(*fresh, second)->tokens, warm->tokens);
  EXPECT_EQ(finish(*fresh, edited)->tokens, edit->tokens);
}

// The cache takes no more than it was given, down to what the turns of one conversation need; less is refused with the
// least size.
TEST_P(SchedulerTest, ASmallCacheKeepsItsLimit) {
  auto scheduler = make();
  const auto slot = static_cast<int64_t>(backend_->recurrent_slot_bytes());
  const auto page = static_cast<int64_t>(backend_->kv_page_bytes());
  SchedulerOptions none;
  none.context = 512;
  none.max_sequences = 2;
  none.cache_snapshots = 0;
  const StateMemoryPlan without = plan_state(*backend_, model().shape(), none);
  for (const int64_t bytes : {3 * (slot + page), 4 * slot - 1, 5 * slot, 9 * slot, int64_t{1} << 30}) {
    SchedulerOptions options = none;
    options.cache_snapshots = -1;
    options.cache_bytes = bytes;
    const StateMemoryPlan plan = plan_state(*backend_, model().shape(), options);
    const int slots = plan.recurrent_slots - without.recurrent_slots, pages = plan.kv_pages - without.kv_pages;
    EXPECT_GE(slots, 3) << bytes;
    EXPECT_GE(pages, 3) << bytes;
    EXPECT_LE(slots * slot + pages * page, bytes);
  }
  none.cache_snapshots = -1;
  none.cache_bytes = 3 * (slot + page) - 1;
  try {
    plan_state(*backend_, model().shape(), none);
    FAIL();
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("--cache-gb at least that"), std::string::npos) << e.what();
  }

  // With one snapshot the next turn still goes on from the last.
  SchedulerOptions one;
  one.max_sequences = 1;
  one.cache_snapshots = 1;
  scheduler = make(one);
  GenerationRequest turn = request(prompt(70, 2), 6);
  turn.boundaries = {20, 66};
  const auto first = finish(*scheduler, turn);
  turn.prompt.insert(turn.prompt.end(), first->tokens.begin(), first->tokens.end());
  turn.prompt.push_back(7);
  EXPECT_EQ(finish(*scheduler, turn)->result.cached_tokens, 75);
}

TEST_P(SchedulerTest, ConcurrentRequestsEqualSoloRuns) {
  const std::vector<int> lengths = {7, 130, 33, 201, 1};
  std::vector<std::vector<TokenId>> solo;
  for (size_t i = 0; i < lengths.size(); ++i) {
    auto scheduler = make();
    GenerationRequest r = request(prompt(lengths[i], 10 + static_cast<unsigned>(i)), 12);
    if (i == 2) r.sampling.temperature = 0.8f, r.sampling.seed = 5, r.sampling.presence_penalty = 1;
    solo.push_back(finish(*scheduler, r)->tokens);
  }
  SchedulerOptions options;
  options.prefill_chunk = 32;
  auto scheduler = make(options);
  std::vector<Job> runs;
  for (size_t i = 0; i < lengths.size(); ++i) {
    GenerationRequest r = request(prompt(lengths[i], 10 + static_cast<unsigned>(i)), 12);
    if (i == 2) r.sampling.temperature = 0.8f, r.sampling.seed = 5, r.sampling.presence_penalty = 1;
    runs.push_back(start(*scheduler, r));
    for (size_t k = 0; k < i; ++k) scheduler->step();
  }
  Job victim = start(*scheduler, request(prompt(60, 99), 50));
  for (int k = 0; k < 5; ++k) scheduler->step();
  victim.generation->cancel();
  while (scheduler->step()) {
  }
  for (size_t i = 0; i < runs.size(); ++i) EXPECT_EQ(runs[i].sink->tokens, solo[i]) << "prompt of " << lengths[i];
  EXPECT_EQ(victim.sink->finished, 1);
  EXPECT_EQ(victim.sink->result.reason, FinishReason::kCancelled);
}

TEST_P(SchedulerTest, StopsAtStopTokensSinksAndTheContext) {
  auto scheduler = make();
  const auto free_run = finish(*scheduler, request(prompt(10, 4), 8));
  GenerationRequest r = request(prompt(10, 4), 8);
  r.stop_tokens = {free_run->tokens[3]};
  auto sink = finish(*scheduler, r);
  EXPECT_EQ(sink->result.reason, FinishReason::kStopToken);
  EXPECT_TRUE(sink->events.back().is_stop);
  EXPECT_LE(sink->tokens.size(), 4u);

  Job run;
  run.sink->stop_after = 3;
  run.generation = std::make_shared<Generation>(request(prompt(10, 4), 8), run.sink);
  scheduler->submit(run.generation);
  scheduler->run_until_finished(run.generation);
  EXPECT_EQ(run.sink->result.reason, FinishReason::kSink);
  EXPECT_EQ(run.sink->tokens.size(), 3u);

  sink = finish(*scheduler, request(prompt(511, 5), 64));
  EXPECT_EQ(sink->result.reason, FinishReason::kContextFull);
  EXPECT_EQ(sink->tokens.size(), 1u);
  for (int n : {512, 5000}) {
    try {
      finish(*scheduler, request(prompt(n, 5), 64));
      FAIL() << "a prompt of " << n << " tokens was accepted";
    } catch (const RequestError& e) {
      EXPECT_EQ(e.code(), "context_length_exceeded");
      EXPECT_NE(std::string(e.what()).find(std::to_string(n)), std::string::npos);
      EXPECT_NE(std::string(e.what()).find("512"), std::string::npos);
    }
  }
}

TEST_P(SchedulerTest, LogprobsAreOfTheRawLogits) {
  auto scheduler = make();
  GenerationRequest r = request(prompt(10, 4), 3);
  r.top_logprobs = 4;
  const auto sink = finish(*scheduler, r);
  for (const TokenEvent& event : sink->events) {
    ASSERT_EQ(event.top.size(), 4u);
    EXPECT_EQ(event.top[0].token, event.token);
    EXPECT_FLOAT_EQ(event.top[0].logprob, event.logprob);
    EXPECT_GE(event.top[0].logprob, event.top[1].logprob);
    EXPECT_LT(event.logprob, 0);
  }
}

// Allows the tokens divisible by `divisor` only.
class Multiples : public TokenConstraint {
 public:
  explicit Multiples(int divisor) : divisor_(divisor) {}
  bool allowed(std::span<uint32_t> mask) override {
    for (int t = 0; t < 4096; t += divisor_) mask[static_cast<size_t>(t) / 32] |= 1u << (t % 32);
    return true;
  }
  void accept(TokenId token) override { accepted.push_back(token); }
  std::vector<TokenId> accepted;

 private:
  int divisor_;
};

TEST_P(SchedulerTest, ConstraintsAreObeyed) {
  auto scheduler = make();
  auto constraint = std::make_shared<Multiples>(37);
  GenerationRequest r = request(prompt(12, 6), 10);
  r.constraint = constraint;
  r.sampling.temperature = 1;
  const auto sink = finish(*scheduler, r);
  ASSERT_EQ(sink->tokens.size(), 10u);
  for (TokenId t : sink->tokens) EXPECT_EQ(t % 37, 0);
  EXPECT_EQ(constraint->accepted, sink->tokens);
}

TEST_P(SchedulerTest, QueueIsBounded) {
  SchedulerOptions options;
  options.max_sequences = 1;
  options.max_queue = 2;
  auto scheduler = make(options);
  for (unsigned i = 1; i <= 3; ++i) start(*scheduler, request(prompt(5, i), 2));  // one has a seat
  try {
    start(*scheduler, request(prompt(5, 4), 2));
    FAIL();
  } catch (const RequestError& e) {
    EXPECT_EQ(e.code(), "queue_full");
  }
}

TEST_P(SchedulerTest, WithoutAQueueWhatFindsASeatRuns) {
  SchedulerOptions options;
  options.max_sequences = 2;
  options.max_queue = 0;
  auto scheduler = make(options);
  EXPECT_EQ(finish(*scheduler, request(prompt(5, 1), 2))->tokens.size(), 2u);
  start(*scheduler, request(prompt(5, 2), 2));
  start(*scheduler, request(prompt(5, 3), 2));
  EXPECT_THROW(start(*scheduler, request(prompt(5, 4), 2)), RequestError);
}

// Behind one that still waits.
TEST_P(SchedulerTest, WhoLeavesWhileWaitingLeavesTheQueue) {
  SchedulerOptions options;
  options.max_sequences = 1;
  options.max_queue = 2;
  auto scheduler = make(options);
  start(*scheduler, request(prompt(5, 1), 50));
  scheduler->step();
  start(*scheduler, request(prompt(5, 2), 2));
  const Job left = start(*scheduler, request(prompt(5, 3), 2));
  left.generation->cancel();
  scheduler->step();
  EXPECT_EQ(left.sink->result.reason, FinishReason::kCancelled);
  EXPECT_EQ(scheduler->stats().queued, 1);
  EXPECT_NO_THROW(start(*scheduler, request(prompt(5, 4), 2)));
}

// Random turns, edits, cancels in the prefill or the answer, in one scheduler with a small pool: each finished answer
// equals that of a fresh scheduler, and nothing leaks.
TEST_P(SchedulerTest, RandomConversationsEqualFreshRuns) {
  std::mt19937 random(11);
  SchedulerOptions options;
  options.prefill_chunk = 24;
  options.max_sequences = 2;
  options.cache_snapshots = 5;
  options.kv_tokens = 1200;
  options.snapshot_interval = 64;
  auto scheduler = make(options);
  std::vector<std::pair<GenerationRequest, std::vector<TokenId>>> finished;
  std::vector<TokenId> conversation = prompt(20, 1);
  const int rounds = GetParam() == "reference" ? 12 : 60;
  for (int round = 0; round < rounds; ++round) {
    if (conversation.size() > 380) conversation.resize(100 + random() % 100);
    if (random() % 4 == 0) conversation[random() % conversation.size()] ^= 3;  // an edit
    if (random() % 3 == 0) conversation.resize(1 + random() % conversation.size());
    for (TokenId t : prompt(1 + static_cast<int>(random() % 40), static_cast<unsigned>(random())))
      conversation.push_back(t);
    GenerationRequest r = request(conversation, 1 + static_cast<int>(random() % 6));
    for (int b = 1 + static_cast<int>(random() % 30); b < static_cast<int>(conversation.size());
         b += 1 + static_cast<int>(random() % 50))
      r.boundaries.push_back(b);
    Job run = start(*scheduler, r);
    if (random() % 3 == 0) {
      Generation* generation = run.generation.get();
      const int at = static_cast<int>(random() % conversation.size());
      run.sink->on_progress = [generation, at](int done) {
        if (done >= at) generation->cancel();
      };
    }
    scheduler->run_until_finished(run.generation);
    ASSERT_EQ(run.sink->finished, 1);
    if (run.sink->result.reason == FinishReason::kMaxTokens) {
      finished.emplace_back(r, run.sink->tokens);
      conversation.insert(conversation.end(), run.sink->tokens.begin(), run.sink->tokens.end());
    }
    if (random() % 2 == 0) {
      std::vector<TokenId> likely(conversation.begin(), conversation.end() - static_cast<int>(random() % 10) % 5);
      for (TokenId t : prompt(static_cast<int>(random() % 30), static_cast<unsigned>(random()))) likely.push_back(t);
      if (random() % 2 == 0) conversation = likely;
      scheduler->prepare({std::move(likely), {}});
      for (auto steps = random() % 6; steps > 0; --steps) scheduler->step();
    }
  }
  while (scheduler->step()) {
  }
  EXPECT_GT(scheduler->stats().preparations, 0u);
  const int slots = scheduler->pool().free_slots() + static_cast<int>(scheduler->cache().size());
  EXPECT_EQ(slots, scheduler->pool().plan().recurrent_slots);
  scheduler->cache().clear();
  EXPECT_EQ(scheduler->pool().free_pages(), scheduler->pool().plan().kv_pages);
  auto fresh = make();
  for (auto& [r, tokens] : finished) {
    r.use_cache = false;
    EXPECT_EQ(finish(*fresh, r)->tokens, tokens);
  }
}

// A question whose reasoning is dropped from the history: what was prepared while idle is the next turn's state.
TEST_P(SchedulerTest, PreparesTheNextTurnWhenIdle) {
  auto scheduler = make();
  GenerationRequest first = request(prompt(70, 2), 6);
  first.boundaries = {66};
  finish(*scheduler, first);
  GenerationRequest next = request(prompt(70, 2), 6);
  next.prompt.resize(66);  // without the generation prompt
  for (TokenId t : prompt(90, 3)) next.prompt.push_back(t);
  std::vector<PreparationResult> ready;
  scheduler->prepare({next.prompt, [&](const PreparationResult& result) { ready.push_back(result); }});
  while (scheduler->step()) {
  }
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].tokens, 156);
  EXPECT_EQ(ready[0].known_tokens, 66);
  EXPECT_EQ(ready[0].computed_tokens, 90);
  EXPECT_EQ(scheduler->stats().preparations, 1u);
  EXPECT_EQ(scheduler->stats().prepared_tokens, 90u);
  EXPECT_EQ(scheduler->stats().prefilled_tokens, 70u);
  for (TokenId t : prompt(5, 4)) next.prompt.push_back(t);
  const auto warm = finish(*scheduler, next);
  EXPECT_EQ(warm->result.cached_tokens, 156);
  next.use_cache = false;
  EXPECT_EQ(finish(*scheduler, next)->tokens, warm->tokens);
}

TEST_P(SchedulerTest, PreparationsGiveWayToRequests) {
  SchedulerOptions options;
  options.prefill_chunk = 8;  // so that a preparation takes several steps
  auto scheduler = make(options);
  int ready = 0;
  const std::vector<TokenId> likely = prompt(100, 5);
  scheduler->prepare({likely, [&](const PreparationResult& result) {
                        ++ready;
                        EXPECT_EQ(result.interruptions, 1);
                        EXPECT_EQ(result.computed_tokens, 100);
                      }});
  for (int i = 0; i < 4; ++i) scheduler->step();  // the begin, and three chunks
  EXPECT_GT(scheduler->stats().prepared_tokens, 0u);
  const uint64_t prepared = scheduler->stats().prepared_tokens;

  Job other = start(*scheduler, request(prompt(40, 6), 4));
  scheduler->run_until_finished(other.generation);
  EXPECT_EQ(scheduler->stats().prepared_tokens, prepared) << "nothing is prepared while a request runs";
  EXPECT_EQ(ready, 0);
  while (scheduler->step()) {  // goes on where it was
  }
  EXPECT_EQ(ready, 1);
  EXPECT_EQ(scheduler->stats().prepared_tokens, 100u);
  EXPECT_EQ(scheduler->stats().preparations_interrupted, 1u);
  EXPECT_EQ(other.sink->tokens, finish(*make(), request(prompt(40, 6), 4))->tokens);
}

// The request that it was meant for comes before it is ready, and goes on from what is there.
TEST_P(SchedulerTest, AHalfReadyPreparationServesItsRequest) {
  SchedulerOptions options;
  options.prefill_chunk = 8;
  auto scheduler = make(options);
  scheduler->prepare({prompt(100, 5), [](const PreparationResult&) { FAIL() << "it is no longer needed"; }});
  for (int i = 0; i < 4; ++i) scheduler->step();
  const auto prepared = static_cast<int>(scheduler->stats().prepared_tokens);
  GenerationRequest next = request(prompt(100, 5), 4);
  next.prompt.push_back(7);
  const auto sink = finish(*scheduler, next);
  EXPECT_GT(prepared, 0);
  EXPECT_EQ(sink->result.cached_tokens, prepared);
  while (scheduler->step()) {
  }
  EXPECT_EQ(scheduler->stats().prepared_tokens, static_cast<uint64_t>(prepared));
  const int slots = scheduler->pool().free_slots() + static_cast<int>(scheduler->cache().size());
  EXPECT_EQ(slots, scheduler->pool().plan().recurrent_slots);
  scheduler->cache().clear();
  EXPECT_EQ(scheduler->pool().free_pages(), scheduler->pool().plan().kv_pages);
  EXPECT_EQ(sink->tokens, finish(*make(), next)->tokens);
}

TEST_P(SchedulerTest, PreparesNothingWithoutAGain) {
  const auto never = [](const PreparationResult&) { FAIL(); };
  {
    auto scheduler = make();
    const auto answered = finish(*scheduler, request(prompt(50, 8), 6));
    std::vector<TokenId> all = prompt(50, 8);
    all.insert(all.end(), answered->tokens.begin(), answered->tokens.end());
    scheduler->prepare({all, never});             // all but the last token is known
    scheduler->prepare({prompt(512, 9), never});  // no room for an answer
    scheduler->prepare({{}, never});
    scheduler->prepare({std::vector<TokenId>(20, 1 << 30), never});
    while (scheduler->step()) {
    }
    EXPECT_EQ(scheduler->stats().prepared_tokens, 0u);
  }
  SchedulerOptions off;
  off.prepare = false;
  auto scheduler = make(off);
  scheduler->prepare({prompt(50, 8), never});
  EXPECT_FALSE(scheduler->step());
}

TEST_P(SchedulerTest, RunServesAThreadAndCancelsTheRestAtTheEnd) {
  auto scheduler = make();
  std::jthread engine([&](std::stop_token stop) { scheduler->run(stop); });
  std::vector<Job> runs;
  for (unsigned i = 0; i < 3; ++i) runs.push_back(start(*scheduler, request(prompt(10, i), 400)));
  engine.request_stop();
  engine.join();
  for (const Job& run : runs) {
    EXPECT_EQ(run.sink->finished, 1);
    EXPECT_EQ(run.sink->result.reason, FinishReason::kCancelled);
  }
}

// A device that refuses a call costs the requests of the moment, each told once, and not the process.
TEST_P(SchedulerTest, ADeviceThatFailsEndsTheRequestsAndNotTheLoop) {
  using In = FailingBackend::In;
  const std::filesystem::path store = ::testing::TempDir() + "calla_failing_device_" + GetParam();
  std::filesystem::remove_all(store);
  SchedulerOptions options;
  options.context = 256;
  options.cache_snapshots = 8;
  options.cache_dir = store;
  options.model_id = "test";
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& line) { warnings.push_back(line); };
  BackendOptions backend_options;
  backend_options.max_rows = options.prefill_chunk;
  backend_options.max_heads = options.max_sequences;
  FailingBackend backend(create_backend(GetParam(), model().shape(), model().weights(), backend_options));
  Scheduler scheduler(backend, model().shape(), options);
  // The token loop as the server runs it, until all of these have ended.
  const auto run = [&](const std::vector<GenerationRequest>& requests) {
    std::stop_source stop;
    size_t ended = 0;
    std::vector<Job> jobs;
    for (const GenerationRequest& r : requests) {
      jobs.push_back(start(scheduler, r));
      jobs.back().sink->on_end = [&] {
        if (++ended == requests.size()) stop.request_stop();
      };
    }
    scheduler.run(stop.get_token());
    return jobs;
  };
  GenerationRequest shared = request(prompt(40, 1), 6);
  shared.boundaries = {20};
  const auto expected = run({shared})[0].sink->tokens;
  ASSERT_EQ(expected.size(), 6u);
  for (const In in : {In::kBegin, In::kNothing}) {  // while idle
    backend.in = in;
    scheduler.prepare({prompt(40, 20), {}});
    while (scheduler.step()) {
    }
    EXPECT_EQ(scheduler.stats().device_error, in == In::kBegin ? "the card is gone" : "");
  }

  for (const In in : {In::kClear, In::kCopy, In::kBegin, In::kWait, In::kExport}) {
    backend.in = in;
    backend.failures = 0;
    warnings.clear();
    GenerationRequest other = request(prompt(40, 2 + static_cast<unsigned>(in)), 6);
    other.boundaries = {20};
    bool failed = false;  // the last of them
    for (const Job& job : run({other, shared})) {
      EXPECT_EQ(job.sink->finished, 1);
      failed = job.sink->result.reason == FinishReason::kError;
      if (!failed) continue;
      EXPECT_EQ(job.sink->result.error, "the card is gone");
      EXPECT_EQ(warnings.empty(), in == In::kWait);  // a step's own failure goes to its requests alone
    }
    EXPECT_GT(backend.failures, 0) << static_cast<int>(in);
    EXPECT_EQ(scheduler.stats().device_error, failed ? "the card is gone" : "") << static_cast<int>(in);
    backend.in = In::kNothing;
    EXPECT_EQ(run({shared})[0].sink->tokens, expected) << static_cast<int>(in);
    EXPECT_EQ(scheduler.stats().device_error, "") << static_cast<int>(in);
  }
  scheduler.cache().clear();
  EXPECT_EQ(scheduler.pool().free_slots(), scheduler.pool().plan().recurrent_slots);
  EXPECT_EQ(scheduler.pool().free_pages(), scheduler.pool().plan().kv_pages);
  std::filesystem::remove_all(store);
}

INSTANTIATE_TEST_SUITE_P(Backends, SchedulerTest, ::testing::ValuesIn(backends()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace calla
