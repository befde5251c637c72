#pragma once
// Recognising the markup of tool calls in text that is still arriving:
//   <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
// Each function looks at the start of `text` and says whether the markup is there, is not, or may be once
// more text has come (kMaybe; never if `at_end`).
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

namespace calla::markup {

enum class Match { kNo, kMaybe, kYes };

inline constexpr std::string_view kThinkOpen = "<think>";
inline constexpr std::string_view kThinkClose = "</think>";
inline constexpr std::string_view kCallOpen = "<tool_call>";
inline constexpr std::string_view kCallClose = "</tool_call>";
inline constexpr std::string_view kFunctionClose = "</function>";
inline constexpr std::string_view kParameterClose = "</parameter>";

struct Tag {
  Match match = Match::kNo;
  size_t length = 0;  // of the markup, if kYes
  std::string name;   // of the function or parameter
};

Match literal(std::string_view text, bool at_end, std::string_view expected);

// <parameter=KEY> and <function=NAME>.
Tag parameter_open(std::string_view text, bool at_end);
Tag function_open(std::string_view text, bool at_end);

// A call's beginning up to its first parameter or its end, which must follow for the whole to count.
// `needs_newline`: <tool_call> counts only with a newline after it, as in text that merely mentions the tag.
Tag call_head(std::string_view text, bool at_end, bool needs_newline);
// The same without <tool_call>, which models sometimes leave out.
Tag bare_call_head(std::string_view text, bool at_end);

// <tool_call> and an opening brace: a call written as JSON. The length is that of the tag.
Tag json_call_head(std::string_view text, bool at_end);

// The end of a parameter's value, with the newline before it. Values may hold anything, markup included, so
// </parameter> counts only if more markup of the call follows it. If it was left out, a line that goes on
// with the next parameter (`is_other_parameter`) or with the call's end closes the value too; those are not
// part of the length.
Tag value_end(std::string_view text, bool at_end, const std::function<bool(const std::string&)>& is_other_parameter);

}  // namespace calla::markup
