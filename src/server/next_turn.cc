#include "server/next_turn.h"

#include "chat/text.h"

namespace calla {

std::vector<TokenId> next_turn_prefix(const ServedModel& model, const ChatRequest& request,
                                      const CollectedReply& reply) {
  const ReplyEnd end = reply.summary.end;
  if (end != ReplyEnd::kStop && end != ReplyEnd::kStopString && end != ReplyEnd::kLength) return {};
  if (!request.settings.cache_prompt || !reply.calls.empty() || strip(reply.content).empty()) return {};
  std::vector<Message> messages = request.messages;
  Message& answer = messages.emplace_back();
  answer.role = Role::kAssistant;
  answer.reasoning = reply.reasoning;
  answer.content = reply.content;
  messages.emplace_back().content = "next";  // any question: reasoning is dropped from what comes before one
  RenderOptions render = request.render;
  render.add_generation_prompt = false;
  PromptTokens prompt =
      encode_prompt(*model.tokenizer, render_prompt(messages, request.tools, render), messages, model.replay);
  prompt.tokens.resize(prompt.boundaries.empty() ? 0 : static_cast<size_t>(prompt.boundaries.back()));
  return std::move(prompt.tokens);
}

}  // namespace calla
