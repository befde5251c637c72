#pragma once
// Text functions with the meaning that the chat template gives them (Python's).
#include <string_view>

namespace calla {

// Python's str.strip(): Unicode white space off both ends. Bytes that are not UTF-8 are not white space.
std::string_view strip(std::string_view text);

// Leading (trailing) newlines off, nothing else.
std::string_view strip_leading_newlines(std::string_view text);
std::string_view strip_trailing_newlines(std::string_view text);

// White space as it occurs between pieces of markup.
inline bool is_markup_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

}  // namespace calla
