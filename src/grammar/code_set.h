#pragma once
// CodeSet: a set of Unicode code points as sorted ranges, and its translation into grammar edges over UTF-8
// bytes.
#include <initializer_list>
#include <vector>

#include "grammar/grammar.h"

namespace calla {

class CodeSet {
 public:
  struct Range {
    char32_t low, high;
    bool operator==(const Range&) const = default;
  };
  static constexpr char32_t kMax = 0x10ffff;

  CodeSet() = default;
  CodeSet(std::initializer_list<Range> ranges) {
    for (const Range& range : ranges) add(range.low, range.high);
  }

  void add(char32_t low, char32_t high);
  void add(const CodeSet& other);
  void remove(char32_t low, char32_t high);
  // Everything else, surrogates excepted (they are not characters).
  CodeSet complement() const;
  bool contains(char32_t code_point) const;
  bool empty() const { return ranges_.empty(); }
  const std::vector<Range>& ranges() const { return ranges_; }

  // One well-formed UTF-8 character of the set leads from `from` to `to`.
  void add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to) const;

 private:
  std::vector<Range> ranges_;  // ascending, disjoint, not adjacent
};

}  // namespace calla
