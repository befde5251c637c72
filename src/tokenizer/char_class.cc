#include "tokenizer/char_class.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "tokenizer/unicode_ranges.h"

namespace calla {

CharClassTable::CharClassTable() {
  const auto* change = std::begin(unicode::kClassChanges);
  CharClass kind = CharClass::kOther;
  for (size_t block = 0; block < pages_.size(); ++block) {
    std::array<CharClass, 256> page;
    for (size_t i = 0; i < page.size(); ++i) {
      if (change != std::end(unicode::kClassChanges) && change->first == block * 256 + i) kind = (change++)->kind;
      page[i] = kind;
    }
    size_t same = 0;
    while (same * 256 < classes_.size() && !std::equal(page.begin(), page.end(), classes_.begin() + same * 256)) ++same;
    if (same * 256 == classes_.size()) classes_.insert(classes_.end(), page.begin(), page.end());
    check(same < 256, "more than 256 distinct pages of character classes");
    pages_[block] = static_cast<uint8_t>(same);
  }
}

const CharClassTable& char_classes() {
  static const CharClassTable table;
  return table;
}

}  // namespace calla
