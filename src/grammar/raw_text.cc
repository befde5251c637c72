#include "grammar/raw_text.h"

#include <array>
#include <deque>
#include <map>
#include <string_view>
#include <vector>

#include "grammar/code_set.h"

namespace calla {
namespace {

// The words to look out for. Reading the first ends the text; the others must not be completed.
constexpr std::array<std::string_view, 5> kWords = {"\n</parameter>", "</parameter>", "\n</function>", "\n</tool_call>",
                                                    "\n<parameter="};

// A state of the Aho-Corasick automaton of kWords: the longest beginning of a word that the text ends in.
struct State {
  std::map<uint8_t, size_t> next;
  size_t fallback = 0;  // the longest proper suffix that is a beginning too
  bool ends_text = false, is_forbidden = false;
};

std::vector<State> build_states() {
  std::vector<State> states(1);
  for (size_t word = 0; word < kWords.size(); ++word) {
    size_t at = 0;
    for (const char c : kWords[word]) {
      const auto [edge, is_new] = states[at].next.try_emplace(static_cast<uint8_t>(c), states.size());
      at = edge->second;
      if (is_new) states.emplace_back();
    }
    (word == 0 ? states[at].ends_text : states[at].is_forbidden) = true;
  }
  std::deque<size_t> pending{0};
  while (!pending.empty()) {
    const size_t at = pending.front();
    pending.pop_front();
    for (const auto& [byte, child] : states[at].next) {
      if (at != 0) {
        size_t suffix = states[at].fallback;
        while (suffix != 0 && !states[suffix].next.contains(byte)) suffix = states[suffix].fallback;
        const auto found = states[suffix].next.find(byte);
        states[child].fallback = found == states[suffix].next.end() ? 0 : found->second;
      }
      pending.push_back(child);
    }
  }
  return states;
}

size_t follow(const std::vector<State>& states, size_t at, uint8_t byte) {
  for (;;) {
    const auto found = states[at].next.find(byte);
    if (found != states[at].next.end()) return found->second;
    if (at == 0) return 0;
    at = states[at].fallback;
  }
}

bool is_plain(int byte) { return byte >= 0x20 || byte == '\t' || byte == '\n' || byte == '\r'; }

}  // namespace

Grammar::NodeId add_raw_text(Grammar& grammar) {
  const std::vector<State> states = build_states();
  std::vector<Grammar::NodeId> nodes;
  for (size_t i = 0; i < states.size(); ++i)
    nodes.push_back(grammar.add_node(i == 0 ? Grammar::TextKind::kRawText : Grammar::TextKind::kNone));
  const Grammar::NodeId end = grammar.add_accepting_node();
  const CodeSet beyond_ascii{{0x80, CodeSet::kMax}};
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].ends_text || states[i].is_forbidden) continue;
    beyond_ascii.add_edges(grammar, nodes[i], nodes[0]);
    for (int byte = 0; byte < 0x80; ++byte) {
      if (!is_plain(byte)) continue;
      const auto value = static_cast<uint8_t>(byte);
      const State& target = states[follow(states, i, value)];
      if (target.is_forbidden) continue;
      grammar.add_bytes(nodes[i], value, value, target.ends_text ? end : nodes[follow(states, i, value)]);
    }
  }
  return nodes[follow(states, 0, '\n')];
}

}  // namespace calla
