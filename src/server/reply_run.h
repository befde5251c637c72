#pragma once
// ReplyRun: the replies to one HTTP request, from submitting them to the engine until the last is finished. The
// engine's thread turns tokens into events (chat/reply.h); the request's thread waits for them here.
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chat/reply.h"
#include "engine/generation.h"
#include "server/chat_request.h"
#include "server/service.h"

namespace calla {

enum class ReplyEnd {
  kStop,        // the model ended its turn
  kStopString,  // ReplySummary::stop_string
  kToolCalls,   // ditto, with at least one complete call
  kLength,      // max_tokens or the context
  kCancelled,   // the server shuts down
  kError,       // the engine failed: GenerationResult::error
};

struct TokenLogprobs {
  std::string bytes;  // of the token
  float logprob = 0;
  std::vector<std::pair<std::string, float>> top;
};

struct ReplySummary {
  ReplyEnd end = ReplyEnd::kStop;
  std::string stop_string;
  GenerationResult result;
  int reasoning_tokens = 0;
  std::vector<TokenId> tokens;  // of the reply, the one that ended it included
};

struct ReplyUpdate {
  enum class Kind { kProgress, kEvents, kFinished };
  Kind kind = Kind::kEvents;
  int choice = 0;
  int done = 0, total = 0;  // kProgress: prompt tokens
  std::vector<ReplyEvent> events;
  std::vector<TokenLogprobs> logprobs;  // of the content's tokens, if asked for
  ReplySummary summary;                 // kFinished
};

// A reply put together.
struct CollectedReply {
  std::string reasoning;
  std::string content;
  struct Call {
    std::string id, name, arguments;
    bool complete = false;
  };
  std::vector<Call> calls;
  std::vector<TokenLogprobs> logprobs;
  ReplySummary summary;

  void add(const ReplyUpdate& update);
  void drop_unfinished_calls();  // a call that was cut off must not be executed
};

// What the replies are to be.
struct ReplyPlan {
  std::vector<PromptTokens> prompts;  // each gets settings.n replies
  ReplyOptions reply;
  bool parallel_tool_calls = true;                                    // false: a reply ends with its first call
  std::function<std::shared_ptr<TokenConstraint>()> make_constraint;  // empty: none
  std::vector<TokenId> turn_start;  // a chat's: the prompt's tokens from the think block on, for the ReplayStore
};

class ReplyRun {
 public:
  // Submits the first reply; throws what the engine throws (RequestError), with nothing left behind. Further replies to
  // the same prompt start once its first token shows that the prompt is in the prefix cache.
  ReplyRun(const ServedModel& model, const ReplySettings& settings, ReplyPlan plan);
  // Cancels what is not finished.
  ~ReplyRun();
  ReplyRun(const ReplyRun&) = delete;
  ReplyRun& operator=(const ReplyRun&) = delete;

  int choices() const { return static_cast<int>(choices_.size()); }
  // Of the first prompt.
  int prompt_tokens() const { return static_cast<int>(choices_[0].generation->request().prompt.size()); }
  bool finished() const { return n_finished_ == choices(); }
  // Of a chat: the reply, once it is finished, if there is only one.
  const CollectedReply* only_reply() const {
    return finished() && choices() == 1 && !turn_start_.empty() ? &choices_[0].reply : nullptr;
  }
  // The next update, or nothing within this time.
  std::optional<ReplyUpdate> wait(std::chrono::milliseconds time);
  void cancel();

 private:
  struct Queue;
  class Sink;
  struct Choice {
    std::shared_ptr<Generation> generation;
    bool submitted = false;
    bool started = false;  // its first token or its end has come
    CollectedReply reply;  // so far, if this is a chat
  };

  void submit_waiting();
  void remember(Choice& choice);

  const int n_;
  const ServedModel& model_;
  const std::vector<TokenId> turn_start_;
  std::shared_ptr<Queue> queue_;
  std::vector<Choice> choices_;  // prompt by prompt
  int n_finished_ = 0;
};

// Renders and encodes the conversation, and starts its replies.
std::unique_ptr<ReplyRun> start_chat(const ServedModel& model, const ChatRequest& request);
// The conversation's prompt alone.
PromptTokens chat_prompt(const ServedModel& model, const ChatRequest& request);

}  // namespace calla
