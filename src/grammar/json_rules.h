#pragma once
// JsonRules: the parts of JSON text that every schema uses, each built once per grammar on first use.
//
// Blank space is limited, so that a model cannot write blanks for ever: between parts there is nothing, one space, or a
// line break with indentation. Numbers have at most 18 digits before and after the point and an exponent of two, so that
// integers fit 64 bits and all fit a double.
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"

namespace calla {

class JsonRules {
 public:
  using NodeId = Grammar::NodeId;

  explicit JsonRules(Grammar& grammar) : grammar_(grammar) {}

  // Sub-automata, to be called.
  NodeId space();
  NodeId blank();             // one space or line break
  NodeId string_character();  // one character of a string, escaped or not
  NodeId number();
  NodeId integer();
  NodeId value();   // any JSON value
  NodeId object();  // any object
  NodeId array();   // any array

  // Pieces between two nodes.
  void string(NodeId from, uint32_t min_length, uint32_t max_length, NodeId to);
  // A key of any name but those in `taken`, quotes included.
  void other_key(NodeId from, const std::vector<std::string>& taken, NodeId to);
  // One of the byte strings; they share prefixes, so that thousands cost one position.
  void one_of(NodeId from, std::vector<std::string> literals, NodeId to);

 private:
  static constexpr uint32_t kMaxIndent = 48, kMaxTabs = 12, kMaxDigits = 18, kMaxExponentDigits = 2;

  NodeId digits_rule();
  void integer_part(NodeId from, NodeId to);

  Grammar& grammar_;
  NodeId space_ = Grammar::kNone, character_ = Grammar::kNone, number_ = Grammar::kNone, integer_ = Grammar::kNone,
         value_ = Grammar::kNone, object_ = Grammar::kNone, array_ = Grammar::kNone, digit_ = Grammar::kNone;
};

}  // namespace calla
