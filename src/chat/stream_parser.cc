#include "chat/stream_parser.h"

#include <algorithm>
#include <random>
#include <utility>

#include "chat/call_markup.h"
#include "chat/text.h"

namespace calla {
namespace {

using markup::Match;
using markup::Tag;
using Kind = ReplyEvent::Kind;

std::string random_call_id() {
  static constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device device;
  std::uniform_int_distribution<size_t> pick(0, kAlphabet.size() - 1);
  std::string id = "call_";
  for (int i = 0; i < 24; i++) id += kAlphabet[pick(device)];
  return id;
}

bool has_parameter(const Json& schema, const std::string& name) {
  return schema.is_object() && schema.contains("properties") && schema["properties"].contains(name);
}

}  // namespace

StreamParser::StreamParser(ParserOptions options)
    : options_(std::move(options)), state_(options_.starts_in_thinking ? State::kReasoning : State::kContent) {}

void StreamParser::push(std::string_view text, std::vector<ReplyEvent>& out) {
  out_ = &out;
  pending_ += text;
  while (position_ < pending_.size() && step()) {
  }
  pending_.erase(0, position_);
  position_ = 0;
  out_ = nullptr;
}

void StreamParser::finish(bool cut, std::vector<ReplyEvent>& out) {
  out_ = &out;
  if (cut) drop_unfinished_markup();
  at_end_ = true;
  while (position_ < pending_.size() && step()) {
  }
  if (state_ == State::kJsonCall) {
    if (!cut && !deliver_json_call(value_)) {
      state_ = State::kContent;
      emit_text(std::string(markup::kCallOpen) + value_);
    }
  } else if (state_ == State::kArguments && !cut) {
    end_call();  // only closing tags are missing
  }
  if (state_ == State::kContent && !at_start_ && !space_.empty()) event(Kind::kContent).text += space_;
  space_.clear();
  pending_.clear();
  position_ = 0;
  out_ = nullptr;
}

// After a cut, markup that has begun is neither a call nor content; what is too short to tell is text.
void StreamParser::drop_unfinished_markup() {
  const std::string_view tail = rest();
  bool drop = state_ == State::kArguments || state_ == State::kValueStart || state_ == State::kValue;
  if (state_ == State::kContent) {
    const bool may_be_call = tail.starts_with("<tool_") || tail.starts_with("<function=");
    drop = after_call_ || (may_be_call && !options_.tools.empty());
  } else if (state_ == State::kReasoning) {
    drop = tail.starts_with(markup::kCallOpen) && tail.find("<function=") != std::string_view::npos;
  }
  if (!drop) return;
  pending_.resize(position_);
  space_.clear();  // it belonged to the markup
}

bool StreamParser::step() {
  switch (state_) {
    case State::kReasoning:
      return step_reasoning();
    case State::kContent:
      return step_content();
    case State::kArguments:
      return step_arguments();
    case State::kValueStart:
      return step_value_start();
    case State::kValue:
      return step_value();
    case State::kJsonCall:
      return step_json_call();
  }
  return false;
}

// Passes on the text before the next of `stops`. Returns how much that was.
size_t StreamParser::take_plain_text(std::string_view stops) {
  const std::string_view text = rest();
  const size_t length = std::min(text.find_first_of(stops), text.size());
  if (length == 0) return 0;
  if (state_ == State::kValue) {
    add_to_value(text.substr(0, length));
  } else {
    emit_text(text.substr(0, length));
  }
  position_ += length;
  return length;
}

bool StreamParser::step_reasoning() {
  if (take_plain_text("<") > 0) return true;
  const std::string_view text = rest();
  const Match close = markup::literal(text, at_end_, markup::kThinkClose);
  if (close == Match::kYes) {
    position_ += markup::kThinkClose.size();
    state_ = State::kContent;
    space_.clear();
    at_start_ = true;
    return true;
  }
  const Match open = has_reasoning_ ? Match::kNo : markup::literal(text, at_end_, markup::kThinkOpen);
  if (open == Match::kYes) {  // the prompt has opened the block already
    position_ += markup::kThinkOpen.size();
    return true;
  }
  const Tag head = options_.tools.empty() ? Tag{} : markup::call_head(text, at_end_, true);
  if (head.match == Match::kYes) {
    position_ += head.length;
    begin_call(head.name);
    return true;
  }
  if (std::max({close, open, head.match}) == Match::kMaybe) return false;
  emit_text("<");
  position_++;
  return true;
}

bool StreamParser::step_content() {
  if (take_plain_text("<") > 0) return true;
  const std::string_view text = rest();
  Match undecided = Match::kNo;
  if (after_call_) {
    for (const auto& tag : {markup::kCallClose, markup::kFunctionClose, markup::kParameterClose}) {
      const Match match = markup::literal(text, at_end_, tag);
      undecided = std::max(undecided, match);
      if (match != Match::kYes) continue;
      position_ += tag.size();
      return true;
    }
  } else if (!has_content_) {
    const Match close = markup::literal(text, at_end_, markup::kThinkClose);
    const Match open = has_reasoning_ ? Match::kNo : markup::literal(text, at_end_, markup::kThinkOpen);
    undecided = std::max(close, open);
    if (undecided == Match::kYes) {  // a think block though thinking is off, or closed twice
      position_ += close == Match::kYes ? markup::kThinkClose.size() : markup::kThinkOpen.size();
      if (open == Match::kYes) state_ = State::kReasoning;
      return true;
    }
  }
  if (!options_.tools.empty()) {
    Tag head = markup::call_head(text, at_end_, false);
    if (head.match == Match::kNo && (at_start_ || space_.ends_with('\n'))) {
      head = markup::bare_call_head(text, at_end_);
      const bool declared = std::any_of(options_.tools.begin(), options_.tools.end(),
                                        [&](const ToolDefinition& tool) { return tool.name == head.name; });
      if (head.match == Match::kYes && !declared && !after_call_) head.match = Match::kNo;
    }
    if (head.match == Match::kYes) {
      position_ += head.length;
      begin_call(head.name);
      return true;
    }
    const Tag json = markup::json_call_head(text, at_end_);
    if (json.match == Match::kYes) {
      position_ += json.length;
      value_.clear();
      state_ = State::kJsonCall;
      return true;
    }
    undecided = std::max({undecided, head.match, json.match});
  }
  if (undecided == Match::kMaybe) return false;
  emit_text("<");
  position_++;
  return true;
}

bool StreamParser::step_arguments() {
  if (is_markup_space(rest().front())) {
    position_++;
    return true;
  }
  const std::string_view text = rest();
  const Tag parameter = markup::parameter_open(text, at_end_);
  if (parameter.match == Match::kYes) {
    position_ += parameter.length;
    begin_value(parameter.name);
    return true;
  }
  Match undecided = parameter.match;
  for (const auto& tag : {markup::kParameterClose, markup::kFunctionClose, markup::kCallClose}) {
    const Match match = markup::literal(text, at_end_, tag);
    undecided = std::max(undecided, match);
    if (match != Match::kYes) continue;
    position_ += tag.size();
    if (tag != markup::kParameterClose) end_call();
    return true;
  }
  if (undecided == Match::kMaybe) return false;
  end_call();  // the next call begins without this one's closing tags
  return true;
}

bool StreamParser::step_value_start() {
  const std::string_view text = rest();
  if (text == "\r" && !at_end_) return false;
  if (text.starts_with("\r\n")) position_ += 2;
  if (text.starts_with("\n")) position_++;
  state_ = State::kValue;
  return true;
}

bool StreamParser::step_value() {
  if (take_plain_text("\n\r<") > 0) return true;
  const Tag end = markup::value_end(rest(), at_end_, [&](const std::string& name) {
    return !names_given_.contains(name) && has_parameter(parameters_, name);
  });
  if (end.match == Match::kMaybe) return false;
  if (end.match == Match::kYes) {
    position_ += end.length;
    end_value();
    return true;
  }
  add_to_value(rest().substr(0, 1));
  position_++;
  return true;
}

bool StreamParser::step_json_call() {
  const size_t searched = value_.size() - std::min(value_.size(), markup::kCallClose.size() - 1);
  value_ += rest();
  position_ = pending_.size();
  const size_t close = value_.find(markup::kCallClose, searched);
  if (close == std::string::npos) return false;
  const size_t end = close + markup::kCallClose.size();
  pending_ = value_.substr(end);
  position_ = 0;
  const std::string body = value_.substr(0, close);
  if (!deliver_json_call(body)) {
    state_ = State::kContent;
    emit_text(std::string(markup::kCallOpen) + value_.substr(0, end));
  }
  return true;
}

bool StreamParser::deliver_json_call(std::string_view body) {
  const Json call = try_parse_json(body);
  if (!call.is_object()) return false;
  const auto name = call.find("name");
  if (name == call.end() || !name->is_string() || name->get_ref<const std::string&>().empty()) return false;
  Json arguments = Json::object();
  for (const char* key : {"arguments", "parameters"}) {
    const auto given = call.find(key);
    if (given == call.end()) continue;
    arguments = given->is_string() ? try_parse_json(given->get_ref<const std::string&>()) : *given;
    break;
  }
  if (!arguments.is_object()) return false;
  begin_call(name->get<std::string>());
  event(Kind::kCallArguments).text += compact_json(arguments);
  has_arguments_ = true;
  event(Kind::kCallEnd);
  n_calls_++;
  state_ = State::kContent;
  return true;
}

void StreamParser::emit_text(std::string_view text) {
  const bool reasoning = state_ == State::kReasoning;
  const auto is_space = [](char c) { return is_markup_space(c); };
  const auto last = std::find_if_not(text.rbegin(), text.rend(), is_space);
  const size_t length = static_cast<size_t>(text.rend() - last);  // up to the last visible character
  if (length == 0) {
    space_ += text;
    return;
  }
  std::string visible = std::exchange(space_, std::string(text.substr(length)));
  visible += text.substr(0, length);
  if (at_start_) {
    size_t begin = static_cast<size_t>(std::find_if_not(visible.begin(), visible.end(), is_space) - visible.begin());
    if (!reasoning && begin > 0) {  // keep the first line's indentation
      const size_t newline = visible.rfind('\n', begin - 1);
      begin = newline == std::string::npos ? 0 : newline + 1;
    }
    visible.erase(0, begin);
    if (!reasoning && has_content_) visible.insert(0, std::exchange(gap_, ""));
  }
  at_start_ = false;
  after_call_ = false;
  (reasoning ? has_reasoning_ : has_content_) = true;
  event(reasoning ? Kind::kReasoning : Kind::kContent).text += visible;
}

void StreamParser::begin_call(const std::string& name) {
  if (has_content_ && gap_.empty()) gap_ = space_;
  space_.clear();
  at_start_ = true;
  after_call_ = true;
  ReplyEvent& start = event(Kind::kCallStart);
  start.id = options_.make_call_id ? options_.make_call_id() : random_call_id();
  start.name = name;
  parameters_ = nullptr;
  for (const ToolDefinition& tool : options_.tools) {
    if (tool.name == name) parameters_ = tool.parameters;
  }
  names_given_.clear();
  has_arguments_ = false;
  state_ = State::kArguments;
}

void StreamParser::begin_value(const std::string& name) {
  value_ignored_ = !names_given_.insert(name).second;
  value_name_ = name;
  value_types_ = argument_types(parameters_, name);
  value_streams_ = false;
  value_.clear();
  state_ = State::kValueStart;
}

void StreamParser::add_to_value(std::string_view text) {
  if (value_ignored_) return;
  if (value_streams_) {
    append_json_escaped(event(Kind::kCallArguments).text, text);
    return;
  }
  value_ += text;
  ArgumentTypes string_or_null(ArgumentTypes::kString);
  string_or_null.add(ArgumentTypes::kNull);
  const bool is_string = value_types_ == ArgumentTypes(ArgumentTypes::kString) ||
                         (value_types_ == string_or_null && !std::string_view("null").starts_with(value_));
  if (!is_string) return;
  std::string opening = "\"";
  append_json_escaped(opening, value_);
  write_arguments(opening);
  value_streams_ = true;
}

void StreamParser::end_value() {
  state_ = State::kArguments;
  if (value_ignored_) return;
  if (value_streams_) {
    event(Kind::kCallArguments).text += '"';
  } else if (const auto json = argument_json(value_, value_types_)) {
    write_arguments(*json);
  }
}

// The current parameter's name, and the beginning of its value.
void StreamParser::write_arguments(std::string_view json) {
  std::string& text = event(Kind::kCallArguments).text;
  text += std::exchange(has_arguments_, true) ? "," : "{";
  append_json_string(text, value_name_);
  text += ':';
  text += json;
}

void StreamParser::end_call() {
  event(Kind::kCallArguments).text += has_arguments_ ? "}" : "{}";
  event(Kind::kCallEnd);
  n_calls_++;
  state_ = State::kContent;
}

// The event to extend: the last one if it is of this kind, else a new one.
ReplyEvent& StreamParser::event(Kind kind) {
  const bool is_text = kind == Kind::kReasoning || kind == Kind::kContent;
  const int call = is_text ? -1 : n_calls_;
  const bool extends = !out_->empty() && out_->back().kind == kind && out_->back().call == call;
  if (!extends) out_->push_back({kind, "", call, "", ""});
  return out_->back();
}

}  // namespace calla
