#pragma once
// UTF-8 facts shared by the token tables and the grammar builders.
#include <cstdint>
#include <string>
#include <string_view>

namespace calla {

// Bytes of the well-formed character at the start of `text`; 0 if it is broken, cut short or empty.
size_t character_length(std::string_view text);

// Appends the character to `out`.
void append_character(char32_t code_point, std::string& out);

// Decodes the character at `at` and moves past it. The text must be well-formed there.
char32_t decode_character(std::string_view text, size_t& at);

}  // namespace calla
