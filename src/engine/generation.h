#pragma once
// What travels between the engine and whoever wants text (CLI, server, bench): a request of token ids in, events out.
// Text lives at the edges (tokenizer/, chat/); the engine never sees a string.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/sampling.h"
#include "model/shape.h"

namespace calla {

// Narrows the tokens that may come next (constrained decoding). Called by the engine's thread only.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Writes one bit per token (bit i % 32 of word i / 32) into `mask`, sized (vocab + 31) / 32, and returns true; or
  // returns false: every token is allowed at this point.
  virtual bool allowed(std::span<uint32_t> mask) = 0;
  // The token was generated.
  virtual void accept(TokenId token) = 0;
};

struct GenerationRequest {
  std::vector<TokenId> prompt;  // at least one token
  std::vector<int> boundaries;  // prompt positions (token counts) worth a snapshot: where a later prompt may
                                // diverge, such as the end of each message. Ascending, in (0, prompt.size())
  SamplingParams sampling;
  int max_tokens = 0;                // at most so many tokens; 0: until the context is full
  std::vector<TokenId> stop_tokens;  // generation ends at one of these, which is reported as the last token
  int top_logprobs = -1;             // -1: none; 0: the picked token's; n: also the n best
  std::shared_ptr<TokenConstraint> constraint;
  bool use_cache = true;  // reuse and leave prefix-cache entries
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
};

struct TokenEvent {
  TokenId token = 0;
  int index = 0;                  // 0 for the first generated token
  bool is_stop = false;           // one of stop_tokens: not part of the text
  float logprob = 0;              // if top_logprobs >= 0
  std::vector<TokenLogprob> top;  // best first, if top_logprobs > 0
};

enum class FinishReason : uint8_t {
  kStopToken,    // one of stop_tokens
  kSink,         // the sink asked to stop (a stop string, say)
  kMaxTokens,    // max_tokens reached
  kContextFull,  // the context is full
  kCancelled,    // cancel() or the sink's owner went away
  kError,        // see GenerationResult::error
};

struct GenerationResult {
  FinishReason reason = FinishReason::kStopToken;
  std::string error;  // kError: what happened
  int prompt_tokens = 0;
  int cached_tokens = 0;       // of the prompt: taken from the prefix cache
  int generated_tokens = 0;    // the stop token included
  double queue_seconds = 0;    // from submit to the first work
  double prefill_seconds = 0;  // until the first token's logits
  double decode_seconds = 0;   // from then until the last token
  std::string cache_note;      // why the cache gave what it gave, for the log
};

// Receives events on the engine's thread; must be quick. The last call is on_finished, exactly once.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  // `done` of `total` prompt tokens are in the state. Called after each prefill chunk.
  virtual void on_prompt_progress(int /*done*/, int /*total*/) {}
  // Returns false to stop here (this token included).
  virtual bool on_token(const TokenEvent& event) = 0;
  virtual void on_finished(const GenerationResult& result) = 0;
};

// A prompt to be read while nothing else is to be done, because a later request is likely to begin with it.
struct PreparationResult {
  int tokens = 0;           // of the prompt
  int known_tokens = 0;     // of those, in the cache before
  int computed_tokens = 0;  // of those, read for it
  int interruptions = 0;    // by requests, after each of which it went on
  double seconds = 0;       // spent on it
};

struct Preparation {
  std::vector<TokenId> tokens;
  // Once, on the engine's thread, when the state is there. Not called when there is nothing to gain, when the request
  // that it was meant for comes first, or when others take its place. Must be quick; may be empty.
  std::function<void(const PreparationResult&)> on_ready;
};

// A submitted request, shared by the engine and its submitter.
class Generation {
 public:
  Generation(GenerationRequest request, std::shared_ptr<GenerationSink> sink)
      : request_(std::move(request)), sink_(std::move(sink)) {}
  const GenerationRequest& request() const { return request_; }
  GenerationSink& sink() { return *sink_; }
  // From any thread, also a signal handler: work stops at the next step or prefill chunk.
  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  const GenerationRequest request_;
  const std::shared_ptr<GenerationSink> sink_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace calla
