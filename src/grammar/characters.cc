#include "grammar/characters.h"

#include <string>

#include "base/check.h"

namespace calla {

size_t character_length(std::string_view text) {
  if (text.empty()) return 0;
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xc2 && lead <= 0xdf   ? 2
                        : (lead & 0xf0u) == 0xe0       ? 3
                        : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                       : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i)
    if ((at(i) & 0xc0u) != 0x80) return 0;
  // Overlong forms, surrogates and values past U+10FFFF show in the second byte.
  if ((lead == 0xe0 && at(1) < 0xa0) || (lead == 0xed && at(1) > 0x9f)) return 0;
  if ((lead == 0xf0 && at(1) < 0x90) || (lead == 0xf4 && at(1) > 0x8f)) return 0;
  return length;
}

void append_character(char32_t code_point, std::string& out) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(static_cast<uint8_t>(byte))); };
  const uint32_t c = code_point;
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xc0 | c >> 6);
    put(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    put(0xe0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  } else {
    put(0xf0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3f));
    put(0x80 | (c >> 6 & 0x3f));
    put(0x80 | (c & 0x3f));
  }
}

char32_t decode_character(std::string_view text, size_t& at) {
  const size_t length = character_length(text.substr(at));
  check(length > 0, "decode_character: the text is not well-formed UTF-8");
  const auto lead = static_cast<uint8_t>(text[at]);
  uint32_t value = length == 1 ? lead : lead & (0xffu >> (length + 1));
  for (size_t i = 1; i < length; ++i) value = value << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3fu);
  at += length;
  return static_cast<char32_t>(value);
}

}  // namespace calla
