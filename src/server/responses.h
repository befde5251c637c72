#pragma once
// OpenAI's /v1/responses, the part that agents use: text, reasoning and function calls, streamed or not, without state
// on the server (previous_response_id is refused; clients send the whole input, as agents do). Pure functions.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/chat_request.h"
#include "server/reply_run.h"
#include "server/sse.h"

namespace calla::responses {

struct ResponseRequest {
  ChatRequest chat;
  Json echoed;  // the request's settings as the response repeats them
};

// Throws RequestError.
ResponseRequest parse_response_request(const Json& body, const SamplingParams& defaults);

struct AnswerHead {
  std::string id;  // without its prefix
  std::string model;
  int64_t created = 0;
};

Json response_json(const AnswerHead& head, const ResponseRequest& request, const CollectedReply& reply);

// The events of one streamed response.
class ResponseDialect : public ReplyDialect {
 public:
  ResponseDialect(AnswerHead head, const ResponseRequest& request) : head_(std::move(head)), request_(request) {}
  std::string begin(int choices) override;
  std::string update(const ReplyUpdate& update) override;
  std::string end() override;
  std::string failure(const std::string& message) override;

 private:
  enum class Item { kNone, kReasoning, kMessage, kCall };

  std::string event(const char* type, const Json& fields);
  std::string open(Item item, const ReplyEvent& event);
  std::string close();
  std::string close_text(const char* kind, const Json& part);

  const AnswerHead head_;
  const ResponseRequest& request_;
  int sequence_ = 0;
  Item item_ = Item::kNone;
  Json open_item_;
  std::string text_;  // of the open item
  bool call_complete_ = false;
  Json output_ = Json::array();
  ReplySummary summary_;
};

}  // namespace calla::responses
