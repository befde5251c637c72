#include "grammar/grammar.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace calla {

Grammar::NodeId Grammar::add_node(TextKind text) {
  if (nodes_.size() >= max_nodes_)
    throw RequestError("the schema is too large: it needs more than " + std::to_string(max_nodes_) +
                       " automaton states; shorten its enums, patterns or length limits");
  nodes_.push_back({.text = text});
  return static_cast<NodeId>(nodes_.size() - 1);
}

Grammar::NodeId Grammar::add_accepting_node() {
  const NodeId id = add_node();
  nodes_[id].accepting = true;
  return id;
}

void Grammar::add_edge(NodeId from, Edge edge) {
  edge.next = nodes_[from].first_edge;
  nodes_[from].first_edge = static_cast<EdgeId>(edges_.size());
  edges_.push_back(edge);
}

void Grammar::add_bytes(NodeId from, uint8_t low, uint8_t high, NodeId to) {
  add_edge(from, {.kind = EdgeKind::kBytes, .low = low, .high = high, .target = to});
}

void Grammar::add_token(NodeId from, TokenId token, NodeId to) {
  has_token_edges_ = true;
  add_edge(from, {.kind = EdgeKind::kToken, .target = to, .token = token});
}

void Grammar::add_epsilon(NodeId from, NodeId to) { add_edge(from, {.kind = EdgeKind::kEpsilon, .target = to}); }

void Grammar::add_repeat(NodeId from, NodeId body, uint32_t min, uint32_t max, NodeId to) {
  if (min > max) return;  // no number of rounds will do
  add_edge(from, {.kind = EdgeKind::kRepeat, .target = to, .body = body, .min = min, .max = max});
}

void Grammar::add_literal(NodeId from, std::string_view bytes, NodeId to) {
  if (bytes.empty()) return add_epsilon(from, to);
  for (size_t i = 0; i < bytes.size(); ++i) {
    const NodeId next = i + 1 == bytes.size() ? to : add_node();
    const auto byte = static_cast<uint8_t>(bytes[i]);
    add_bytes(from, byte, byte, next);
    from = next;
  }
}

uint32_t Grammar::height_from_edges(NodeId id) const {
  if (nodes_[id].accepting) return 0;
  uint32_t best = kNone;
  for (EdgeId e = nodes_[id].first_edge; e != kNone; e = edges_[e].next) {
    const Edge& edge = edges_[e];
    uint32_t height = nodes_[edge.target].height;
    if (edge.kind == EdgeKind::kRepeat && edge.min > 0) {
      const uint32_t body = nodes_[edge.body].height;
      height = body == kNone || height == kNone ? kNone : std::max(body + 1, height);
    }
    best = std::min(best, height);
  }
  return best;
}

bool Grammar::finish(NodeId start) {
  start_ = start;
  // Heights only fall, from "unreachable" down; a node is looked at again when one that it leads to has
  // fallen.
  std::vector<uint32_t> offsets(nodes_.size() + 1, 0);  // predecessors, grouped by node
  std::vector<NodeId> origin(edges_.size());
  for (NodeId id = 0; id < nodes_.size(); ++id)
    for (EdgeId e = nodes_[id].first_edge; e != kNone; e = edges_[e].next) origin[e] = id;
  const auto for_each_arrow = [&](auto&& visit) {
    for (EdgeId e = 0; e < edges_.size(); ++e) {
      visit(origin[e], edges_[e].target);
      if (edges_[e].kind == EdgeKind::kRepeat) visit(origin[e], edges_[e].body);
    }
  };
  for_each_arrow([&](NodeId, NodeId to) { ++offsets[to + 1]; });
  for (size_t i = 1; i < offsets.size(); ++i) offsets[i] += offsets[i - 1];
  std::vector<NodeId> predecessors(offsets.back());
  std::vector<uint32_t> cursor(offsets.begin(), offsets.end() - 1);
  for_each_arrow([&](NodeId from, NodeId to) { predecessors[cursor[to]++] = from; });

  std::vector<NodeId> pending;
  for (NodeId id = 0; id < nodes_.size(); ++id)
    if (nodes_[id].accepting) pending.push_back(id);
  while (!pending.empty()) {
    const NodeId id = pending.back();
    pending.pop_back();
    const uint32_t height = height_from_edges(id);
    if (height >= nodes_[id].height) continue;
    nodes_[id].height = height;
    pending.insert(pending.end(), predecessors.begin() + offsets[id], predecessors.begin() + offsets[id + 1]);
  }
  return nodes_[start].height <= kMaxDepth;
}

}  // namespace calla
