#include "server/openai.h"

#include <utility>

#include "base/error.h"
#include "tokenizer/utf8.h"

namespace calla::openai {
namespace {

constexpr int kMaxTokensLimit = 1 << 30;

void refuse_unsupported(const Fields& fields) {
  for (const char* name : {"functions", "function_call"}) {
    if (fields.has(name)) fields.refuse(name, "is the old form; send tools and tool_choice");
  }
  if (const Json* bias = fields.find("logit_bias"); bias && !bias->empty()) {
    fields.refuse("logit_bias", "is not supported by this server");
  }
  for (const char* name : {"audio", "web_search_options"}) {
    if (fields.has(name)) fields.refuse(name, "is not supported by this server");
  }
  if (const Json* modalities = fields.find("modalities"); modalities && *modalities != Json::array({"text"})) {
    fields.refuse("modalities", "may hold text alone");
  }
}

void read_format(const Fields& fields, ReplySettings& settings) {
  const auto format = fields.object("response_format");
  if (!format) return;
  const std::string type = format->string("type").value_or("");
  if (type == "json_object") {
    settings.format = AnswerFormat::kJsonObject;
  } else if (type == "json_schema") {
    const auto holder = format->object("json_schema");
    const Json* schema = holder ? holder->find("schema") : format->find("schema");
    if (!schema) format->refuse("json_schema", "has no schema");
    settings.format = AnswerFormat::kJsonSchema;
    settings.schema = compact_json(*schema);
    settings.schema_field = "response_format.json_schema.schema";
  } else if (type != "text") {
    format->refuse("type", "must be text, json_object or json_schema, found '" + type.substr(0, 40) + "'");
  }
}

void read_tool_choice(const Fields& fields, ChatRequest& request) {
  const Json* choice = fields.find("tool_choice");
  if (!choice) return;
  if (*choice == "auto") return;
  if (*choice == "none") {
    request.tool_choice = ToolChoice::kNone;
  } else if (*choice == "required") {
    request.tool_choice = ToolChoice::kRequired;
  } else if (choice->is_object()) {
    const Fields object(*choice, "tool_choice.");
    const auto function = object.object("function");
    const auto name = function ? function->string("name") : object.string("name");
    if (!name) object.refuse("function.name", "is missing");
    request.tool_choice = ToolChoice::kNamed;
    request.tool_name = *name;
  } else {
    fields.refuse("tool_choice", "must be auto, none, required or name a function");
  }
}

Json token_json(const std::string& bytes, float logprob) {
  Json list = Json::array();
  for (const char byte : bytes) list.push_back(static_cast<unsigned char>(byte));
  return {{"token", repair_utf8(bytes)}, {"logprob", logprob}, {"bytes", std::move(list)}};
}

Json logprobs_json(const std::vector<TokenLogprobs>& tokens) {
  Json content = Json::array();
  for (const TokenLogprobs& token : tokens) {
    Json entry = token_json(token.bytes, token.logprob);
    entry["top_logprobs"] = Json::array();
    for (const auto& [bytes, logprob] : token.top) entry["top_logprobs"].push_back(token_json(bytes, logprob));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

Json message_json(const CollectedReply& reply) {
  Json message = {{"role", "assistant"}, {"content", reply.content}};
  if (reply.content.empty() && !reply.calls.empty()) message["content"] = nullptr;
  if (!reply.reasoning.empty()) message["reasoning_content"] = reply.reasoning;
  message["refusal"] = nullptr;
  for (const auto& call : reply.calls) {
    message["tool_calls"].push_back(
        {{"id", call.id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  }
  return message;
}

Json delta_json(const ReplyEvent& event) {
  switch (event.kind) {
    case ReplyEvent::Kind::kReasoning:
      return {{"reasoning_content", event.text}};
    case ReplyEvent::Kind::kContent:
      return {{"content", event.text}};
    case ReplyEvent::Kind::kCallStart: {
      const Json call = {{"index", event.call},
                         {"id", event.id},
                         {"type", "function"},
                         {"function", {{"name", event.name}, {"arguments", ""}}}};
      return {{"tool_calls", Json::array({call})}};
    }
    case ReplyEvent::Kind::kCallArguments: {
      const Json call = {{"index", event.call}, {"function", {{"arguments", event.text}}}};
      return {{"tool_calls", Json::array({call})}};
    }
    case ReplyEvent::Kind::kCallEnd:
      break;
  }
  return nullptr;
}

}  // namespace

ReplySettings parse_settings(const Fields& fields, const SamplingParams& defaults) {
  ReplySettings settings;
  settings.model = fields.string("model").value_or("");
  settings.sampling = read_sampling(fields, defaults);
  settings.n = static_cast<int>(fields.integer("n", 1, kMaxChoices).value_or(1));
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {  // the newer name counts
    if (const auto value = fields.integer(name, 1, kMaxTokensLimit)) settings.max_tokens = static_cast<int>(*value);
  }
  settings.stop = read_stop_strings(fields, "stop");
  settings.stream = fields.boolean("stream").value_or(false);
  if (const auto options = fields.object("stream_options")) {
    if (!settings.stream) fields.refuse("stream_options", "is allowed only with stream: true");
    settings.include_usage = options->boolean("include_usage").value_or(false);
  }
  settings.return_progress = fields.boolean("return_progress").value_or(false);
  settings.cache_prompt = fields.boolean("cache_prompt").value_or(true);
  return settings;
}

ChatRequest parse_chat_request(const Json& body, const SamplingParams& defaults) {
  const Fields fields(body);
  refuse_unsupported(fields);
  ChatRequest request;
  request.settings = parse_settings(fields, defaults);
  read_format(fields, request.settings);

  const auto top = fields.integer("top_logprobs", 0, 20);
  if (fields.boolean("logprobs").value_or(false)) {
    request.settings.top_logprobs = static_cast<int>(top.value_or(0));
  } else if (top.value_or(0) > 0) {
    fields.refuse("top_logprobs", "needs logprobs: true");
  }

  const Json* messages = fields.find("messages");
  if (!messages) fields.refuse("messages", "is missing");
  if (messages->is_array() && messages->size() > kMaxMessages) {
    fields.refuse("messages", "may hold at most " + std::to_string(kMaxMessages) + " messages");
  }
  request.messages = parse_messages(*messages);
  if (const Json* tools = fields.find("tools")) request.tools = parse_tools(*tools);
  read_tool_choice(fields, request);
  request.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);

  ThinkingSwitch thinking;
  thinking.read(fields);
  request.render.enable_thinking = thinking.value();
  request.render.preserve_thinking = fields.boolean("preserve_thinking").value_or(false);
  if (const auto kwargs = fields.object("chat_template_kwargs")) {
    if (const auto preserve = kwargs->boolean("preserve_thinking")) request.render.preserve_thinking = *preserve;
  }
  settle_tools(request);
  return request;
}

const char* finish_reason(ReplyEnd end) {
  switch (end) {
    case ReplyEnd::kToolCalls:
      return "tool_calls";
    case ReplyEnd::kLength:
      return "length";
    case ReplyEnd::kStop:
    case ReplyEnd::kStopString:
    case ReplyEnd::kCancelled:
    case ReplyEnd::kError:
      break;
  }
  return "stop";
}

Json usage(const std::vector<ReplySummary>& replies, int n) {
  int prompt = 0, cached = 0, completion = 0, reasoning = 0;
  for (size_t i = 0; i < replies.size(); i++) {
    const ReplySummary& reply = replies[i];
    if (i % static_cast<size_t>(n) == 0) {
      prompt += reply.result.prompt_tokens;
      cached += reply.result.cached_tokens;
    }
    completion += reply.result.generated_tokens;
    reasoning += reply.reasoning_tokens;
  }
  return {{"prompt_tokens", prompt},
          {"completion_tokens", completion},
          {"total_tokens", prompt + completion},
          {"prompt_tokens_details", {{"cached_tokens", cached}}},
          {"completion_tokens_details", {{"reasoning_tokens", reasoning}}}};
}

Json timings(const std::vector<ReplySummary>& replies, int n) {
  int cached = 0, prompt = 0, predicted = 0;
  double prompt_ms = 0, predicted_ms = 0;
  for (size_t i = 0; i < replies.size(); i++) {
    const ReplySummary& reply = replies[i];
    if (i % static_cast<size_t>(n) == 0) {
      cached += reply.result.cached_tokens;
      prompt += reply.result.prompt_tokens - reply.result.cached_tokens;
      prompt_ms += reply.result.prefill_seconds * 1e3;
    }
    predicted += reply.result.generated_tokens;
    predicted_ms += reply.result.decode_seconds * 1e3;
  }
  const auto ratio = [](double a, double b) { return b > 0 ? a / b : 0.0; };
  return {{"cache_n", cached},
          {"prompt_n", prompt},
          {"prompt_ms", prompt_ms},
          {"prompt_per_token_ms", ratio(prompt_ms, prompt)},
          {"prompt_per_second", ratio(prompt * 1e3, prompt_ms)},
          {"predicted_n", predicted},
          {"predicted_ms", predicted_ms},
          {"predicted_per_token_ms", ratio(predicted_ms, predicted)},
          {"predicted_per_second", ratio(predicted * 1e3, predicted_ms)}};
}

Json error(const std::string& message, const std::string& type, const std::string& field, const std::string& code) {
  Json body = {{"message", message}, {"type", type}, {"param", nullptr}, {"code", nullptr}};
  if (!field.empty()) body["param"] = field;
  if (!code.empty()) body["code"] = code;
  return {{"error", std::move(body)}};
}

Json chat_response(const AnswerHead& head, const ReplySettings& settings, const std::vector<CollectedReply>& replies) {
  Json choices = Json::array();
  std::vector<ReplySummary> summaries;
  for (const CollectedReply& reply : replies) {
    choices.push_back({{"index", choices.size()},
                       {"message", message_json(reply)},
                       {"logprobs", settings.top_logprobs >= 0 ? logprobs_json(reply.logprobs) : Json()},
                       {"finish_reason", finish_reason(reply.summary.end)}});
    summaries.push_back(reply.summary);
  }
  return {{"id", head.id},
          {"object", "chat.completion"},
          {"created", head.created},
          {"model", head.model},
          {"choices", std::move(choices)},
          {"usage", usage(summaries, settings.n)},
          {"timings", timings(summaries, settings.n)},
          {"seed", settings.sampling.seed}};
}

Json ChatDialect::chunk(int choice, Json delta) const {
  Json result = {
      {"id", head_.id}, {"object", "chat.completion.chunk"}, {"created", head_.created}, {"model", head_.model}};
  result["choices"] = Json::array();
  if (choice >= 0) {
    result["choices"].push_back(
        {{"index", choice}, {"delta", std::move(delta)}, {"logprobs", nullptr}, {"finish_reason", nullptr}});
  }
  if (settings_.include_usage) result["usage"] = nullptr;
  return result;
}

std::string ChatDialect::begin(int choices) {
  finished_.resize(static_cast<size_t>(choices));
  std::string text;
  for (int i = 0; i < choices; i++) {
    text += sse_event(compact_json(chunk(i, {{"role", "assistant"}, {"content", ""}})));
  }
  return text;
}

std::string ChatDialect::update(const ReplyUpdate& update) {
  std::vector<Json> chunks;
  if (update.kind == ReplyUpdate::Kind::kProgress && settings_.return_progress) {
    chunks.push_back(chunk(update.choice, Json::object()));
    chunks.back()["prompt_progress"] = {{"total", update.total}, {"processed", update.done}};
  }
  for (const ReplyEvent& event : update.events) {
    if (Json delta = delta_json(event); !delta.is_null()) chunks.push_back(chunk(update.choice, std::move(delta)));
  }
  if (!update.logprobs.empty()) {
    if (chunks.empty()) chunks.push_back(chunk(update.choice, Json::object()));
    chunks.front()["choices"][0]["logprobs"] = logprobs_json(update.logprobs);
  }
  if (update.kind == ReplyUpdate::Kind::kFinished) {
    finished_[static_cast<size_t>(update.choice)] = update.summary;
    chunks.push_back(chunk(update.choice, Json::object()));
    chunks.back()["choices"][0]["finish_reason"] = finish_reason(update.summary.end);
    chunks.back()["timings"] = timings({update.summary}, 1);
    chunks.back()["seed"] = settings_.sampling.seed;
  }
  std::string text;
  for (const Json& json : chunks) text += sse_event(compact_json(json));
  return text;
}

std::string ChatDialect::end() {
  std::string text;
  if (settings_.include_usage) {
    Json last = chunk(-1, nullptr);
    last["usage"] = usage(finished_, settings_.n);
    last["timings"] = timings(finished_, settings_.n);
    text += sse_event(compact_json(last));
  }
  return text + sse_event("[DONE]");
}

std::string ChatDialect::failure(const std::string& message) {
  return sse_event(compact_json(error(message, "server_error")));
}

}  // namespace calla::openai
