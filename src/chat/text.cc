#include "chat/text.h"

#include <cstddef>
#include <cstdint>

namespace calla {
namespace {

bool is_python_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool is_continuation(char c) { return (c & 0xc0) == 0x80; }

// Every white-space character takes one to three bytes in UTF-8; `bytes` is one such character, or is not.
bool is_space_character(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])); };
  switch (bytes.size()) {
    case 1:
      return at(0) < 0x80 && is_python_space(at(0));
    case 2:
      return (at(0) & 0xe0) == 0xc0 && is_python_space((at(0) & 0x1f) << 6 | (at(1) & 0x3f));
    case 3:
      return (at(0) & 0xf0) == 0xe0 && is_python_space((at(0) & 0x0f) << 12 | (at(1) & 0x3f) << 6 | (at(2) & 0x3f));
    default:
      return false;
  }
}

size_t leading_space(std::string_view text) {
  size_t length = 1;
  while (length < text.size() && length < 4 && is_continuation(text[length])) length++;
  return is_space_character(text.substr(0, length)) ? length : 0;
}

size_t trailing_space(std::string_view text) {
  size_t length = 1;
  while (length < text.size() && length < 4 && is_continuation(text[text.size() - length])) length++;
  return is_space_character(text.substr(text.size() - length)) ? length : 0;
}

}  // namespace

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const size_t n = leading_space(text);
    if (n == 0) break;
    text.remove_prefix(n);
  }
  while (!text.empty()) {
    const size_t n = trailing_space(text);
    if (n == 0) break;
    text.remove_suffix(n);
  }
  return text;
}

std::string_view strip_leading_newlines(std::string_view text) {
  while (!text.empty() && text.front() == '\n') text.remove_prefix(1);
  return text;
}

std::string_view strip_trailing_newlines(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return text;
}

}  // namespace calla
