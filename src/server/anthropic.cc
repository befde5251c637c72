#include "server/anthropic.h"

#include "base/error.h"

namespace calla::anthropic {
namespace {

std::string place(const std::string& field, size_t index) { return field + "[" + std::to_string(index) + "]"; }

[[noreturn]] void refuse(const std::string& field, const std::string& why) {
  throw RequestError(field + " " + why, field);
}

// The `type` of a content block.
std::string block_type(const Json& block, const std::string& field) {
  return Fields(block, field + ".").string("type").value_or("");
}

[[noreturn]] void refuse_block(const std::string& type, const std::string& field) {
  throw RequestError(field + " is a block of type '" + type.substr(0, 40) +
                         "', but this model is served for text only; send text blocks",
                     field, "unsupported_content");
}

std::string text_of(const Json& block, const std::string& field) {
  const auto text = Fields(block, field + ".").string("text");
  if (!text) refuse(field + ".text", "is missing");
  return *text;
}

// A string, or a list of text blocks.
std::string read_text(const Json& content, const std::string& field) {
  if (content.is_null()) return "";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) refuse(field, "must be a string or a list of blocks");
  std::string text;
  for (size_t i = 0; i < content.size(); i++) {
    const std::string type = block_type(content[i], place(field, i));
    if (type != "text") refuse_block(type, place(field, i));
    text += text_of(content[i], place(field, i));
  }
  return text;
}

// A user message holds text and results of calls; each result becomes a message of its own, in order.
void add_user(const Json& content, const std::string& field, std::vector<Message>& messages) {
  Message text;
  text.role = Role::kUser;
  bool has_text = false, has_result = false;
  const auto flush = [&] {
    if (has_text) messages.push_back(std::exchange(text, {Role::kUser, "", std::nullopt, {}, ""}));
    has_text = false;
  };
  for (size_t i = 0; i < content.size(); i++) {
    const Json& block = content[i];
    const std::string at = place(field, i);
    const std::string type = block_type(block, at);
    if (type == "text") {
      text.content += text_of(block, at);
      has_text = true;
    } else if (type == "tool_result") {
      flush();
      Message result;
      result.role = Role::kTool;
      result.tool_call_id = Fields(block, at + ".").string("tool_use_id").value_or("");
      if (block.contains("content")) result.content = read_text(block["content"], at + ".content");
      messages.push_back(std::move(result));
      has_result = true;
    } else {
      refuse_block(type, at);
    }
  }
  if (!has_text && !has_result) has_text = true;  // an empty message is a message
  flush();
}

void add_assistant(const Json& content, const std::string& field, std::vector<Message>& messages) {
  Message message;
  message.role = Role::kAssistant;
  for (size_t i = 0; i < content.size(); i++) {
    const Json& block = content[i];
    const std::string at = place(field, i);
    const std::string type = block_type(block, at);
    const Fields fields(block, at + ".");
    if (type == "text") {
      message.content += text_of(block, at);
    } else if (type == "thinking") {
      message.reasoning = message.reasoning.value_or("") + fields.string("thinking").value_or("");
    } else if (type == "redacted_thinking") {
      continue;  // not ours, and not readable
    } else if (type == "tool_use") {
      ToolCall call;
      call.id = fields.string("id").value_or("");
      call.name = fields.string("name").value_or("");
      if (call.name.empty()) refuse(at + ".name", "is missing");
      if (const Json* input = fields.find("input")) call.arguments = parse_arguments(*input, at + ".input");
      message.tool_calls.push_back(std::move(call));
    } else {
      refuse_block(type, at);
    }
  }
  messages.push_back(std::move(message));
}

void add_message(const Json& json, const std::string& field, std::vector<Message>& messages) {
  const Fields fields(json, field + ".");
  const std::string role = fields.string("role").value_or("");
  const Json* content = fields.find("content");
  if (!content) refuse(field + ".content", "is missing");
  if (role == "system" || role == "developer") {  // clients send reminders so
    Message message;
    message.role = Role::kSystem;
    message.content = read_text(*content, field + ".content");
    messages.push_back(std::move(message));
    return;
  }
  if (role != "user" && role != "assistant") refuse(field + ".role", "must be user or assistant");
  const Json blocks =
      content->is_string() ? Json::array({{{"type", "text"}, {"text", content->get<std::string>()}}}) : *content;
  if (!blocks.is_array()) refuse(field + ".content", "must be a string or a list of blocks");
  role == "user" ? add_user(blocks, field + ".content", messages) : add_assistant(blocks, field + ".content", messages);
}

// Tools take the form that the model knows.
Json openai_tools(const Json& tools) {
  if (!tools.is_array()) refuse("tools", "must be a list of tools");
  Json result = Json::array();
  for (size_t i = 0; i < tools.size(); i++) {
    const Fields fields(tools[i], place("tools", i) + ".");
    const std::string type = fields.string("type").value_or("custom");
    if (type != "custom") refuse(place("tools", i) + ".type", "must be custom: the server has no tools of its own");
    Json function = {{"name", fields.string("name").value_or("")}};
    if (const auto description = fields.string("description")) function["description"] = *description;
    if (const Json* schema = fields.find("input_schema")) function["parameters"] = *schema;
    result.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return result;
}

void read_tool_choice(const Fields& fields, ChatRequest& request) {
  const auto choice = fields.object("tool_choice");
  if (!choice) return;
  const std::string type = choice->string("type").value_or("");
  if (type == "none") {
    request.tool_choice = ToolChoice::kNone;
  } else if (type == "any") {
    request.tool_choice = ToolChoice::kRequired;
  } else if (type == "tool") {
    request.tool_choice = ToolChoice::kNamed;
    request.tool_name = choice->string("name").value_or("");
  } else if (type != "auto") {
    choice->refuse("type", "must be auto, any, tool or none");
  }
  request.parallel_tool_calls = !choice->boolean("disable_parallel_tool_use").value_or(false);
}

void read_thinking(const Fields& fields, ChatRequest& request) {
  ThinkingSwitch thinking;
  thinking.read(fields);
  if (const auto object = fields.object("thinking")) {
    const std::string type = object->string("type").value_or("");
    if (type != "enabled" && type != "disabled" && type != "adaptive") {
      object->refuse("type", "must be enabled, adaptive or disabled");
    }
    thinking.set("thinking", type != "disabled");
  }
  request.render.enable_thinking = thinking.value();
}

const char* stop_reason(ReplyEnd end) {
  switch (end) {
    case ReplyEnd::kStopString:
      return "stop_sequence";
    case ReplyEnd::kToolCalls:
      return "tool_use";
    case ReplyEnd::kLength:
      return "max_tokens";
    case ReplyEnd::kStop:
    case ReplyEnd::kCancelled:
    case ReplyEnd::kError:
      break;
  }
  return "end_turn";
}

Json stop_sequence(const ReplySummary& summary) {
  return summary.end == ReplyEnd::kStopString ? Json(summary.stop_string) : Json();
}

// input_tokens are those that were computed, as in this API; the cached ones stand apart.
Json usage(const GenerationResult& result) {
  return {{"input_tokens", result.prompt_tokens - result.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", result.cached_tokens},
          {"output_tokens", result.generated_tokens}};
}

std::string event(const Json& json) {
  return sse_event(compact_json(json), json["type"].get_ref<const std::string&>());
}

}  // namespace

ChatRequest parse_messages_request(const Json& body, const SamplingParams& defaults, bool needs_max_tokens) {
  const Fields fields(body);
  ChatRequest request;
  ReplySettings& settings = request.settings;
  settings.model = fields.string("model").value_or("");
  settings.sampling = read_sampling(fields, defaults);
  settings.stop = read_stop_strings(fields, "stop_sequences");
  settings.stream = fields.boolean("stream").value_or(false);
  const auto max_tokens = fields.integer("max_tokens", 1, 1 << 30);
  if (needs_max_tokens && !max_tokens) fields.refuse("max_tokens", "is missing");
  settings.max_tokens = static_cast<int>(max_tokens.value_or(0));

  if (const Json* system = fields.find("system")) {
    Message message;
    message.role = Role::kSystem;
    message.content = read_text(*system, "system");
    request.messages.push_back(std::move(message));
  }
  const Json* messages = fields.find("messages");
  if (!messages || !messages->is_array()) fields.refuse("messages", "must be a list of messages");
  if (messages->size() > kMaxMessages) {
    fields.refuse("messages", "may hold at most " + std::to_string(kMaxMessages) + " messages");
  }
  for (size_t i = 0; i < messages->size(); i++) add_message((*messages)[i], place("messages", i), request.messages);
  if (const Json* tools = fields.find("tools")) request.tools = parse_tools(openai_tools(*tools));
  read_tool_choice(fields, request);
  read_thinking(fields, request);
  settle_tools(request);
  return request;
}

Json message_response(const AnswerHead& head, const CollectedReply& reply) {
  Json content = Json::array();
  if (!reply.reasoning.empty()) {
    content.push_back({{"type", "thinking"}, {"thinking", reply.reasoning}, {"signature", ""}});
  }
  if (!reply.content.empty()) content.push_back({{"type", "text"}, {"text", reply.content}});
  for (const auto& call : reply.calls) {
    content.push_back(
        {{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", parse_json(call.arguments, 1024)}});
  }
  return {{"id", head.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", head.model},
          {"content", std::move(content)},
          {"stop_reason", stop_reason(reply.summary.end)},
          {"stop_sequence", stop_sequence(reply.summary)},
          {"usage", usage(reply.summary.result)}};
}

std::string MessageDialect::begin(int) { return ""; }

// The first event waits for the first news of the engine, so that what fails at once fails as a plain answer.
std::string MessageDialect::start() {
  if (std::exchange(started_, true)) return "";
  GenerationResult so_far;
  so_far.prompt_tokens = prompt_tokens_;  // how many of them are cached is told at the end
  return event({{"type", "message_start"},
                {"message",
                 {{"id", head_.id},
                  {"type", "message"},
                  {"role", "assistant"},
                  {"model", head_.model},
                  {"content", Json::array()},
                  {"stop_reason", nullptr},
                  {"stop_sequence", nullptr},
                  {"usage", usage(so_far)}}}});
}

std::string MessageDialect::open(Block block, Json content) {
  std::string text = close();
  block_ = block;
  index_++;
  return text + event({{"type", "content_block_start"}, {"index", index_}, {"content_block", std::move(content)}});
}

std::string MessageDialect::close() {
  if (block_ == Block::kNone) return "";
  std::string text;
  if (block_ == Block::kThinking) text = delta({{"type", "signature_delta"}, {"signature", ""}});
  block_ = Block::kNone;
  return text + event({{"type", "content_block_stop"}, {"index", index_}});
}

std::string MessageDialect::delta(Json delta) const {
  return event({{"type", "content_block_delta"}, {"index", index_}, {"delta", std::move(delta)}});
}

std::string MessageDialect::update(const ReplyUpdate& update) {
  std::string text = start();
  for (const ReplyEvent& item : update.events) {
    switch (item.kind) {
      case ReplyEvent::Kind::kReasoning:
        if (block_ != Block::kThinking) {
          text += open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
        }
        text += delta({{"type", "thinking_delta"}, {"thinking", item.text}});
        break;
      case ReplyEvent::Kind::kContent:
        if (block_ != Block::kText) text += open(Block::kText, {{"type", "text"}, {"text", ""}});
        text += delta({{"type", "text_delta"}, {"text", item.text}});
        break;
      case ReplyEvent::Kind::kCallStart:
        text += open(Block::kToolUse,
                     {{"type", "tool_use"}, {"id", item.id}, {"name", item.name}, {"input", Json::object()}});
        break;
      case ReplyEvent::Kind::kCallArguments:
        text += delta({{"type", "input_json_delta"}, {"partial_json", item.text}});
        break;
      case ReplyEvent::Kind::kCallEnd:
        text += close();
        break;
    }
  }
  if (update.kind == ReplyUpdate::Kind::kFinished) summary_ = update.summary;
  if (update.kind == ReplyUpdate::Kind::kProgress) text += keep_alive();
  return text;
}

std::string MessageDialect::end() {
  std::string text = start() + close();
  text += event({{"type", "message_delta"},
                 {"delta", {{"stop_reason", stop_reason(summary_.end)}, {"stop_sequence", stop_sequence(summary_)}}},
                 {"usage", usage(summary_.result)}});
  return text + event({{"type", "message_stop"}});
}

std::string MessageDialect::failure(const std::string& message) {
  return event({{"type", "error"}, {"error", {{"type", "api_error"}, {"message", message}}}});
}

// This API's own event for it: unlike a comment, it resets the deadlines of clients.
std::string MessageDialect::keep_alive() { return event({{"type", "ping"}}); }

}  // namespace calla::anthropic
