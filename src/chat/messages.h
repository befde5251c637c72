#pragma once
// A conversation as the chat format sees it, and how it is read from OpenAI-style JSON.
#include <optional>
#include <string>
#include <vector>

#include "chat/json.h"

namespace calla {

enum class Role { kSystem, kDeveloper, kUser, kAssistant, kTool };

struct ToolCall {
  std::string id;
  std::string name;
  Json arguments = Json::object();  // always an object, in received key order
};

struct Message {
  Role role = Role::kUser;
  std::string content;                   // text parts joined; empty if there was none
  std::optional<std::string> reasoning;  // assistant: `reasoning_content`, if it was sent (it may be empty)
  std::vector<ToolCall> tool_calls;      // assistant
  std::string tool_call_id;              // tool
};

struct ToolDefinition {
  Json raw;  // {"type": "function", "function": {"name", "description", "parameters"}}, printed as received
  std::string name;
  Json parameters;  // the JSON schema of the arguments; null if none was given
};

// Reads `messages` (an array). `field` is its name in error messages. Throws RequestError naming the part
// that cannot be used: an unknown role, a content type other than text, arguments that are no JSON object.
std::vector<Message> parse_messages(const Json& messages, const std::string& field = "messages");

// Reads `tools` (an array, or null for none). Throws RequestError.
std::vector<ToolDefinition> parse_tools(const Json& tools, const std::string& field = "tools");

// A string, null, or a list of text parts, to text. Throws RequestError for other parts, naming them.
std::string parse_text_content(const Json& content, const std::string& field);

// Tool-call arguments: an object, or an object written as a JSON string (the form of the OpenAI API; blank:
// none).
Json parse_arguments(const Json& arguments, const std::string& field);

}  // namespace calla
