#pragma once
// The classes of characters that Qwen's split pattern tells apart, from the generated table
// unicode_tables.inc.
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace calla {

enum class CharClass : uint8_t { kOther, kLetter, kMark, kNumber, kSpace };  // \p{L} \p{M} \p{N} \s

// Two-stage table: one page of 256 classes for each distinct block of code points.
class CharClassTable {
 public:
  CharClassTable();
  CharClass operator[](char32_t code_point) const {
    return classes_[static_cast<size_t>(pages_[code_point >> 8]) * 256 + (code_point & 0xff)];
  }

 private:
  std::array<uint8_t, 0x1100> pages_{};
  std::vector<CharClass> classes_;
};

// Built on first use, shared by all tokenizers.
const CharClassTable& char_classes();

}  // namespace calla
