#pragma once
// OpenAI's chat completions: their JSON to ChatRequest, and replies to their JSON. Pure functions.
// Beyond OpenAI's fields: top_k, min_p, repetition_penalty, enable_thinking, chat_template_kwargs (enable_thinking,
// preserve_thinking), reasoning_content in messages, cache_prompt and return_progress; in answers reasoning_content,
// timings (as llama.cpp's server has them) and the seed that was used.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/chat_request.h"
#include "server/reply_run.h"
#include "server/sse.h"

namespace calla::openai {

// Throws RequestError.
ChatRequest parse_chat_request(const Json& body, const SamplingParams& defaults);
// The fields that chat completions and completions share.
ReplySettings parse_settings(const Fields& fields, const SamplingParams& defaults);

// The common head of all JSON of one answer.
struct AnswerHead {
  std::string id;
  std::string model;
  int64_t created = 0;
};

Json chat_response(const AnswerHead& head, const ReplySettings& settings, const std::vector<CollectedReply>& replies);

const char* finish_reason(ReplyEnd end);
// Of all replies, in the order of the choices; each prompt has n and counts once, as its first reply read it. Both count
// the same tokens: prompt_tokens = cache_n + prompt_n, completion_tokens = predicted_n.
Json usage(const std::vector<ReplySummary>& replies, int n);
Json timings(const std::vector<ReplySummary>& replies, int n);

// {"error": {...}}
Json error(const std::string& message, const std::string& type, const std::string& field = "",
           const std::string& code = "");

// The events of a streamed chat completion.
class ChatDialect : public ReplyDialect {
 public:
  ChatDialect(AnswerHead head, const ReplySettings& settings) : head_(std::move(head)), settings_(settings) {}
  std::string begin(int choices) override;
  std::string update(const ReplyUpdate& update) override;
  std::string end() override;
  std::string failure(const std::string& message) override;

 private:
  Json chunk(int choice, Json delta) const;

  const AnswerHead head_;
  const ReplySettings& settings_;
  std::vector<ReplySummary> finished_;  // by choice
};

}  // namespace calla::openai
