#pragma once
// The generated Unicode data (unicode_tables.inc), for char_class.cc and nfc.cc.
#include "tokenizer/char_class.h"

namespace calla::unicode {

struct ClassChange {
  char32_t first;
  CharClass kind;
};
struct CodeRange {
  char32_t first, last;
};

using enum CharClass;
#include "tokenizer/unicode_tables.inc"

}  // namespace calla::unicode
