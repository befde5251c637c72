#pragma once
// An engine that plays a script: what it is told to write, token by token, without a model.
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "server/constraints.h"
#include "server/service.h"

namespace calla {

inline const Tokenizer& tiny_tokenizer() {
  static const Tokenizer instance = Tokenizer::load(CALLA_SOURCE_DIR "/models/calla-tiny");
  return instance;
}

class FakeService : public GenerationService {
 public:
  // The next submitted generations write these, in order; the last is repeated. `play` runs them.
  std::vector<std::string> scripts = {"Hello."};
  int refuse_after = -1;  // so many are taken, then the queue is full

  void submit(std::shared_ptr<Generation> generation) override {
    if (static_cast<int>(submitted.size()) == refuse_after) throw RequestError("the queue is full", "", "queue_full");
    submitted.push_back(generation);
    waiting_.push_back(std::move(generation));
  }

  // Runs everything that waits.
  void play() {
    while (!waiting_.empty()) {
      const auto generation = std::move(waiting_.front());
      waiting_.pop_front();
      run(*generation, scripts[std::min(played_++, scripts.size() - 1)]);
    }
  }

  void prepare(Preparation preparation) override { prepared.push_back(std::move(preparation)); }
  bool prepares() const override { return true; }
  SchedulerStats stats() const override { return current; }
  int context() const override { return 4096; }

  std::vector<std::shared_ptr<Generation>> submitted;
  std::vector<Preparation> prepared;
  SchedulerStats current;

 private:
  void run(Generation& generation, const std::string& script) {
    const GenerationRequest& request = generation.request();
    GenerationSink& sink = generation.sink();
    GenerationResult result;
    result.prompt_tokens = static_cast<int>(request.prompt.size());
    result.cached_tokens = 2;
    result.prefill_seconds = 0.5;
    result.decode_seconds = 0.25;
    sink.on_prompt_progress(result.prompt_tokens, result.prompt_tokens);
    auto tokens = tiny_tokenizer().encode(script, AddedTokens::kRecognise);
    tokens.push_back(request.stop_tokens.front());
    result.reason = FinishReason::kStopToken;
    for (const TokenId token : tokens) {
      if (generation.cancelled()) {
        result.reason = FinishReason::kCancelled;
        break;
      }
      if (request.max_tokens > 0 && result.generated_tokens == request.max_tokens) {
        result.reason = FinishReason::kMaxTokens;
        break;
      }
      TokenEvent event;
      event.token = token;
      event.index = result.generated_tokens++;
      event.is_stop = token == tokens.back();
      event.logprob = -0.5f;
      if (request.top_logprobs > 0) event.top = {{token, -0.5f}};
      if (!sink.on_token(event)) {
        result.reason = FinishReason::kSink;
        break;
      }
    }
    sink.on_finished(result);
  }

  std::deque<std::shared_ptr<Generation>> waiting_;
  size_t played_ = 0;
};

inline ServedModel fake_model(FakeService& service) {
  ServedModel model;
  model.id = "fake";
  model.created = 1;
  model.tokenizer = &tiny_tokenizer();
  model.service = &service;
  model.stop_tokens = {tiny_tokenizer().find("<|im_end|>").value()};
  model.trie = make_token_trie(tiny_tokenizer());
  model.vocabulary = tiny_tokenizer().vocab_size();
  return model;
}

}  // namespace calla
