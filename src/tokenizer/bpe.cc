#include "tokenizer/bpe.h"

#include <bit>
#include <functional>
#include <queue>
#include <utility>

#include "base/check.h"

namespace calla {
namespace {

uint64_t pair_key(TokenId left, TokenId right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

uint64_t pair_hash(uint64_t key) {
  key *= 0x9e3779b97f4a7c15u;
  key ^= key >> 32;
  return key * 0xd6e8feb86659fd93u;
}

}  // namespace

Bpe::Bpe(const TokenTable& tokens, const std::array<TokenId, 256>& byte_tokens, std::span<const BpeMerge> merges)
    : tokens_(tokens),
      byte_tokens_(byte_tokens),
      slots_(std::bit_ceil(2 * merges.size() + 2)),
      shift_(64 - std::countr_zero(slots_.size())),
      whole_(std::make_unique<std::atomic<Whole>[]>(static_cast<size_t>(tokens.size()))) {
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t key = pair_key(merges[rank].left, merges[rank].right);
    size_t slot = pair_hash(key) >> shift_;
    while (slots_[slot].found.rank != kNoMerge) {
      check(slots_[slot].pair != key, "a pair merges in one way");
      slot = (slot + 1) & (slots_.size() - 1);
    }
    slots_[slot] = {key, {static_cast<uint32_t>(rank), merges[rank].result}};
  }
}

Bpe::Found Bpe::find(TokenId left, TokenId right) const {
  const uint64_t key = pair_key(left, right);
  size_t slot = pair_hash(key) >> shift_;
  while (slots_[slot].pair != key && slots_[slot].found.rank != kNoMerge) slot = (slot + 1) & (slots_.size() - 1);
  return slots_[slot].found;
}

void Bpe::encode(std::string_view word, std::vector<TokenId>& out) const {
  if (word.size() == 1) {
    out.push_back(byte_tokens_[static_cast<unsigned char>(word[0])]);
    return;
  }
  const auto token = tokens_.find(word);
  if (token) {
    const Whole whole = whole_[*token].load(std::memory_order_relaxed);
    if (whole == Whole::kYes) {
      out.push_back(*token);
      return;
    }
  }
  const size_t before = out.size();
  if (word.size() <= kShortWord) {
    merge_short(word, out);
  } else {
    merge_long(word, out);
  }
  if (token) {
    const bool whole = out.size() == before + 1 && out.back() == *token;
    whole_[*token].store(whole ? Whole::kYes : Whole::kNo, std::memory_order_relaxed);
  }
}

// Keeps the tokens in an array with the merge of each with its right neighbour; every step looks for the
// lowest rank.
void Bpe::merge_short(std::string_view word, std::vector<TokenId>& out) const {
  std::array<TokenId, kShortWord> ids;
  std::array<uint32_t, kShortWord> ranks;  // of the pair (i, i + 1); kNoMerge for the last
  std::array<TokenId, kShortWord> results;
  size_t n = word.size();
  for (size_t i = 0; i < n; ++i) ids[i] = byte_tokens_[static_cast<unsigned char>(word[i])];
  const auto look_up = [&](size_t i) {
    const Found found = i + 1 < n ? find(ids[i], ids[i + 1]) : Found{kNoMerge, 0};
    ranks[i] = found.rank;
    results[i] = found.result;
  };
  for (size_t i = 0; i < n; ++i) look_up(i);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) best = ranks[i] < ranks[best] ? i : best;
    if (ranks[best] == kNoMerge) break;
    ids[best] = results[best];
    for (size_t i = best + 1; i + 1 < n; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
      results[i] = results[i + 1];
    }
    --n;
    look_up(best);
    if (best > 0) look_up(best - 1);
  }
  out.insert(out.end(), ids.begin(), ids.begin() + n);
}

// A linked list of tokens and a heap of possible merges; a heap entry is stale when its place has another
// rank by now.
void Bpe::merge_long(std::string_view word, std::vector<TokenId>& out) const {
  struct Node {
    TokenId id = 0;
    uint32_t prev = 0, next = 0;  // positions; `none` at either end
    uint32_t rank = kNoMerge;     // of the pair with the next node
    TokenId result = 0;
  };
  const auto n = static_cast<uint32_t>(word.size());
  check(n == word.size(), "a word is shorter than 4 GiB");
  const uint32_t none = n;
  std::vector<Node> nodes(n);
  std::vector<uint64_t> entries;  // rank << 32 | position
  entries.reserve(n);
  for (uint32_t i = 0; i < n; ++i) {
    nodes[i].id = byte_tokens_[static_cast<unsigned char>(word[i])];
    nodes[i].prev = i == 0 ? none : i - 1;
    nodes[i].next = i + 1;
  }
  const auto look_up = [&](uint32_t i) {
    Node& node = nodes[i];
    const Found found = node.next != none ? find(node.id, nodes[node.next].id) : Found{kNoMerge, 0};
    node.rank = found.rank;
    node.result = found.result;
    return found.rank != kNoMerge;
  };
  const auto entry = [&](uint32_t i) { return (static_cast<uint64_t>(nodes[i].rank) << 32) | i; };
  for (uint32_t i = 0; i < n; ++i) {
    if (look_up(i)) entries.push_back(entry(i));
  }
  std::priority_queue heap(std::greater<uint64_t>(), std::move(entries));
  while (!heap.empty()) {
    const uint64_t top = heap.top();
    heap.pop();
    const auto i = static_cast<uint32_t>(top);
    Node& node = nodes[i];
    if (node.rank != static_cast<uint32_t>(top >> 32)) continue;
    Node& eaten = nodes[node.next];
    node.id = node.result;
    node.next = eaten.next;
    eaten.rank = kNoMerge;
    if (node.next != none) nodes[node.next].prev = i;
    if (look_up(i)) heap.push(entry(i));
    if (node.prev != none && look_up(node.prev)) heap.push(entry(node.prev));
  }
  for (uint32_t i = 0; i != none; i = nodes[i].next) out.push_back(nodes[i].id);
}

}  // namespace calla
