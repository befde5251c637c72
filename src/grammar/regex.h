#pragma once
// Pattern: a regular expression of JSON Schema (ECMA-262 syntax) as a small automaton over characters.
//
// Supported: literals and escapes (\d \w \s and their opposites, \n \r \t \f \v \0 \xHH \uHHHH), dot,
// classes, groups (capturing, named or not), alternation, the quantifiers * + ? {m} {m,} {m,n} (lazy ones
// too), and ^ $ at the ends of the whole pattern's alternatives. Refused: look-around, back-references, \b,
// \p, and anchors elsewhere.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/code_set.h"
#include "grammar/grammar.h"

namespace calla {

class Pattern {
 public:
  // Throws RequestError that says what in the pattern is not supported.
  explicit Pattern(std::string_view text);

  // How the characters of a match are written.
  enum class Encoding : uint8_t {
    kJson,  // as in a JSON string, escaped only where needed
    kRaw,   // as they are, without line breaks
  };

  // Every text that matches and has between `min` and `max` characters leads from `from` to `to`.
  void add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to, uint32_t min, uint32_t max,
                 Encoding encoding) const;

 private:
  friend class PatternParser;
  struct State {
    std::vector<uint32_t> free;  // reached without a character
    std::vector<std::pair<CodeSet, uint32_t>> on_character;
  };

  uint32_t add_state();

  std::vector<State> states_;  // 0: start
  uint32_t accept_ = 0;
};

}  // namespace calla
