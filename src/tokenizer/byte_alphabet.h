#pragma once
// The printable characters that stand for bytes in the vocabulary of a byte-level BPE: a byte that is a
// visible Latin-1 character stands for itself, the others are U+0100, U+0101, ... in order.
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "tokenizer/utf8.h"

namespace calla {

class ByteAlphabet {
 public:
  ByteAlphabet() {
    chars_.fill(-1);
    char32_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool visible = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      chars_[visible ? static_cast<char32_t>(byte) : next++] = byte;
    }
  }
  // The bytes that `text` (valid UTF-8) stands for; nothing if a character of it stands for none.
  std::optional<std::string> to_bytes(std::string_view text) const {
    std::string out;
    out.reserve(text.size());
    for (size_t i = 0; i < text.size();) {
      const CodePoint c = decode_valid(text.data() + i);
      if (c.value >= chars_.size() || chars_[c.value] < 0) return std::nullopt;
      out.push_back(static_cast<char>(chars_[c.value]));
      i += static_cast<size_t>(c.bytes);
    }
    return out;
  }

 private:
  std::array<int, 0x144> chars_;  // character -> byte, or -1
};

}  // namespace calla
