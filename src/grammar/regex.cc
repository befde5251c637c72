#include "grammar/regex.h"

#include <algorithm>
#include <cstdio>
#include <optional>

#include "base/error.h"
#include "grammar/characters.h"

namespace calla {
namespace {

constexpr size_t kMaxPatternStates = 50'000;
constexpr size_t kMaxPatternBytes = 8192;
constexpr int kMaxGroupDepth = 50;
constexpr uint32_t kMaxRepeat = 10'000;

// What was parsed, before repetitions are unrolled.
struct Piece {
  enum class Kind : uint8_t {
    kSet,
    kSequence,
    kChoice,
    kRepeat
  } kind = Kind::kSequence;  // an empty sequence matches ""
  CodeSet set;
  std::vector<Piece> parts;
  uint32_t min = 0, max = 0;
};

CodeSet digits() { return {{'0', '9'}}; }
CodeSet word_characters() { return {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}; }
CodeSet blanks() {
  return {{'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
          {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
}
CodeSet any_character() { return CodeSet().complement(); }
CodeSet dot() { return CodeSet{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}.complement(); }

}  // namespace

class PatternParser {
 public:
  PatternParser(std::string_view text, Pattern& out) : text_(text), out_(out) {}

  void parse() {
    out_.add_state();
    out_.accept_ = out_.add_state();
    for (;;) {
      const bool from_start = take('^');
      const Piece piece = sequence(0);
      const bool to_end = take('$');
      uint32_t at = 0;
      if (!from_start) at = emit_anything(at);
      at = emit(piece, at);
      if (!to_end) at = emit_anything(at);
      out_.states_[at].free.push_back(out_.accept_);
      if (at_ == text_.size()) return;
      if (!take('|')) refuse("an anchor or a bracket stands where it is not supported");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw RequestError("pattern \"" + std::string(text_) + "\": " + what + " (at byte " + std::to_string(at_) + ")");
  }
  bool peek(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) {
    if (!peek(c)) return false;
    ++at_;
    return true;
  }

  Piece choice(int depth) {
    if (depth > kMaxGroupDepth) refuse("groups are nested too deeply");
    Piece result{.kind = Piece::Kind::kChoice, .set = {}, .parts = {}};
    do result.parts.push_back(sequence(depth));
    while (take('|'));
    return result;
  }

  Piece sequence(int depth) {
    Piece result;
    while (at_ < text_.size() && !peek('|') && !peek(')')) {
      if (peek('$') || peek('^')) {
        if (depth == 0 && peek('$')) break;  // parse() looks whether it ends the alternative
        refuse("anchors are supported only at the ends of the pattern");
      }
      result.parts.push_back(repeated(atom(depth)));
    }
    return result;
  }

  Piece atom(int depth) {
    if (take('(')) {
      if (take('?')) {
        if (peek('<') && at_ + 1 < text_.size() && text_[at_ + 1] != '=' && text_[at_ + 1] != '!') {
          while (at_ < text_.size() && !peek('>')) ++at_;
          if (!take('>')) refuse("a group's name does not end");
        } else if (!take(':')) {
          refuse("look-around and group options are not supported");
        }
      }
      Piece inside = choice(depth + 1);
      if (!take(')')) refuse("a group does not end");
      return inside;
    }
    if (peek('*') || peek('+') || peek('?')) refuse("a quantifier follows nothing");
    if (take('[')) return {.kind = Piece::Kind::kSet, .set = bracket(), .parts = {}};
    if (take('.')) return {.kind = Piece::Kind::kSet, .set = dot(), .parts = {}};
    if (take('\\')) return {.kind = Piece::Kind::kSet, .set = escape(false), .parts = {}};
    const char32_t c = decode_character(text_, at_);
    return {.kind = Piece::Kind::kSet, .set = CodeSet{{c, c}}, .parts = {}};
  }

  std::optional<uint32_t> decimal() {
    const size_t begin = at_;
    uint32_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      value = std::min(value * 10 + static_cast<uint32_t>(text_[at_] - '0'), kMaxRepeat + 1);
      ++at_;
    }
    return at_ == begin ? std::nullopt : std::optional(value);
  }

  Piece repeated(Piece piece) {
    uint32_t min = 1, max = 1;
    if (take('*')) {
      min = 0, max = Grammar::kUnbounded;
    } else if (take('+')) {
      max = Grammar::kUnbounded;
    } else if (take('?')) {
      min = 0;
    } else if (peek('{')) {
      const size_t begin = at_++;
      const std::optional<uint32_t> low = decimal();
      std::optional<uint32_t> high = low;
      if (take(',')) high = peek('}') ? std::optional(Grammar::kUnbounded) : decimal();
      if (!low || !high || !take('}')) {
        at_ = begin;
        refuse("a \"{\" that is no quantifier must be written \"\\{\"");
      }
      if (*low > kMaxRepeat || (*high > kMaxRepeat && *high != Grammar::kUnbounded))
        refuse("a quantifier above " + std::to_string(kMaxRepeat) + " is not supported");
      if (*low > *high) refuse("a quantifier's bounds are in the wrong order");
      min = *low, max = *high;
    } else {
      return piece;
    }
    take('?');  // lazy or greedy: the same texts match
    if (peek('+') || peek('*') || peek('{')) refuse("a quantifier follows a quantifier");
    Piece result{.kind = Piece::Kind::kRepeat, .set = {}, .parts = {}, .min = min, .max = max};
    result.parts.push_back(std::move(piece));
    return result;
  }

  char32_t hexadecimal(int length) {
    char32_t value = 0;
    for (int i = 0; i < length; ++i, ++at_) {
      const char c = at_ < text_.size() ? text_[at_] : ' ';
      const int digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
      if (digit < 0) refuse("a hexadecimal escape is too short");
      value = value * 16 + static_cast<char32_t>(digit);
    }
    return value;
  }

  // After the backslash.
  CodeSet escape(bool in_bracket) {
    if (at_ == text_.size()) refuse("it ends in a backslash");
    const auto one = [](char32_t c) { return CodeSet{{c, c}}; };
    const char c = text_[at_];
    if (static_cast<uint8_t>(c) >= 0x80) {
      const char32_t code_point = decode_character(text_, at_);
      return one(code_point);
    }
    ++at_;
    switch (c) {
      case 'd':
        return digits();
      case 'D':
        return digits().complement();
      case 'w':
        return word_characters();
      case 'W':
        return word_characters().complement();
      case 's':
        return blanks();
      case 'S':
        return blanks().complement();
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(hexadecimal(2));
      case 'u': {
        char32_t unit = hexadecimal(4);
        if (unit >= 0xd800 && unit <= 0xdbff && text_.substr(at_, 2) == "\\u") {
          at_ += 2;
          const char32_t low = hexadecimal(4);
          if (low >= 0xdc00 && low <= 0xdfff) return one(0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00));
        }
        if (unit >= 0xd800 && unit <= 0xdfff) refuse("half of a surrogate pair is no character");
        return one(unit);
      }
      case 'b':
        if (in_bracket) return one('\b');
        refuse("\\b is not supported");
      case '0':
        if (at_ == text_.size() || text_[at_] < '0' || text_[at_] > '9') return one(0);
        refuse("octal escapes are not supported");
      default:
        break;
    }
    if ((c >= '1' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
      refuse(std::string("\\") + c + " is not supported");
    return one(static_cast<char32_t>(c));
  }

  // After the opening bracket.
  CodeSet bracket() {
    const bool negated = take('^');
    CodeSet result;
    while (!peek(']')) {
      if (at_ == text_.size()) refuse("a class does not end");
      const CodeSet low = bracket_item();
      if (peek('-') && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        const CodeSet high = bracket_item();
        const char32_t first = single(low), last = single(high);
        if (first > last) refuse("a range in a class is in the wrong order");
        result.add(first, last);
        result.remove(0xd800, 0xdfff);
      } else {
        result.add(low);
      }
    }
    ++at_;
    if (negated) result = result.complement();
    if (result.empty()) refuse("an empty class matches nothing");
    return result;
  }

  CodeSet bracket_item() {
    if (at_ == text_.size()) refuse("a class does not end");
    if (take('\\')) return escape(true);
    const char32_t c = decode_character(text_, at_);
    return {{c, c}};
  }

  char32_t single(const CodeSet& set) const {
    if (set.ranges().size() != 1 || set.ranges()[0].low != set.ranges()[0].high)
      refuse("a range in a class needs single characters at its ends");
    return set.ranges()[0].low;
  }

  // From pieces to states: each returns the state after a match that starts in state `from`.
  uint32_t emit(const Piece& piece, uint32_t from) {
    switch (piece.kind) {
      case Piece::Kind::kSet: {
        const uint32_t to = out_.add_state();
        out_.states_[from].on_character.emplace_back(piece.set, to);
        return to;
      }
      case Piece::Kind::kSequence:
        for (const Piece& part : piece.parts) from = emit(part, from);
        return from;
      case Piece::Kind::kChoice: {
        const uint32_t to = out_.add_state();
        for (const Piece& part : piece.parts) {
          const uint32_t start = out_.add_state();
          out_.states_[from].free.push_back(start);
          const uint32_t end = emit(part, start);
          out_.states_[end].free.push_back(to);
        }
        return to;
      }
      case Piece::Kind::kRepeat:
        break;
    }
    const Piece& part = piece.parts[0];
    for (uint32_t i = 0; i < piece.min; ++i) from = emit(part, from);
    const uint32_t to = out_.add_state();
    if (piece.max == Grammar::kUnbounded) {
      const uint32_t loop = out_.add_state();
      out_.states_[from].free.push_back(loop);
      const uint32_t end = emit(part, loop);
      out_.states_[end].free.push_back(loop);
      out_.states_[loop].free.push_back(to);
      return to;
    }
    for (uint32_t i = piece.min; i < piece.max; ++i) {
      out_.states_[from].free.push_back(to);
      from = emit(part, from);
    }
    out_.states_[from].free.push_back(to);
    return to;
  }

  uint32_t emit_anything(uint32_t from) {
    const uint32_t loop = out_.add_state();
    out_.states_[from].free.push_back(loop);
    out_.states_[loop].on_character.emplace_back(any_character(), loop);
    return loop;
  }

  std::string_view text_;
  Pattern& out_;
  size_t at_ = 0;
};

Pattern::Pattern(std::string_view text) {
  if (text.size() > kMaxPatternBytes)
    throw RequestError("a pattern is longer than " + std::to_string(kMaxPatternBytes) + " bytes");
  for (size_t at = 0; at < text.size();) {
    const size_t length = character_length(text.substr(at));
    if (length == 0) throw RequestError("a pattern is not well-formed UTF-8");
    at += length;
  }
  PatternParser(text, *this).parse();
}

uint32_t Pattern::add_state() {
  if (states_.size() >= kMaxPatternStates)
    throw RequestError("a pattern is too large once its repetitions are unrolled");
  states_.emplace_back();
  return static_cast<uint32_t>(states_.size() - 1);
}

namespace {

// One character of the set as a sub-automaton.
Grammar::NodeId character_rule(Grammar& grammar, const CodeSet& set, Pattern::Encoding encoding) {
  const Grammar::NodeId start = grammar.add_node(), end = grammar.add_accepting_node();
  CodeSet plain = set;
  if (encoding == Pattern::Encoding::kRaw) {
    plain.remove(0, 0x1f);
  } else {
    plain.remove(0, 0x1f);
    plain.remove('"', '"');
    plain.remove('\\', '\\');
    const auto escaped = [&](char32_t c, const char* text) {
      if (set.contains(c)) grammar.add_literal(start, text, end);
    };
    escaped('"', "\\\"");
    escaped('\\', "\\\\");
    for (char32_t c = 0; c < 0x20; ++c) {
      switch (c) {
        case '\b':
          escaped(c, "\\b");
          break;
        case '\f':
          escaped(c, "\\f");
          break;
        case '\n':
          escaped(c, "\\n");
          break;
        case '\r':
          escaped(c, "\\r");
          break;
        case '\t':
          escaped(c, "\\t");
          break;
        default: {
          char text[8];
          std::snprintf(text, sizeof text, "\\u%04x", static_cast<unsigned>(c));
          escaped(c, text);
        }
      }
    }
  }
  plain.add_edges(grammar, start, end);
  return start;
}

}  // namespace

void Pattern::add_edges(Grammar& grammar, Grammar::NodeId from, Grammar::NodeId to, uint32_t min, uint32_t max,
                        Encoding encoding) const {
  // Nodes are pairs (state, characters so far); the count stops where it no longer matters.
  const uint32_t layers = max == Grammar::kUnbounded ? min : max;
  std::map<std::pair<uint32_t, uint32_t>, Grammar::NodeId> nodes;
  std::vector<std::pair<uint32_t, uint32_t>> pending;
  const auto node_of = [&](uint32_t state, uint32_t count) {
    const auto [at, is_new] = nodes.try_emplace({state, count}, Grammar::kNone);
    if (is_new) {
      at->second = grammar.add_node();
      pending.emplace_back(state, count);
    }
    return at->second;
  };
  std::vector<std::pair<std::vector<CodeSet::Range>, Grammar::NodeId>> rules;
  const auto rule_of = [&](const CodeSet& set) {
    for (const auto& [ranges, rule] : rules)
      if (ranges == set.ranges()) return rule;
    rules.emplace_back(set.ranges(), character_rule(grammar, set, encoding));
    return rules.back().second;
  };
  grammar.add_epsilon(from, node_of(0, 0));
  while (!pending.empty()) {
    const auto [state, count] = pending.back();
    pending.pop_back();
    const Grammar::NodeId node = nodes.at({state, count});
    if (state == accept_ && count >= min) grammar.add_epsilon(node, to);
    for (const uint32_t next : states_[state].free) grammar.add_epsilon(node, node_of(next, count));
    if (count == layers && max != Grammar::kUnbounded) continue;
    for (const auto& [set, next] : states_[state].on_character)
      grammar.add_call(node, rule_of(set), node_of(next, std::min(count + 1, layers)));
  }
}

}  // namespace calla
