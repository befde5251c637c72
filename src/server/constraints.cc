#include "server/constraints.h"

#include <string_view>
#include <utility>
#include <vector>

#include "grammar/forced_call.h"
#include "grammar/reasoning_gate.h"
#include "grammar/schema.h"
#include "grammar/token_constraint.h"

namespace calla {
namespace {

using Maker = std::function<std::shared_ptr<TokenConstraint>()>;

std::shared_ptr<const Grammar> forced_calls(const ServedModel& model, const ChatRequest& request) {
  std::vector<CallableTool> tools;
  for (const ToolDefinition& tool : request.tools) {
    if (request.tool_choice == ToolChoice::kNamed && tool.name != request.tool_name) continue;
    const Json& body = tool.raw.contains("function") ? tool.raw["function"] : tool.raw;
    const bool strict = body.contains("strict") && body["strict"] == true;
    tools.push_back({tool.name, tool.parameters.is_null() ? "" : compact_json(tool.parameters), strict});
  }
  return forced_call_grammar(tools, *model.trie, {request.parallel_tool_calls});
}

std::shared_ptr<const Grammar> format_grammar(const ReplySettings& settings) {
  switch (settings.format) {
    case AnswerFormat::kText:
      return nullptr;
    case AnswerFormat::kJsonObject:
      return json_object_grammar();
    case AnswerFormat::kJsonSchema:
      return compile_schema(settings.schema, settings.schema_field);
  }
  return nullptr;
}

// Constrains all of the reply, or what follows its open think block.
Maker maker(const ServedModel& model, std::shared_ptr<const Grammar> grammar, bool thinking) {
  if (!grammar) return {};
  return [&model, grammar = std::move(grammar), thinking]() -> std::shared_ptr<TokenConstraint> {
    auto constraint = std::make_unique<GrammarConstraint>(model.trie, grammar, model.stop_tokens);
    if (!thinking) return constraint;
    ReasoningGateOptions options;
    options.keep_thinking_open = true;
    return std::make_shared<ReasoningGate>(model.trie, std::move(constraint), model.stop_tokens, options);
  };
}

}  // namespace

std::shared_ptr<const TokenTrie> make_token_trie(const Tokenizer& tokenizer) {
  std::vector<std::string_view> texts(static_cast<size_t>(tokenizer.vocab_size()));
  std::vector<TokenId> markup;
  for (size_t i = 0; i < texts.size(); i++) {
    const auto id = static_cast<TokenId>(i);
    if (tokenizer.is_special(id)) continue;  // never part of text
    texts[i] = tokenizer.token_bytes(id);
    if (tokenizer.is_added(id)) markup.push_back(id);
  }
  return std::make_shared<TokenTrie>(texts, markup);
}

Maker constraint_maker(const ServedModel& model, const ChatRequest& request) {
  const bool forced = request.tool_choice == ToolChoice::kRequired || request.tool_choice == ToolChoice::kNamed;
  return maker(model, forced ? forced_calls(model, request) : format_grammar(request.settings),
               request.render.enable_thinking);
}

}  // namespace calla
