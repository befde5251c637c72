#pragma once
// A request for replies, as all dialects of the API are read into, and what they have in common.
#include <optional>
#include <string>
#include <vector>

#include "backend/sampling.h"
#include "chat/messages.h"
#include "chat/render.h"
#include "server/fields.h"

namespace calla {

enum class ToolChoice { kAuto, kNone, kRequired, kNamed };
enum class AnswerFormat { kText, kJsonObject, kJsonSchema };

// What holds for replies to chats and for continuations of raw prompts.
struct ReplySettings {
  std::string model;  // as the client wrote it; there is one model, so any name will do
  SamplingParams sampling;
  int n = 1;
  int max_tokens = 0;  // 0: until the context is full
  std::vector<std::string> stop;
  int top_logprobs = -1;  // as GenerationRequest
  bool stream = false;
  bool include_usage = false;    // streams: a last chunk with the usage
  bool return_progress = false;  // streams: chunks with the prefill's progress
  AnswerFormat format = AnswerFormat::kText;
  std::string schema;        // kJsonSchema: JSON text
  std::string schema_field;  // where it came from, for errors
  bool cache_prompt = true;
};

struct ChatRequest {
  ReplySettings settings;
  std::vector<Message> messages;
  std::vector<ToolDefinition> tools;
  RenderOptions render;
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string tool_name;  // kNamed
  bool parallel_tool_calls = true;
};

inline constexpr int kMaxChoices = 16;
inline constexpr size_t kMaxMessages = 10'000;
inline constexpr size_t kMaxStopStrings = 16;

// temperature, top_p, top_k, min_p, the penalties and seed over the defaults. Without a seed in the request it is
// drawn.
SamplingParams read_sampling(const Fields& fields, const SamplingParams& defaults);

// `stop` (or another name): a string or a list of strings.
std::vector<std::string> read_stop_strings(const Fields& fields, const char* name);

// Collects the ways in which a request may switch thinking on or off, and refuses those that contradict each other.
class ThinkingSwitch {
 public:
  void set(const std::string& field, bool on);
  // enable_thinking, chat_template_kwargs.enable_thinking and reasoning_effort (`effort_field` names it).
  void read(const Fields& fields);
  void read_effort(const std::string& field, const std::string& effort);
  bool value() const { return on_.value_or(true); }

 private:
  std::optional<bool> on_;
  std::string field_;
};

// Checks what needs all of the request: that a chosen tool exists, that something is asked. With tool_choice none the
// tools are dropped.
void settle_tools(ChatRequest& request);

}  // namespace calla
