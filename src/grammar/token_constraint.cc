#include "grammar/token_constraint.h"

#include <algorithm>

#include "base/check.h"

namespace calla {
namespace {

void set_bit(std::span<uint32_t> mask, TokenId token) { mask[static_cast<size_t>(token) / 32] |= 1u << (token % 32); }

bool test_bit(std::span<const uint32_t> mask, TokenId token) {
  return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) != 0;
}

}  // namespace

GrammarConstraint::GrammarConstraint(std::shared_ptr<const TokenTrie> trie, std::shared_ptr<const Grammar> grammar,
                                     std::span<const TokenId> stop_tokens)
    : trie_(std::move(trie)),
      stop_tokens_(stop_tokens.begin(), stop_tokens.end()),
      matcher_(std::move(grammar)),
      state_(matcher_.start()),
      path_(257) {}

bool GrammarConstraint::is_stop(TokenId token) const {
  return std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
}

void GrammarConstraint::trim(bool force) {
  const uint64_t before = matcher_.generation();
  state_ = matcher_.trim(state_, force);
  if (matcher_.generation() != before) cache_.clear();
}

bool GrammarConstraint::allowed(std::span<uint32_t> mask) {
  check(mask.size() * 32 >= trie_->vocab(), "the token mask is smaller than the vocabulary");
  std::fill(mask.begin(), mask.end(), 0u);
  trim();
  if (!stopped_) fill(mask);
  const bool may_stop = complete();
  for (TokenId token : stop_tokens_) {
    uint32_t& word = mask[static_cast<size_t>(token) / 32];
    const uint32_t bit = 1u << (token % 32);
    word = may_stop ? word | bit : word & ~bit;
  }
  return true;
}

void GrammarConstraint::fill(std::span<uint32_t> mask) {
  for (const CachedMask& cached : cache_)
    if (cached.state == state_) {
      std::copy(cached.bits.begin(), cached.bits.end(), mask.begin());
      return;
    }
  size_t visited = 0;
  if (const auto text = matcher_.text(state_)) {
    // Plain text fits as a whole; only what is not plain text is looked at.
    const TokenTrie::PlainText& plain = trie_->plain(text->kind);
    if (text->room >= plain.count_up_to.size() - 1) {
      std::copy(plain.bits.begin(), plain.bits.end(), mask.begin());
    } else {
      const uint32_t count = plain.count_up_to[text->room];
      for (uint32_t i = 0; i < count; ++i) set_bit(mask, plain.by_length[i]);
    }
    visited = walk(plain.rest, mask);
  } else {
    visited = walk(trie_->nodes(), mask);
  }
  for (const auto& [token, other] : trie_->duplicates())
    if (test_bit(mask, token)) set_bit(mask, other);
  token_list_.clear();
  matcher_.append_tokens(state_, token_list_);
  for (TokenId token : token_list_) set_bit(mask, token);
  if (visited < kCheapWalk) return;
  CachedMask entry{
      state_, std::vector<uint32_t>(mask.begin(), mask.begin() + static_cast<ptrdiff_t>((trie_->vocab() + 31) / 32))};
  if (cache_.size() < kCachedMasks) {
    cache_.push_back(std::move(entry));
  } else {
    cache_[next_slot_] = std::move(entry);
    next_slot_ = (next_slot_ + 1) % kCachedMasks;
  }
}

size_t GrammarConstraint::walk(std::span<const TokenTrie::Node> nodes, std::span<uint32_t> mask) {
  // First bytes first: if the matcher runs out of states on the way, longer tokens are left out but never the
  // last way forward.
  for (uint32_t i = 0; i < nodes.size(); i = nodes[i].skip) matcher_.step(state_, nodes[i].byte);
  path_[0] = state_;
  size_t visited = 0;
  for (uint32_t i = 0; i < nodes.size(); ++visited) {
    const TokenTrie::Node& node = nodes[i];
    const Matcher::StateId state = matcher_.step(path_[node.depth - 1u], node.byte);
    if (state == Matcher::kDead) {
      i = node.skip;
      continue;
    }
    path_[node.depth] = state;
    if (node.token >= 0) set_bit(mask, node.token);
    ++i;
  }
  return visited;
}

void GrammarConstraint::accept(TokenId token) {
  if (is_stop(token)) {
    check(complete(), "a stop token came before the constrained text was complete");
    stopped_ = true;
    return;
  }
  check(!stopped_ && token >= 0 && static_cast<size_t>(token) < trie_->vocab(), "a token came that the mask left out");
  if (state_ == Matcher::kDead) return;
  const std::string_view bytes = trie_->bytes(token);
  check(!bytes.empty(), "a token without a text came in constrained text");
  // No trim() before: the states that made the mask lead the same way again.
  const auto follow = [&] {
    return trie_->is_markup(token) ? matcher_.step_token(state_, token) : matcher_.step(state_, bytes);
  };
  Matcher::StateId next = follow();
  if (next == Matcher::kDead) {  // or the step's budget was used up by the mask
    trim(true);
    next = follow();
  }
  // A grammar with thousands of readings of the same text may lose the one that the token belongs to. Then nothing fits
  // any more, and the engine ends the request with an error.
  check(next != Matcher::kDead || matcher_.has_dropped(), "a token came that the mask left out");
  state_ = next;
}

bool GrammarConstraint::fits(std::string_view bytes) {
  trim();
  return !stopped_ && matcher_.step(state_, bytes) != Matcher::kDead;
}

void GrammarConstraint::accept_text(std::string_view bytes) {
  trim();
  state_ = matcher_.step(state_, bytes);
  check(state_ != Matcher::kDead, "text was accepted that does not fit the grammar");
}

}  // namespace calla
