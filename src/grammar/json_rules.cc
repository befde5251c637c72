#include "grammar/json_rules.h"

#include <algorithm>
#include <utility>

#include "grammar/characters.h"
#include "grammar/code_set.h"

namespace calla {

using NodeId = Grammar::NodeId;

NodeId JsonRules::space() {
  if (space_ != Grammar::kNone) return space_;
  space_ = grammar_.add_accepting_node();
  const NodeId end = grammar_.add_accepting_node();
  grammar_.add_bytes(space_, ' ', ' ', end);
  const NodeId line = grammar_.add_accepting_node();
  grammar_.add_bytes(space_, '\n', '\n', line);
  const auto indent = [&](char c, uint32_t most) {
    const auto byte = static_cast<uint8_t>(c);
    NodeId at = line;
    for (uint32_t i = 0; i < most; ++i) {
      const NodeId next = grammar_.add_accepting_node();
      grammar_.add_bytes(at, byte, byte, next);
      at = next;
    }
  };
  indent(' ', kMaxIndent);
  indent('\t', kMaxTabs);
  return space_;
}

NodeId JsonRules::blank() {
  const NodeId start = grammar_.add_node(), end = grammar_.add_accepting_node();
  grammar_.add_bytes(start, ' ', ' ', end);
  grammar_.add_bytes(start, '\n', '\n', end);
  return start;
}

NodeId JsonRules::string_character() {
  if (character_ != Grammar::kNone) return character_;
  character_ = grammar_.add_node(Grammar::TextKind::kJsonString);
  const NodeId end = grammar_.add_accepting_node();
  CodeSet plain{{0x20, CodeSet::kMax}};
  plain.remove('"', '"');
  plain.remove('\\', '\\');
  plain.add_edges(grammar_, character_, end);

  const NodeId escape = grammar_.add_node();
  grammar_.add_bytes(character_, '\\', '\\', escape);
  for (const char c : std::string_view("\"\\/bfnrt")) {
    const auto byte = static_cast<uint8_t>(c);
    grammar_.add_bytes(escape, byte, byte, end);
  }
  // \uXXXX: a high surrogate must be followed by a low one, and a low one never stands alone.
  const auto hex = [&](NodeId from, NodeId to) {
    grammar_.add_bytes(from, '0', '9', to);
    grammar_.add_bytes(from, 'A', 'F', to);
    grammar_.add_bytes(from, 'a', 'f', to);
  };
  const NodeId last3 = grammar_.add_node(), last2 = grammar_.add_node(), last1 = grammar_.add_node();
  hex(last3, last2);
  hex(last2, last1);
  hex(last1, end);
  const NodeId unicode = grammar_.add_node(), d = grammar_.add_node();
  grammar_.add_bytes(escape, 'u', 'u', unicode);
  grammar_.add_bytes(unicode, '0', '9', last3);
  for (const auto& [low, high] : {std::pair('A', 'C'), {'E', 'F'}, {'a', 'c'}, {'e', 'f'}})
    grammar_.add_bytes(unicode, static_cast<uint8_t>(low), static_cast<uint8_t>(high), last3);
  grammar_.add_bytes(unicode, 'D', 'D', d);
  grammar_.add_bytes(unicode, 'd', 'd', d);
  grammar_.add_bytes(d, '0', '7', last2);
  const NodeId high2 = grammar_.add_node(), high1 = grammar_.add_node(), pair = grammar_.add_node();
  grammar_.add_bytes(d, '8', '9', high2);
  grammar_.add_bytes(d, 'A', 'B', high2);
  grammar_.add_bytes(d, 'a', 'b', high2);
  hex(high2, high1);
  hex(high1, pair);
  const NodeId low_u = grammar_.add_node(), low_d = grammar_.add_node(), low_3 = grammar_.add_node();
  grammar_.add_literal(pair, "\\u", low_u);
  grammar_.add_bytes(low_u, 'D', 'D', low_d);
  grammar_.add_bytes(low_u, 'd', 'd', low_d);
  grammar_.add_bytes(low_d, 'C', 'F', low_3);
  grammar_.add_bytes(low_d, 'c', 'f', low_3);
  hex(low_3, last1);
  return character_;
}

void JsonRules::string(NodeId from, uint32_t min_length, uint32_t max_length, NodeId to) {
  const NodeId open = grammar_.add_node(), close = grammar_.add_node();
  grammar_.add_bytes(from, '"', '"', open);
  grammar_.add_repeat(open, string_character(), min_length, max_length, close);
  grammar_.add_bytes(close, '"', '"', to);
}

NodeId JsonRules::digits_rule() {
  if (digit_ != Grammar::kNone) return digit_;
  digit_ = grammar_.add_node();
  grammar_.add_bytes(digit_, '0', '9', grammar_.add_accepting_node());
  return digit_;
}

void JsonRules::integer_part(NodeId from, NodeId to) {
  const NodeId sign = grammar_.add_node(), more = grammar_.add_node();
  grammar_.add_bytes(from, '-', '-', sign);
  grammar_.add_epsilon(from, sign);
  grammar_.add_bytes(sign, '0', '0', to);
  grammar_.add_bytes(sign, '1', '9', more);
  grammar_.add_repeat(more, digits_rule(), 0, kMaxDigits - 1, to);
}

NodeId JsonRules::integer() {
  if (integer_ != Grammar::kNone) return integer_;
  integer_ = grammar_.add_node();
  integer_part(integer_, grammar_.add_accepting_node());
  return integer_;
}

NodeId JsonRules::number() {
  if (number_ != Grammar::kNone) return number_;
  number_ = grammar_.add_node();
  const NodeId whole = grammar_.add_accepting_node(), point = grammar_.add_node(),
               fraction = grammar_.add_accepting_node();
  integer_part(number_, whole);
  grammar_.add_bytes(whole, '.', '.', point);
  grammar_.add_repeat(point, digits_rule(), 1, kMaxDigits, fraction);
  const NodeId sign = grammar_.add_node(), exponent = grammar_.add_node(), end = grammar_.add_accepting_node();
  for (const NodeId mantissa : {whole, fraction}) {
    grammar_.add_bytes(mantissa, 'e', 'e', sign);
    grammar_.add_bytes(mantissa, 'E', 'E', sign);
  }
  grammar_.add_bytes(sign, '+', '+', exponent);
  grammar_.add_bytes(sign, '-', '-', exponent);
  grammar_.add_epsilon(sign, exponent);
  grammar_.add_repeat(exponent, digits_rule(), 1, kMaxExponentDigits, end);
  return number_;
}

NodeId JsonRules::object() {
  if (object_ != Grammar::kNone) return object_;
  object_ = grammar_.add_node();
  const NodeId end = grammar_.add_accepting_node();
  const NodeId opened = grammar_.add_node(), inside = grammar_.add_node(), key = grammar_.add_node();
  grammar_.add_bytes(object_, '{', '{', opened);
  grammar_.add_call(opened, space(), inside);
  grammar_.add_bytes(inside, '}', '}', end);
  grammar_.add_epsilon(inside, key);
  const NodeId after_key = grammar_.add_node(), colon = grammar_.add_node(), before_value = grammar_.add_node(),
               after_value = grammar_.add_node(), comma = grammar_.add_node(), closing = grammar_.add_node();
  string(key, 0, Grammar::kUnbounded, after_key);
  grammar_.add_bytes(after_key, ':', ':', colon);
  grammar_.add_call(colon, space(), before_value);
  grammar_.add_call(before_value, value(), after_value);
  grammar_.add_bytes(after_value, ',', ',', comma);
  grammar_.add_call(comma, space(), key);
  grammar_.add_call(after_value, space(), closing);
  grammar_.add_bytes(closing, '}', '}', end);
  return object_;
}

NodeId JsonRules::array() {
  if (array_ != Grammar::kNone) return array_;
  array_ = grammar_.add_node();
  const NodeId end = grammar_.add_accepting_node();
  const NodeId opened = grammar_.add_node(), inside = grammar_.add_node(), item = grammar_.add_node(),
               after_item = grammar_.add_node(), comma = grammar_.add_node(), closing = grammar_.add_node();
  grammar_.add_bytes(array_, '[', '[', opened);
  grammar_.add_call(opened, space(), inside);
  grammar_.add_bytes(inside, ']', ']', end);
  grammar_.add_epsilon(inside, item);
  grammar_.add_call(item, value(), after_item);
  grammar_.add_bytes(after_item, ',', ',', comma);
  grammar_.add_call(comma, space(), item);
  grammar_.add_call(after_item, space(), closing);
  grammar_.add_bytes(closing, ']', ']', end);
  return array_;
}

NodeId JsonRules::value() {
  if (value_ != Grammar::kNone) return value_;
  value_ = grammar_.add_node();
  const NodeId end = grammar_.add_accepting_node();
  grammar_.add_call(value_, object(), end);
  grammar_.add_call(value_, array(), end);
  grammar_.add_call(value_, number(), end);
  string(value_, 0, Grammar::kUnbounded, end);
  for (const char* word : {"true", "false", "null"}) grammar_.add_literal(value_, word, end);
  return value_;
}

void JsonRules::one_of(NodeId from, std::vector<std::string> literals, NodeId to) {
  std::sort(literals.begin(), literals.end());
  literals.erase(std::unique(literals.begin(), literals.end()), literals.end());
  struct Group {
    NodeId from;
    size_t begin, end, depth;  // literals [begin, end) agree in their first `depth` bytes
  };
  std::vector<Group> pending{{from, 0, literals.size(), 0}};
  while (!pending.empty()) {
    Group group = pending.back();
    pending.pop_back();
    for (size_t i = group.begin; i < group.end;) {
      if (literals[i].size() == group.depth) {
        grammar_.add_epsilon(group.from, to);
        ++i;
        continue;
      }
      const char c = literals[i][group.depth];
      size_t j = i;
      while (j < group.end && literals[j][group.depth] == c) ++j;
      const NodeId next = grammar_.add_node();
      grammar_.add_bytes(group.from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), next);
      pending.push_back({next, i, j, group.depth + 1});
      i = j;
    }
  }
}

void JsonRules::other_key(NodeId from, const std::vector<std::string>& taken, NodeId to) {
  if (taken.empty()) return string(from, 0, Grammar::kUnbounded, to);
  // Follow the taken names as a tree of characters; a character that leaves the tree leads to free text. On
  // the tree itself characters are written plainly, so that no escape can spell a taken name.
  std::vector<std::u32string> names;
  for (const std::string& name : taken) {
    std::u32string decoded;
    for (size_t at = 0; at < name.size();) decoded.push_back(decode_character(name, at));
    names.push_back(std::move(decoded));
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  const NodeId open = grammar_.add_node(), free_text = grammar_.add_node(), close = grammar_.add_node();
  grammar_.add_bytes(from, '"', '"', open);
  grammar_.add_repeat(free_text, string_character(), 0, Grammar::kUnbounded, close);
  grammar_.add_bytes(close, '"', '"', to);
  const NodeId beyond_ascii = grammar_.add_node();
  CodeSet{{0x80, CodeSet::kMax}}.add_edges(grammar_, beyond_ascii, free_text);
  struct Group {
    NodeId node;
    size_t begin, end, depth;
  };
  std::vector<Group> pending{{open, 0, names.size(), 0}};
  while (!pending.empty()) {
    const Group group = pending.back();
    pending.pop_back();
    CodeSet leaving{{0x20, CodeSet::kMax}};
    leaving.remove('"', '"');
    leaving.remove('\\', '\\');
    bool is_taken = false, is_ascii = true;
    for (size_t i = group.begin; i < group.end;) {
      if (names[i].size() == group.depth) {
        is_taken = true;
        ++i;
        continue;
      }
      const char32_t c = names[i][group.depth];
      size_t j = i;
      while (j < group.end && names[j][group.depth] == c) ++j;
      leaving.remove(c, c);
      is_ascii = is_ascii && c < 0x80;
      const bool written_plainly = c >= 0x20 && c != '"' && c != '\\';
      if (written_plainly) {
        const NodeId next = grammar_.add_node();
        CodeSet{{c, c}}.add_edges(grammar_, group.node, next);
        pending.push_back({next, i, j, group.depth + 1});
      }
      i = j;
    }
    if (is_ascii) {  // what lies beyond is the same for all such nodes
      leaving.remove(0x80, CodeSet::kMax);
      grammar_.add_epsilon(group.node, beyond_ascii);
    }
    leaving.add_edges(grammar_, group.node, free_text);
    if (!is_taken) grammar_.add_bytes(group.node, '"', '"', to);
  }
}

}  // namespace calla
