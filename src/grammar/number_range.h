#pragma once
// NumberRange: decimal numbers between two bounds, as grammar nodes, digit by digit.
#include <cstdint>
#include <optional>
#include <string>

#include "grammar/grammar.h"

namespace calla {

// A bound's decimal digits without needless zeros: 12.5 is {false, "12", "5"}.
struct Decimal {
  bool negative = false;
  std::string whole = "0";
  std::string fraction;

  bool is_zero() const { return whole == "0" && fraction.empty(); }
};

struct NumberBound {
  Decimal value;
  bool exclusive = false;
};

struct NumberRange {
  std::optional<NumberBound> low, high;
  bool is_integer = false;
  uint32_t multiple_of = 1;  // other than 1 for integers only

  // Every such number, written without an exponent, leads from `from` to `to`. Possibly none.
  void add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to) const;
};

}  // namespace calla
