#pragma once
// UTF-8: validation, decoding, and the repair of bytes that are not UTF-8.
#include <cstddef>
#include <string>
#include <string_view>

namespace calla {

struct CodePoint {
  char32_t value = 0;
  int bytes = 0;
};

// The code point at `at`. The text must be valid UTF-8 and `at` the start of a character.
inline CodePoint decode_valid(const char* at) {
  const auto byte = [at](int i) { return static_cast<unsigned char>(at[i]); };
  const auto tail = [&byte](int i) { return static_cast<char32_t>(byte(i) & 0x3f); };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xe0) return {((lead & 0x1f) << 6) | tail(1), 2};
  if (lead < 0xf0) return {((lead & 0x0f) << 12) | (tail(1) << 6) | tail(2), 3};
  return {((lead & 0x07) << 18) | (tail(1) << 12) | (tail(2) << 6) | tail(3), 4};
}

// Appends the UTF-8 form of a code point.
void append_utf8(char32_t code_point, std::string& out);

// What stands at the start of `bytes` (not empty): a whole character, a part of one that is cut by the end,
// or bytes that can never become one. `length` counts its bytes; an invalid sequence is the longest prefix of
// a character
// ("maximal subpart"), so that replacement gives the same text as Python and Rust.
enum class Utf8Kind : unsigned char { kCharacter, kCut, kInvalid };
struct Utf8Unit {
  Utf8Kind kind = Utf8Kind::kInvalid;
  int length = 0;
};
Utf8Unit next_utf8(std::string_view bytes);

// The offset of the first byte that is not part of a valid character; text.size() if all are.
size_t utf8_error_offset(std::string_view text);

// The offset of the first byte >= 0x80, or text.size().
size_t ascii_prefix(std::string_view text);

// U+FFFD, which stands for bytes that are not UTF-8.
inline constexpr std::string_view kReplacement = "\xef\xbf\xbd";

// The text with each invalid sequence replaced by one U+FFFD.
std::string repair_utf8(std::string_view text);

}  // namespace calla
