#include "chat/call_markup.h"

#include <algorithm>

#include "chat/text.h"

namespace calla::markup {
namespace {

constexpr size_t kMaxNameBytes = 200;

Match maybe(bool at_end) { return at_end ? Match::kNo : Match::kMaybe; }

size_t space_length(std::string_view text) {
  return static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_markup_space) - text.begin());
}

Tag named_tag(std::string_view text, bool at_end, std::string_view opening) {
  if (const Match match = literal(text, at_end, opening); match != Match::kYes) return {match, 0, ""};
  const std::string_view rest = text.substr(opening.size(), kMaxNameBytes + 1);
  const size_t stop = rest.find_first_of(">\n<");
  if (stop == std::string_view::npos) return {rest.size() > kMaxNameBytes ? Match::kNo : maybe(at_end), 0, ""};
  std::string_view name = rest.substr(0, stop);
  if (rest[stop] != '>') return {};
  if (name.size() > 1 && name.front() == name.back() && (name.front() == '"' || name.front() == '\'')) {
    name = name.substr(1, name.size() - 2);
  }
  name = strip(name);
  if (name.empty()) return {};
  return {Match::kYes, opening.size() + stop + 1, std::string(name)};
}

Match any_of(std::initializer_list<Match> matches) { return std::max(matches); }

// What may follow within a call, or right after one.
Match call_goes_on(std::string_view text, bool at_end) {
  return any_of(
      {parameter_open(text, at_end).match, literal(text, at_end, kFunctionClose), literal(text, at_end, kCallClose)});
}
Match next_call(std::string_view text, bool at_end) {
  return any_of({literal(text, at_end, kCallOpen), function_open(text, at_end).match});
}

// `text` begins with closing tags; do the call's end or the next call follow?
Match closes_call(std::string_view text, bool at_end) {
  const bool is_function = literal(text, at_end, kFunctionClose) == Match::kYes;
  text.remove_prefix(is_function ? kFunctionClose.size() : kCallClose.size());
  text.remove_prefix(space_length(text));
  if (text.empty()) return at_end ? Match::kYes : Match::kMaybe;
  const Match next = literal(text, at_end, kCallOpen);
  return is_function ? any_of({literal(text, at_end, kCallClose), next}) : next;
}

}  // namespace

Match literal(std::string_view text, bool at_end, std::string_view expected) {
  if (text.starts_with(expected)) return Match::kYes;
  return expected.starts_with(text) ? maybe(at_end) : Match::kNo;
}

Tag parameter_open(std::string_view text, bool at_end) { return named_tag(text, at_end, "<parameter="); }
Tag function_open(std::string_view text, bool at_end) { return named_tag(text, at_end, "<function="); }

Tag bare_call_head(std::string_view text, bool at_end) {
  Tag head = function_open(text, at_end);
  if (head.match != Match::kYes) return head;
  head.length += space_length(text.substr(head.length));
  head.match = call_goes_on(text.substr(head.length), at_end);
  return head;
}

Tag call_head(std::string_view text, bool at_end, bool needs_newline) {
  if (const Match match = literal(text, at_end, kCallOpen); match != Match::kYes) return {match, 0, ""};
  const size_t n_space = space_length(text.substr(kCallOpen.size()));
  const size_t opening = kCallOpen.size() + n_space;
  if (opening == text.size()) return {maybe(at_end), 0, ""};
  const std::string_view space = text.substr(kCallOpen.size(), n_space);
  if (needs_newline && space.find('\n') == std::string_view::npos) return {};
  Tag head = bare_call_head(text.substr(opening), at_end);
  head.length += opening;
  return head;
}

Tag json_call_head(std::string_view text, bool at_end) {
  if (const Match match = literal(text, at_end, kCallOpen); match != Match::kYes) return {match, 0, ""};
  const std::string_view rest = text.substr(kCallOpen.size());
  const std::string_view body = rest.substr(space_length(rest));
  if (body.empty()) return {maybe(at_end), 0, ""};
  return {body.front() == '{' ? Match::kYes : Match::kNo, kCallOpen.size(), ""};
}

Tag value_end(std::string_view text, bool at_end, const std::function<bool(const std::string&)>& is_other_parameter) {
  size_t newline = 0;
  if (text.starts_with("\n")) newline = 1;
  if (text.starts_with("\r\n")) newline = 2;
  if (text == "\r") return {maybe(at_end), 0, ""};
  const std::string_view tag = text.substr(newline);
  if (tag.empty()) return {maybe(at_end), 0, ""};

  const Match close = literal(tag, at_end, kParameterClose);
  if (close == Match::kYes) {
    size_t length = newline;  // past all the closing tags: models repeat them
    std::string_view rest = tag;
    while (rest.starts_with(kParameterClose)) {
      length = static_cast<size_t>(rest.data() - text.data()) + kParameterClose.size();
      rest.remove_prefix(kParameterClose.size());
      rest.remove_prefix(space_length(rest));
    }
    if (rest.empty()) return {at_end ? Match::kYes : Match::kMaybe, length, ""};
    return {any_of({call_goes_on(rest, at_end), next_call(rest, at_end), literal(rest, true, kParameterClose),
                    !at_end && kParameterClose.starts_with(rest) ? Match::kMaybe : Match::kNo}),
            length, ""};
  }
  if (newline == 0) return {close, 0, ""};

  const Match end = any_of({literal(tag, at_end, kFunctionClose), literal(tag, at_end, kCallClose)});
  if (end == Match::kYes) return {closes_call(tag, at_end), newline, ""};
  const Tag other = parameter_open(tag, at_end);
  if (other.match == Match::kYes) {
    const std::string_view rest = tag.substr(other.length);
    if (!is_other_parameter(other.name)) return {};
    if (rest.empty() || rest == "\r") return {maybe(at_end), 0, ""};
    return {rest.front() == '\n' || rest.starts_with("\r\n") ? Match::kYes : Match::kNo, newline, ""};
  }
  return {any_of({close, end, other.match}), 0, ""};
}

}  // namespace calla::markup
