#include "chat/messages.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "chat/text.h"

namespace calla {
namespace {

std::string element(const std::string& field, size_t index) { return field + "[" + std::to_string(index) + "]"; }

const Json* find(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string string_or_empty(const Json& object, const char* key, const std::string& field) {
  const Json* value = find(object, key);
  if (!value) return "";
  if (!value->is_string()) {
    throw RequestError(field + "." + key + " must be a string, found " + json_type(*value), field + "." + key);
  }
  return value->get<std::string>();
}

Role parse_role(const Json& message, const std::string& field) {
  static constexpr std::array<std::pair<std::string_view, Role>, 5> kRoles = {{{"system", Role::kSystem},
                                                                               {"developer", Role::kDeveloper},
                                                                               {"user", Role::kUser},
                                                                               {"assistant", Role::kAssistant},
                                                                               {"tool", Role::kTool}}};
  const std::string name = string_or_empty(message, "role", field);
  const auto it = std::find_if(kRoles.begin(), kRoles.end(), [&](const auto& role) { return role.first == name; });
  if (it == kRoles.end()) {
    throw RequestError(
        field + ".role must be system, developer, user, assistant or tool, found '" + name.substr(0, 40) + "'",
        field + ".role");
  }
  return it->second;
}

std::string part_text(const Json& part, const std::string& field) {
  const auto refuse = [&](const std::string& what) {
    throw RequestError(field + " is " + what + ", but this model is served for text only; send text parts", field,
                       "unsupported_content");
  };
  if (!part.is_object()) refuse("a bare " + json_type(part));
  const std::string type = string_or_empty(part, "type", field);
  for (const char* key : {"image", "image_url", "video", "video_url", "input_audio", "file"}) {
    if (part.contains(key)) refuse("an '" + (type.empty() ? key : type.substr(0, 40)) + "' part");
  }
  const bool is_text = type.empty() || type == "text" || type == "input_text" || type == "output_text";
  if (is_text && part.contains("text")) return string_or_empty(part, "text", field);
  if (type == "refusal" && part.contains("refusal")) return string_or_empty(part, "refusal", field);
  refuse(type.empty() ? "a part without text" : "a '" + type.substr(0, 40) + "' part");
  return "";
}

ToolCall parse_tool_call(const Json& call, const std::string& field) {
  if (!call.is_object()) throw RequestError(field + " must be an object", field);
  const Json* function = find(call, "function");
  const std::string place = function ? field + ".function" : field;
  const Json& body = function ? *function : call;
  if (!body.is_object()) throw RequestError(place + " must be an object", place);
  ToolCall result;
  result.id = string_or_empty(call, "id", field);
  result.name = string_or_empty(body, "name", place);
  if (result.name.empty()) throw RequestError(place + ".name is missing", place + ".name");
  if (const Json* arguments = find(body, "arguments")) {
    result.arguments = parse_arguments(*arguments, place + ".arguments");
  }
  return result;
}

Message parse_message(const Json& json, const std::string& field) {
  if (!json.is_object()) throw RequestError(field + " must be an object", field);
  Message message;
  message.role = parse_role(json, field);
  if (const Json* content = find(json, "content")) {
    message.content = parse_text_content(*content, field + ".content");
  }
  if (message.role == Role::kAssistant) {
    for (const char* key : {"reasoning_content", "reasoning"}) {
      const Json* reasoning = find(json, key);
      if (reasoning && reasoning->is_string()) {
        message.reasoning = reasoning->get<std::string>();
        break;
      }
    }
    if (const Json* calls = find(json, "tool_calls")) {
      if (!calls->is_array()) throw RequestError(field + ".tool_calls must be a list", field + ".tool_calls");
      for (size_t i = 0; i < calls->size(); i++) {
        message.tool_calls.push_back(parse_tool_call((*calls)[i], element(field + ".tool_calls", i)));
      }
    }
  }
  if (message.role == Role::kTool) message.tool_call_id = string_or_empty(json, "tool_call_id", field);
  return message;
}

}  // namespace

std::string parse_text_content(const Json& content, const std::string& field) {
  if (content.is_null()) return "";
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    throw RequestError(field + " must be a string or a list of parts, found " + json_type(content), field);
  }
  std::string text;
  for (size_t i = 0; i < content.size(); i++) text += part_text(content[i], element(field, i));
  return text;
}

Json parse_arguments(const Json& arguments, const std::string& field) {
  Json value = arguments;
  if (arguments.is_string()) {
    const std::string_view text = strip(arguments.get_ref<const std::string&>());
    if (text.empty()) return Json::object();
    value = try_parse_json(text);
  }
  if (!value.is_object()) {
    throw RequestError(field + " must be a JSON object, or a string that holds one", field);
  }
  return value;
}

std::vector<Message> parse_messages(const Json& messages, const std::string& field) {
  if (!messages.is_array()) throw RequestError(field + " must be a list of messages", field);
  std::vector<Message> result;
  result.reserve(messages.size());
  for (size_t i = 0; i < messages.size(); i++) result.push_back(parse_message(messages[i], element(field, i)));
  return result;
}

std::vector<ToolDefinition> parse_tools(const Json& tools, const std::string& field) {
  std::vector<ToolDefinition> result;
  if (tools.is_null()) return result;
  if (!tools.is_array()) throw RequestError(field + " must be a list of tools", field);
  for (size_t i = 0; i < tools.size(); i++) {
    const std::string place = element(field, i);
    if (!tools[i].is_object()) throw RequestError(place + " must be an object", place);
    const std::string type = string_or_empty(tools[i], "type", place);
    if (!type.empty() && type != "function") {
      throw RequestError(place + ".type must be 'function', found '" + type.substr(0, 40) + "'", place + ".type");
    }
    const Json* function = find(tools[i], "function");
    const Json& body = function ? *function : tools[i];
    if (!body.is_object()) throw RequestError(place + ".function must be an object", place + ".function");
    ToolDefinition tool;
    tool.raw = tools[i];
    tool.name = string_or_empty(body, "name", place + ".function");
    if (tool.name.empty()) throw RequestError(place + ".function.name is missing", place + ".function.name");
    if (const Json* parameters = find(body, "parameters")) tool.parameters = *parameters;
    result.push_back(std::move(tool));
  }
  return result;
}

}  // namespace calla
