#pragma once
// PrefixCache: snapshots of sequence state, found again by the tokens that led to them.
//
// A recurrent state cannot be rewound, so a cache is only as good as the places where copies of it were kept.
// A *snapshot* is the state after exactly n tokens: a recurrent slot and references to the KV pages of [0,
// n). They hang in a radix tree over token ids: an edge carries a run of tokens, a node may hold a snapshot,
// and the snapshots that are prefixes of a prompt are the ones on its path. Least recently used snapshots
// give way when slots or pages run short. Engine thread only.
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/state_pool.h"

namespace calla {

struct Snapshot {
  std::vector<TokenId> tokens;  // that led to this state
  SlotHandle slot;
  PageList pages;  // of the positions [0, tokens.size())
};

class PrefixCache {
 public:
  PrefixCache() = default;
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  struct Match {
    const Snapshot* snapshot = nullptr;  // the longest usable one, or null; valid until the cache changes
    int shared_tokens = 0;               // tokens that the prompt shares with anything in the tree, snapshot or not
  };

  // The longest snapshot that is a prefix of `tokens` and at most `limit` tokens long. Counts as a use.
  Match find(std::span<const TokenId> tokens, int limit);
  // Adds a snapshot as the most recently used; one for the same tokens is replaced.
  void insert(Snapshot snapshot);
  bool contains(std::span<const TokenId> tokens) const;
  // Drops the least recently used snapshot; false if there is none.
  bool evict_one();
  void clear();

  size_t size() const { return uses_.size(); }
  // Visits all snapshots, most recently used first.
  void for_each(const std::function<void(const Snapshot&)>& visit) const;

 private:
  struct Node {
    std::vector<TokenId> edge;  // tokens from the parent to here; empty only at the root
    Node* parent = nullptr;
    std::map<TokenId, std::unique_ptr<Node>> children;  // by the first token of their edge
    std::unique_ptr<Snapshot> snapshot;
    std::list<Node*>::iterator use;  // into uses_, if there is a snapshot
  };

  // Removes `node` and its now useless ancestors, and joins a node without a snapshot to its only child.
  void prune(Node* node);

  Node root_;
  std::list<Node*> uses_;  // nodes with a snapshot, most recently used first
};

}  // namespace calla
