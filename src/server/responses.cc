#include "server/responses.h"

#include <charconv>
#include <string_view>

#include "base/error.h"

namespace calla::responses {
namespace {

std::string place(size_t index) { return "input[" + std::to_string(index) + "]"; }

// Items to messages: an assistant's reasoning, text and calls are items of their own, but one message of a chat.
class InputReader {
 public:
  explicit InputReader(std::vector<Message>& messages) : messages_(messages) {}

  void read(const Json& item, size_t index) {
    const std::string at = place(index);
    const Fields fields(item, at + ".");
    const std::string type = fields.string("type").value_or("message");
    if (type == "message") {
      read_message(fields, at);
    } else if (type == "reasoning") {
      read_reasoning(fields);
    } else if (type == "function_call") {
      ToolCall call;
      call.id = fields.string("call_id").value_or("");
      call.name = fields.string("name").value_or("");
      if (call.name.empty()) fields.refuse("name", "is missing");
      if (const Json* arguments = fields.find("arguments")) {
        call.arguments = parse_arguments(*arguments, at + ".arguments");
      }
      assistant().tool_calls.push_back(std::move(call));
    } else if (type == "function_call_output") {
      flush();
      Message result;
      result.role = Role::kTool;
      result.tool_call_id = fields.string("call_id").value_or("");
      if (const Json* output = fields.find("output")) result.content = parse_text_content(*output, at + ".output");
      messages_.push_back(std::move(result));
    } else {
      fields.refuse("type", "'" + type.substr(0, 40) + "' is not supported");
    }
  }

  void flush() {
    if (has_assistant_) messages_.push_back(std::move(assistant_));
    has_assistant_ = false;
  }

 private:
  Message& assistant() {
    if (!has_assistant_) {
      assistant_ = Message();
      assistant_.role = Role::kAssistant;
    }
    has_assistant_ = true;
    return assistant_;
  }

  void read_message(const Fields& fields, const std::string& at) {
    Json message = {{"role", fields.string("role").value_or("")}};
    if (const Json* content = fields.find("content")) message["content"] = *content;
    Message parsed = read_one(message, at);
    if (parsed.role != Role::kAssistant) {
      flush();
      messages_.push_back(std::move(parsed));
      return;
    }
    if (has_assistant_ && (!assistant_.content.empty() || !assistant_.tool_calls.empty())) flush();
    assistant().content = parsed.content;
  }

  static Message read_one(const Json& message, const std::string& at) {
    try {
      return parse_messages(Json::array({message}), "input").front();
    } catch (const RequestError& error) {  // its place is the only item's
      const auto moved = [&](std::string text) {
        if (const size_t i = text.find("input[0]"); i != std::string::npos) text.replace(i, 8, at);
        return text;
      };
      throw RequestError(moved(error.what()), moved(error.field()), error.code());
    }
  }

  void read_reasoning(const Fields& fields) {
    std::string text;
    for (const char* key : {"content", "summary"}) {
      const Json* parts = fields.find(key);
      if (!text.empty() || !parts || !parts->is_array()) continue;
      for (const Json& part : *parts) {
        if (part.is_object() && part.contains("text") && part["text"].is_string())
          text += part["text"].get<std::string>();
      }
    }
    if (has_assistant_) flush();
    if (!text.empty()) assistant().reasoning = text;
  }

  std::vector<Message>& messages_;
  Message assistant_;
  bool has_assistant_ = false;
};

// Tools of this API are flat; the model knows the nested form.
Json nested_tools(const Json& tools) {
  if (!tools.is_array()) throw RequestError("tools must be a list of tools", "tools");
  Json result = Json::array();
  for (size_t i = 0; i < tools.size(); i++) {
    const std::string at = "tools[" + std::to_string(i) + "]";
    const Fields fields(tools[i], at + ".");
    if (fields.string("type").value_or("") != "function") {
      throw RequestError(at + ".type must be function: the server has no tools of its own", at + ".type");
    }
    if (fields.has("function")) {
      result.push_back(tools[i]);
      continue;
    }
    Json function = tools[i];
    function.erase("type");
    result.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return result;
}

void read_tool_choice(const Fields& fields, ChatRequest& chat) {
  const Json* choice = fields.find("tool_choice");
  if (!choice || *choice == "auto") return;
  if (*choice == "none") {
    chat.tool_choice = ToolChoice::kNone;
  } else if (*choice == "required") {
    chat.tool_choice = ToolChoice::kRequired;
  } else if (choice->is_object() && choice->contains("name") && (*choice)["name"].is_string()) {
    chat.tool_choice = ToolChoice::kNamed;
    chat.tool_name = (*choice)["name"].get<std::string>();
  } else {
    fields.refuse("tool_choice", "must be auto, none, required or name a function");
  }
}

void read_format(const Fields& fields, ReplySettings& settings) {
  const auto text = fields.object("text");
  const auto format = text ? text->object("format") : std::nullopt;
  if (!format) return;
  const std::string type = format->string("type").value_or("");
  if (type == "json_object") {
    settings.format = AnswerFormat::kJsonObject;
  } else if (type == "json_schema") {
    const Json* schema = format->find("schema");
    if (!schema) format->refuse("schema", "is missing");
    settings.format = AnswerFormat::kJsonSchema;
    settings.schema = compact_json(*schema);
    settings.schema_field = "text.format.schema";
  } else if (type != "text") {
    format->refuse("type", "must be text, json_object or json_schema");
  }
}

Json usage(const ReplySummary& summary) {
  const GenerationResult& result = summary.result;
  return {{"input_tokens", result.prompt_tokens},
          {"input_tokens_details", {{"cached_tokens", result.cached_tokens}}},
          {"output_tokens", result.generated_tokens},
          {"output_tokens_details", {{"reasoning_tokens", summary.reasoning_tokens}}},
          {"total_tokens", result.prompt_tokens + result.generated_tokens}};
}

Json reasoning_part(const std::string& text) { return {{"type", "reasoning_text"}, {"text", text}}; }
Json text_part(const std::string& text) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", Json::array()}};
}

Json reasoning_item(const std::string& id) {
  return {{"type", "reasoning"}, {"id", "rs_" + id}, {"summary", Json::array()}, {"content", Json::array()}};
}
Json message_item(const std::string& id) {
  return {{"type", "message"},
          {"id", "msg_" + id},
          {"status", "in_progress"},
          {"role", "assistant"},
          {"content", Json::array()}};
}
Json call_item(const std::string& id, const std::string& call_id, const std::string& name) {
  return {{"type", "function_call"}, {"id", "fc_" + id},       {"call_id", call_id}, {"name", name},
          {"arguments", ""},         {"status", "in_progress"}};
}

Json frame(const AnswerHead& head, const ResponseRequest& request, const char* status, Json output) {
  Json json = {{"id", "resp_" + head.id},
               {"object", "response"},
               {"created_at", head.created},
               {"status", status},
               {"error", nullptr},
               {"incomplete_details", nullptr},
               {"model", head.model},
               {"output", std::move(output)},
               {"previous_response_id", nullptr},
               {"store", false},
               {"truncation", "disabled"},
               {"usage", nullptr}};
  json.update(request.echoed);
  return json;
}

Json finished(const AnswerHead& head, const ResponseRequest& request, const ReplySummary& summary, Json output) {
  const bool cut = summary.end == ReplyEnd::kLength;
  Json json = frame(head, request, cut ? "incomplete" : "completed", std::move(output));
  if (cut) json["incomplete_details"] = {{"reason", "max_output_tokens"}};
  json["usage"] = usage(summary);
  return json;
}

// The shortest decimal that is this float, 0.7: as it is, it would be printed as the double 0.699999988079071.
double shortest(float value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return parse_json(std::string_view(buffer, static_cast<size_t>(end - buffer))).get<double>();
}

std::string item_id(const AnswerHead& head, size_t index) { return head.id + "_" + std::to_string(index); }

}  // namespace

ResponseRequest parse_response_request(const Json& body, const SamplingParams& defaults) {
  const Fields fields(body);
  ResponseRequest request;
  ChatRequest& chat = request.chat;
  ReplySettings& settings = chat.settings;
  for (const char* name : {"previous_response_id", "conversation", "prompt"}) {
    if (fields.has(name))
      fields.refuse(name, "needs state on the server, which it does not keep; send the whole input");
  }
  if (fields.boolean("background").value_or(false)) fields.refuse("background", "is not supported");
  settings.model = fields.string("model").value_or("");
  settings.sampling = read_sampling(fields, defaults);
  settings.stream = fields.boolean("stream").value_or(false);
  settings.max_tokens = static_cast<int>(fields.integer("max_output_tokens", 1, 1 << 30).value_or(0));
  read_format(fields, settings);

  if (const auto instructions = fields.string("instructions")) {
    Message message;
    message.role = Role::kSystem;
    message.content = *instructions;
    chat.messages.push_back(std::move(message));
  }
  const Json* input = fields.find("input");
  if (!input) fields.refuse("input", "is missing");
  InputReader reader(chat.messages);
  if (input->is_string()) {
    reader.read({{"role", "user"}, {"content", *input}}, 0);
  } else if (input->is_array()) {
    if (input->size() > kMaxMessages) {
      fields.refuse("input", "may hold at most " + std::to_string(kMaxMessages) + " items");
    }
    for (size_t i = 0; i < input->size(); i++) reader.read((*input)[i], i);
  } else {
    fields.refuse("input", "must be a string or a list of items");
  }
  reader.flush();

  if (const Json* tools = fields.find("tools")) chat.tools = parse_tools(nested_tools(*tools));
  read_tool_choice(fields, chat);
  chat.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  ThinkingSwitch thinking;
  thinking.read(fields);
  if (const auto reasoning = fields.object("reasoning")) {
    if (const auto effort = reasoning->string("effort")) thinking.read_effort("reasoning.effort", *effort);
  }
  chat.render.enable_thinking = thinking.value();
  settle_tools(chat);

  const auto echo = [&](const char* name, const Json& otherwise) {
    const Json* value = fields.find(name);
    request.echoed[name] = value ? *value : otherwise;
  };
  echo("instructions", nullptr);
  echo("max_output_tokens", nullptr);
  echo("metadata", Json::object());
  echo("parallel_tool_calls", true);
  echo("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  echo("text", {{"format", {{"type", "text"}}}});
  echo("tool_choice", "auto");
  echo("tools", Json::array());
  echo("temperature", shortest(defaults.temperature));
  echo("top_p", shortest(defaults.top_p));
  return request;
}

Json response_json(const AnswerHead& head, const ResponseRequest& request, const CollectedReply& reply) {
  Json output = Json::array();
  if (!reply.reasoning.empty()) {
    output.push_back(reasoning_item(item_id(head, output.size())));
    output.back()["content"].push_back(reasoning_part(reply.reasoning));
  }
  if (!reply.content.empty()) {
    output.push_back(message_item(item_id(head, output.size())));
    output.back()["content"].push_back(text_part(reply.content));
    output.back()["status"] = reply.summary.end == ReplyEnd::kLength ? "incomplete" : "completed";
  }
  for (const auto& call : reply.calls) {
    output.push_back(call_item(item_id(head, output.size()), call.id, call.name));
    output.back()["arguments"] = call.arguments;
    output.back()["status"] = "completed";
  }
  return finished(head, request, reply.summary, std::move(output));
}

std::string ResponseDialect::event(const char* type, const Json& fields) {
  Json json = {{"type", type}, {"sequence_number", sequence_++}};
  json.update(fields);
  return sse_event(compact_json(json), type);
}

std::string ResponseDialect::begin(int) {
  const Json response = frame(head_, request_, "in_progress", Json::array());
  std::string text = event("response.created", {{"response", response}});
  return text += event("response.in_progress", {{"response", response}});
}

std::string ResponseDialect::open(Item item, const ReplyEvent& cause) {
  std::string text = close();
  item_ = item;
  text_.clear();
  call_complete_ = false;
  const std::string id = item_id(head_, output_.size());
  if (item == Item::kReasoning) open_item_ = reasoning_item(id);
  if (item == Item::kMessage) open_item_ = message_item(id);
  if (item == Item::kCall) open_item_ = call_item(id, cause.id, cause.name);
  text += event("response.output_item.added", {{"output_index", output_.size()}, {"item", open_item_}});
  if (item == Item::kCall) return text;
  const Json part = item == Item::kReasoning ? reasoning_part("") : text_part("");
  return text +
         event("response.content_part.added",
               {{"item_id", open_item_["id"]}, {"output_index", output_.size()}, {"content_index", 0}, {"part", part}});
}

// Ends the text of a reasoning or message item.
std::string ResponseDialect::close_text(const char* kind, const Json& part) {
  Json fields = {{"item_id", open_item_["id"]}, {"output_index", output_.size()}, {"content_index", 0}};
  Json with_text = fields;
  with_text["text"] = text_;
  if (item_ == Item::kMessage) with_text["logprobs"] = Json::array();
  fields["part"] = part;
  open_item_["content"].push_back(part);
  std::string text = event(kind, with_text);
  return text += event("response.content_part.done", fields);
}

std::string ResponseDialect::close() {
  std::string text;
  switch (item_) {
    case Item::kNone:
      return "";
    case Item::kReasoning:
      text = close_text("response.reasoning_text.done", reasoning_part(text_));
      break;
    case Item::kMessage:
      open_item_["status"] = "completed";
      text = close_text("response.output_text.done", text_part(text_));
      break;
    case Item::kCall:
      open_item_["arguments"] = text_;
      open_item_["status"] = call_complete_ ? "completed" : "incomplete";
      if (!call_complete_) break;
      text = event("response.function_call_arguments.done", {{"item_id", open_item_["id"]},
                                                             {"output_index", output_.size()},
                                                             {"name", open_item_["name"]},
                                                             {"arguments", text_}});
      break;
  }
  item_ = Item::kNone;
  text += event("response.output_item.done", {{"output_index", output_.size()}, {"item", open_item_}});
  output_.push_back(open_item_);
  return text;
}

std::string ResponseDialect::update(const ReplyUpdate& update) {
  std::string text;
  const auto delta = [&](const char* type, const ReplyEvent& cause, bool has_part) {
    text_ += cause.text;
    Json fields = {{"item_id", open_item_["id"]}, {"output_index", output_.size()}};
    if (has_part) fields["content_index"] = 0;
    fields["delta"] = cause.text;
    if (item_ == Item::kMessage) fields["logprobs"] = Json::array();
    text += event(type, fields);
  };
  for (const ReplyEvent& item : update.events) {
    switch (item.kind) {
      case ReplyEvent::Kind::kReasoning:
        if (item_ != Item::kReasoning) text += open(Item::kReasoning, item);
        delta("response.reasoning_text.delta", item, true);
        break;
      case ReplyEvent::Kind::kContent:
        if (item_ != Item::kMessage) text += open(Item::kMessage, item);
        delta("response.output_text.delta", item, true);
        break;
      case ReplyEvent::Kind::kCallStart:
        text += open(Item::kCall, item);
        break;
      case ReplyEvent::Kind::kCallArguments:
        delta("response.function_call_arguments.delta", item, false);
        break;
      case ReplyEvent::Kind::kCallEnd:
        call_complete_ = true;
        text += close();
        break;
    }
  }
  if (update.kind == ReplyUpdate::Kind::kFinished) summary_ = update.summary;
  return text;
}

std::string ResponseDialect::end() {
  std::string text = close();
  const Json response = finished(head_, request_, summary_, output_);
  const bool cut = summary_.end == ReplyEnd::kLength;
  return text + event(cut ? "response.incomplete" : "response.completed", {{"response", response}});
}

std::string ResponseDialect::failure(const std::string& message) {
  Json response = frame(head_, request_, "failed", output_);
  response["error"] = {{"code", "server_error"}, {"message", message}};
  return event("response.failed", {{"response", response}});
}

}  // namespace calla::responses
