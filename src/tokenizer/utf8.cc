#include "tokenizer/utf8.h"

#include <cstdint>
#include <cstring>

namespace calla {

void append_utf8(char32_t code_point, std::string& out) {
  const auto put = [&out](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xc0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3f));
  } else if (code_point < 0x10000) {
    put(0xe0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  } else {
    put(0xf0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3f));
    put(0x80 | ((code_point >> 6) & 0x3f));
    put(0x80 | (code_point & 0x3f));
  }
}

Utf8Unit next_utf8(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  if (lead < 0x80) return {Utf8Kind::kCharacter, 1};
  if (lead < 0xc2 || lead > 0xf4) return {Utf8Kind::kInvalid, 1};
  const int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and values beyond U+10FFFF.
  const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == bytes.size()) return {Utf8Kind::kCut, i};
    const auto byte = static_cast<unsigned char>(bytes[i]);
    const bool fits = i == 1 ? byte >= low && byte <= high : (byte & 0xc0) == 0x80;
    if (!fits) return {Utf8Kind::kInvalid, i};
  }
  return {Utf8Kind::kCharacter, length};
}

size_t ascii_prefix(std::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + i, 8);
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

size_t utf8_error_offset(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      i += ascii_prefix(text.substr(i));
      continue;
    }
    const Utf8Unit unit = next_utf8(text.substr(i));
    if (unit.kind != Utf8Kind::kCharacter) return i;
    i += static_cast<size_t>(unit.length);
  }
  return i;
}

std::string repair_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t valid = utf8_error_offset(text);
    out.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    out.append(kReplacement);
    text.remove_prefix(static_cast<size_t>(next_utf8(text).length));
  }
  return out;
}

}  // namespace calla
