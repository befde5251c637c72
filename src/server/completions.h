#pragma once
// OpenAI's /v1/completions: continuations of raw prompts. Their text may hold control tokens, unlike messages.
#include <string>
#include <vector>

#include "server/openai.h"
#include "server/sse.h"

namespace calla::openai {

struct CompletionRequest {
  ReplySettings settings;
  std::vector<PromptTokens> prompts;
  bool echo = false;
  std::vector<std::string> prompt_texts;  // for echo
};

CompletionRequest parse_completion_request(const Json& body, const ServedModel& model);

Json completion_response(const AnswerHead& head, const CompletionRequest& request,
                         const std::vector<CollectedReply>& replies);

class CompletionDialect : public ReplyDialect {
 public:
  CompletionDialect(AnswerHead head, const CompletionRequest& request) : head_(std::move(head)), request_(request) {}
  std::string begin(int choices) override;
  std::string update(const ReplyUpdate& update) override;
  std::string end() override;
  std::string failure(const std::string& message) override;

 private:
  Json chunk(int choice, const std::string& text) const;

  const AnswerHead head_;
  const CompletionRequest& request_;
  std::vector<ReplySummary> finished_;  // by choice
};

}  // namespace calla::openai
