#pragma once
// Anthropic's /v1/messages: its JSON to ChatRequest, and replies to its JSON and events. Pure functions.
#include <string>
#include <utility>
#include <vector>

#include "server/chat_request.h"
#include "server/reply_run.h"
#include "server/sse.h"

namespace calla::anthropic {

// Throws RequestError. `needs_max_tokens`: false for count_tokens.
ChatRequest parse_messages_request(const Json& body, const SamplingParams& defaults, bool needs_max_tokens = true);

struct AnswerHead {
  std::string id;
  std::string model;
};

Json message_response(const AnswerHead& head, const CollectedReply& reply);

// The events of one streamed message.
class MessageDialect : public ReplyDialect {
 public:
  MessageDialect(AnswerHead head, int prompt_tokens) : head_(std::move(head)), prompt_tokens_(prompt_tokens) {}
  std::string begin(int choices) override;
  std::string update(const ReplyUpdate& update) override;
  std::string end() override;
  std::string failure(const std::string& message) override;
  std::string keep_alive() override;

 private:
  enum class Block { kNone, kThinking, kText, kToolUse };

  std::string open(Block block, Json content);
  std::string close();
  std::string delta(Json delta) const;
  std::string start();

  const AnswerHead head_;
  const int prompt_tokens_;
  bool started_ = false;
  Block block_ = Block::kNone;
  int index_ = -1;
  ReplySummary summary_;
};

}  // namespace calla::anthropic
