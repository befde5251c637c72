#pragma once
// Grammar: which byte strings may be generated, as a pushdown automaton. Nodes are joined by edges that take
// a byte, take one whole token, take nothing, or run a sub-automaton some number of times (which serves as
// call, loop and counter). Built once per request by compile_schema() or forced_call_grammar(), then only
// read.
//
// Reading order of this folder: grammar.h, matcher.h (runs it), token_trie.h + token_constraint.h (from bytes
// to tokens), json_rules.h, schema.h (JSON schema -> grammar), forced_call.h (tools -> grammar),
// reasoning_gate.h.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "model/shape.h"

namespace calla {

class Grammar {
 public:
  using NodeId = uint32_t;
  using EdgeId = uint32_t;
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kUnbounded = UINT32_MAX;

  // How many sub-automata may be nested while generating. Also bounds how deep generated JSON can be.
  static constexpr uint32_t kMaxDepth = 192;

  // Some nodes stand inside text where nearly every token fits; a mask for them starts from a prepared set of
  // tokens.
  enum class TextKind : uint8_t {
    kNone,
    kJsonString,  // the body of the repeat edge that is a string's sequence of characters
    kRawText,     // loops back to itself on every character but a newline
  };

  enum class EdgeKind : uint8_t { kBytes, kToken, kEpsilon, kRepeat };

  struct Edge {
    EdgeKind kind = EdgeKind::kEpsilon;
    uint8_t low = 0, high = 0;  // kBytes: the range taken
    NodeId target = kNone;      // where to go; for kRepeat: after the last round
    NodeId body = kNone;        // kRepeat: start of the sub-automaton, left at an accepting node
    TokenId token = 0;          // kToken
    uint32_t min = 0, max = 0;  // kRepeat: rounds
    EdgeId next = kNone;        // of the same node
  };

  struct Node {
    EdgeId first_edge = kNone;
    uint32_t height = kNone;  // the least nesting in which an accepting node can be reached; kNone: it cannot
    bool accepting = false;   // the sub-automaton may end here
    TextKind text = TextKind::kNone;
  };

  // Throws RequestError once more than `max_nodes` are asked for: the request's schema is too large.
  explicit Grammar(size_t max_nodes = 400'000) : max_nodes_(max_nodes) {}

  NodeId add_node(TextKind text = TextKind::kNone);
  NodeId add_accepting_node();
  void add_bytes(NodeId from, uint8_t low, uint8_t high, NodeId to);
  void add_token(NodeId from, TokenId token, NodeId to);
  void add_epsilon(NodeId from, NodeId to);
  // Runs the sub-automaton at `body` between `min` and `max` times. A body that can be empty must not have a
  // large max.
  void add_repeat(NodeId from, NodeId body, uint32_t min, uint32_t max, NodeId to);
  void add_call(NodeId from, NodeId body, NodeId to) { add_repeat(from, body, 1, 1, to); }
  void add_literal(NodeId from, std::string_view bytes, NodeId to);

  // Call once, when all is built: computes the heights. Returns false if nothing can be generated from
  // `start`.
  bool finish(NodeId start);

  NodeId start() const { return start_; }
  const Node& node(NodeId id) const { return nodes_[id]; }
  const Edge& edge(EdgeId id) const { return edges_[id]; }
  size_t size() const { return nodes_.size(); }
  bool has_token_edges() const { return has_token_edges_; }

 private:
  void add_edge(NodeId from, Edge edge);
  uint32_t height_from_edges(NodeId id) const;

  size_t max_nodes_;
  NodeId start_ = kNone;
  bool has_token_edges_ = false;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
};

}  // namespace calla
