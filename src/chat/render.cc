#include "chat/render.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "chat/text.h"

namespace calla {
namespace {

constexpr std::string_view kToolsHead = "# Tools\n\nYou have access to the following functions:\n\n<tools>";

constexpr std::string_view kToolsTail =
    "\n</tools>\n\n"
    "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple "
    "lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n"
    "<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be "
    "nested "
    "within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function "
    "call, but "
    "NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge "
    "and do "
    "not tell the user about function calls\n"
    "</IMPORTANT>";

constexpr std::string_view kTurnEnd = "<|im_end|>\n";

bool is_system(const Message& message) { return message.role == Role::kSystem || message.role == Role::kDeveloper; }

// A user message that is nothing but a tool's answer asks nothing.
bool is_query(const Message& message) {
  if (message.role != Role::kUser) return false;
  const std::string_view content = strip(message.content);
  return !(content.starts_with("<tool_response>") && content.ends_with("</tool_response>"));
}

class Renderer {
 public:
  Renderer(std::span<const Message> messages, std::span<const ToolDefinition> tools, const RenderOptions& options)
      : messages_(messages), tools_(tools), options_(options) {}

  Prompt render() {
    if (messages_.empty()) throw RequestError("messages is empty; send at least one user message", "messages");
    find_last_query();
    const size_t n_leading = system_turn();
    for (size_t i = n_leading; i < messages_.size(); i++) message(i);
    if (options_.add_generation_prompt) {
      written(options_.enable_thinking ? "<|im_start|>assistant\n<think>\n"
                                       : "<|im_start|>assistant\n<think>\n\n</think>\n\n");
      prompt_.starts_in_thinking = options_.enable_thinking;
    }
    return std::move(prompt_);
  }

 private:
  void find_last_query() {
    const auto last = std::find_if(messages_.rbegin(), messages_.rend(), is_query);
    if (last == messages_.rend()) {
      throw RequestError("messages holds no user message to answer (only system, assistant or tool messages); add one",
                         "messages", "no_user_message");
    }
    last_query_ = static_cast<size_t>(messages_.rend() - last) - 1;
  }

  // The tools and the leading system messages. Returns how many messages that used up.
  size_t system_turn() {
    size_t n_leading = 0;
    std::string text;
    for (; n_leading < messages_.size() && is_system(messages_[n_leading]); n_leading++) {
      const std::string_view content = strip(messages_[n_leading].content);
      if (content.empty()) continue;
      if (!text.empty()) text += "\n\n";
      text += content;
    }
    if (tools_.empty() && n_leading == 0) return 0;

    written("<|im_start|>system\n");
    if (!tools_.empty()) {
      written(kToolsHead);
      for (const ToolDefinition& tool : tools_) {
        written("\n");
        received(python_json(tool.raw));
      }
      written(kToolsTail);
      if (!text.empty()) written("\n\n");
    }
    received(text);
    end_turn();
    return n_leading;
  }

  void message(size_t index) {
    const Message& message = messages_[index];
    switch (message.role) {
      case Role::kSystem:
      case Role::kDeveloper:
        text_turn("<|im_start|>system\n", message);
        return;
      case Role::kUser:
        text_turn("<|im_start|>user\n", message);
        return;
      case Role::kAssistant:
        assistant_turn(index);
        return;
      case Role::kTool:
        tool_result(index);
        return;
    }
  }

  void text_turn(std::string_view head, const Message& message) {
    written(head);
    received(strip(message.content));
    end_turn();
  }

  void assistant_turn(size_t index) {
    const Message& message = messages_[index];
    const auto [reasoning, content] = split_assistant_text(message);
    written("<|im_start|>assistant\n");
    const bool keeps_thinking = options_.preserve_thinking || index > last_query_;
    const size_t begin = cut();
    if (keeps_thinking) {
      written("<think>\n");
      received(reasoning);
      written("\n</think>\n\n");
    }
    received(content);
    for (size_t i = 0; i < message.tool_calls.size(); i++) {
      if (i > 0) {
        written("\n");
      } else if (!strip(content).empty()) {
        written("\n\n");
      }
      tool_call(message.tool_calls[i]);
    }
    if (keeps_thinking) prompt_.replies.push_back({begin, cut(), index});
    end_turn();
  }

  void tool_call(const ToolCall& call) {
    written("<tool_call>\n<function=");
    received(call.name);
    written(">\n");
    for (const auto& [name, value] : call.arguments.items()) {
      written("<parameter=");
      received(name);
      written(">\n");
      received(value.is_string() ? value.get_ref<const std::string&>() : python_json(value));
      written("\n</parameter>\n");
    }
    written("</function>\n</tool_call>");
  }

  // Neighbouring tool results share one user turn.
  void tool_result(size_t index) {
    const auto is_tool = [&](size_t i) { return messages_[i].role == Role::kTool; };
    if (index > 0 && !is_tool(index - 1)) written("<|im_start|>user");
    written("\n<tool_response>\n");
    received(strip(messages_[index].content));
    written("\n</tool_response>");
    if (index + 1 == messages_.size() || !is_tool(index + 1)) end_turn();
  }

  void end_turn() {
    written(kTurnEnd);
    prompt_.boundaries.push_back(cut());
  }

  void written(std::string_view text) { append(text, true); }
  void received(std::string_view text) { append(text, false); }

  // What comes next begins a new piece; returns its index.
  size_t cut() { return cut_ = prompt_.pieces.size(); }

  // Appends to the last piece if it is of the same kind.
  void append(std::string_view text, bool trusted) {
    if (text.empty()) return;
    auto& pieces = prompt_.pieces;
    if (pieces.size() == cut_ || pieces.back().trusted != trusted) pieces.push_back({"", trusted});
    pieces.back().text += text;
  }

  const std::span<const Message> messages_;
  const std::span<const ToolDefinition> tools_;
  const RenderOptions& options_;
  size_t last_query_ = 0;
  size_t cut_ = 0;  // index of a piece that must be a new one
  Prompt prompt_;
};

}  // namespace

std::string Prompt::text() const {
  std::string all;
  for (const PromptPiece& piece : pieces) all += piece.text;
  return all;
}

AssistantText split_assistant_text(const Message& message) {
  constexpr std::string_view kOpen = "<think>";
  constexpr std::string_view kClose = "</think>";
  const std::string_view content = strip(message.content);
  if (message.reasoning) return {strip(*message.reasoning), content};
  const size_t close = content.find(kClose);
  if (close == std::string_view::npos) return {"", content};
  std::string_view reasoning = strip_trailing_newlines(content.substr(0, close));
  if (const size_t open = reasoning.rfind(kOpen); open != std::string_view::npos) {
    reasoning = reasoning.substr(open + kOpen.size());
  }
  return {strip(reasoning), strip_leading_newlines(content.substr(content.rfind(kClose) + kClose.size()))};
}

Prompt render_prompt(std::span<const Message> messages, std::span<const ToolDefinition> tools,
                     const RenderOptions& options) {
  return Renderer(messages, tools, options).render();
}

}  // namespace calla
