#include "engine/prefix_cache.h"

#include <algorithm>

#include "base/check.h"

namespace calla {
namespace {

size_t common_prefix(std::span<const TokenId> a, std::span<const TokenId> b) {
  const size_t n = std::min(a.size(), b.size());
  return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(n), b.begin()).first -
                             a.begin());
}

}  // namespace

PrefixCache::Match PrefixCache::find(std::span<const TokenId> tokens, int limit) {
  Match match;
  Node* node = &root_;
  Node* best = nullptr;
  size_t depth = 0;
  for (;;) {
    if (node->snapshot && depth <= static_cast<size_t>(limit)) best = node;
    if (depth == tokens.size()) break;
    const auto child = node->children.find(tokens[depth]);
    if (child == node->children.end()) break;
    const size_t shared = common_prefix(child->second->edge, tokens.subspan(depth));
    depth += shared;
    if (shared < child->second->edge.size()) break;
    node = child->second.get();
  }
  match.shared_tokens = static_cast<int>(depth);
  if (best) {
    uses_.splice(uses_.begin(), uses_, best->use);
    match.snapshot = best->snapshot.get();
  }
  return match;
}

bool PrefixCache::contains(std::span<const TokenId> tokens) const {
  const Node* node = &root_;
  size_t depth = 0;
  while (depth < tokens.size()) {
    const auto child = node->children.find(tokens[depth]);
    if (child == node->children.end()) return false;
    node = child->second.get();
    if (common_prefix(node->edge, tokens.subspan(depth)) < node->edge.size()) return false;
    depth += node->edge.size();
  }
  return node->snapshot != nullptr;
}

void PrefixCache::insert(Snapshot snapshot) {
  check(!snapshot.tokens.empty(), "a snapshot has tokens");
  const std::vector<TokenId>& tokens = snapshot.tokens;
  Node* node = &root_;
  size_t depth = 0;
  while (depth < tokens.size()) {
    auto& child = node->children[tokens[depth]];
    if (!child) {
      child = std::make_unique<Node>();
      child->edge.assign(tokens.begin() + static_cast<std::ptrdiff_t>(depth), tokens.end());
      child->parent = node;
      node = child.get();
      break;
    }
    const size_t shared = common_prefix(child->edge, std::span(tokens).subspan(depth));
    if (shared < child->edge.size()) {  // split the edge
      auto middle = std::make_unique<Node>();
      middle->edge.assign(child->edge.begin(), child->edge.begin() + static_cast<std::ptrdiff_t>(shared));
      middle->parent = node;
      child->edge.erase(child->edge.begin(), child->edge.begin() + static_cast<std::ptrdiff_t>(shared));
      child->parent = middle.get();
      const TokenId first = child->edge.front();
      middle->children[first] = std::move(child);
      child = std::move(middle);
    }
    node = child.get();
    depth += shared;
  }
  if (!node->snapshot) {
    uses_.push_front(node);
    node->use = uses_.begin();
  } else {
    uses_.splice(uses_.begin(), uses_, node->use);
  }
  node->snapshot = std::make_unique<Snapshot>(std::move(snapshot));
}

bool PrefixCache::evict_one() {
  if (uses_.empty()) return false;
  Node* node = uses_.back();
  uses_.pop_back();
  node->snapshot.reset();
  prune(node);
  return true;
}

void PrefixCache::clear() {
  uses_.clear();
  root_.children.clear();
}

void PrefixCache::for_each(const std::function<void(const Snapshot&)>& visit) const {
  for (const Node* node : uses_) visit(*node->snapshot);
}

void PrefixCache::prune(Node* node) {
  while (node != &root_ && !node->snapshot && node->children.empty()) {
    Node* parent = node->parent;
    const TokenId first = node->edge.front();
    parent->children.erase(first);
    node = parent;
  }
  if (node == &root_ || node->snapshot || node->children.size() != 1) return;
  std::unique_ptr<Node> child = std::move(node->children.begin()->second);
  node->children.clear();
  child->edge.insert(child->edge.begin(), node->edge.begin(), node->edge.end());
  child->parent = node->parent;
  node->parent->children[child->edge.front()] = std::move(child);  // destroys `node`
}

}  // namespace calla
