#include "server/chat_request.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/error.h"

namespace calla {

SamplingParams read_sampling(const Fields& fields, const SamplingParams& defaults) {
  SamplingParams params = defaults;
  const auto set = [&](float& param, const char* name, double min, double max) {
    if (const auto value = fields.number(name, min, max)) param = static_cast<float>(*value);
  };
  set(params.temperature, "temperature", 0, 2);
  set(params.top_p, "top_p", 0, 1);
  set(params.min_p, "min_p", 0, 1);
  set(params.presence_penalty, "presence_penalty", -2, 2);
  set(params.frequency_penalty, "frequency_penalty", -2, 2);
  set(params.repetition_penalty, "repetition_penalty", 0.01, 10);
  params.top_p = std::max(params.top_p, 1e-6f);            // 0 asks for the best token alone
  params.min_p = std::min(params.min_p, 1 - 1.0f / 4096);  // so does 1
  if (const auto top_k = fields.integer("top_k", -1, 1 << 20))
    params.top_k = static_cast<int>(std::max<int64_t>(*top_k, 0));
  if (const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX)) {
    params.seed = static_cast<uint64_t>(*seed);
  } else {
    params.seed = std::random_device()();  // 32 bits: every JSON reader keeps them
  }
  return params;
}

std::vector<std::string> read_stop_strings(const Fields& fields, const char* name) {
  const Json* value = fields.find(name);
  if (!value) return {};
  std::vector<std::string> stops;
  const auto add = [&](const Json& stop) {
    if (!stop.is_string()) fields.refuse(name, "must be a string or a list of strings");
    if (stop.get_ref<const std::string&>().empty())
      fields.refuse(name, "holds an empty string, which would stop at once");
    stops.push_back(stop.get<std::string>());
  };
  if (value->is_array()) {
    for (const Json& stop : *value) add(stop);
  } else {
    add(*value);
  }
  if (stops.size() > kMaxStopStrings)
    fields.refuse(name, "may hold at most " + std::to_string(kMaxStopStrings) + " strings");
  return stops;
}

void ThinkingSwitch::set(const std::string& field, bool on) {
  if (on_ && *on_ != on) {
    const auto word = [](bool value) { return value ? "on" : "off"; };
    throw RequestError(field_ + " switches thinking " + word(*on_) + ", but " + field + " switches it " + word(on) +
                           "; send one of them",
                       field, "conflicting_fields");
  }
  on_ = on;
  field_ = field;
}

void ThinkingSwitch::read_effort(const std::string& field, const std::string& effort) {
  static constexpr std::string_view kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
  if (std::find(std::begin(kEfforts), std::end(kEfforts), effort) == std::end(kEfforts)) {
    throw RequestError(
        field + " must be none, minimal, low, medium, high or xhigh, found '" + effort.substr(0, 40) + "'", field);
  }
  set(field, effort != "none");
}

void ThinkingSwitch::read(const Fields& fields) {
  if (const auto on = fields.boolean("enable_thinking")) set("enable_thinking", *on);
  if (const auto kwargs = fields.object("chat_template_kwargs")) {
    if (const auto on = kwargs->boolean("enable_thinking")) set("chat_template_kwargs.enable_thinking", *on);
  }
  if (const auto effort = fields.string("reasoning_effort")) read_effort("reasoning_effort", *effort);
}

void settle_tools(ChatRequest& request) {
  if (request.tool_choice == ToolChoice::kNone) request.tools.clear();
  const bool forced = request.tool_choice == ToolChoice::kRequired || request.tool_choice == ToolChoice::kNamed;
  if (forced && request.tools.empty()) {
    throw RequestError("tool_choice asks for a call, but tools is empty", "tool_choice");
  }
  const auto is_chosen = [&](const ToolDefinition& tool) { return tool.name == request.tool_name; };
  if (request.tool_choice == ToolChoice::kNamed &&
      std::none_of(request.tools.begin(), request.tools.end(), is_chosen)) {
    throw RequestError("tool_choice names '" + request.tool_name.substr(0, 80) + "', which is not among tools",
                       "tool_choice");
  }
  if (forced && request.settings.format != AnswerFormat::kText) {
    throw RequestError("tool_choice asks for a call and response_format for JSON text; send one of them", "tool_choice",
                       "conflicting_fields");
  }
}

}  // namespace calla
