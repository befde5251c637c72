#include "grammar/reasoning_gate.h"

#include <algorithm>

#include "base/check.h"

namespace calla {

ReasoningGate::ReasoningGate(std::shared_ptr<const TokenTrie> trie, std::unique_ptr<GrammarConstraint> inner,
                             std::span<const TokenId> stop_tokens, ReasoningGateOptions options)
    : trie_(std::move(trie)),
      inner_(std::move(inner)),
      stop_tokens_(stop_tokens.begin(), stop_tokens.end()),
      options_(std::move(options)) {
  check(!options_.close_tag.empty(), "the closing tag of reasoning is empty");
  for (size_t matched = 0; matched < options_.close_tag.size(); ++matched) closers_.push_back(find_closers(matched));
}

size_t ReasoningGate::advance(size_t matched, std::string_view bytes, size_t& at) const {
  const std::string_view tag = options_.close_tag;
  for (; at < bytes.size() && matched < tag.size(); ++at) {
    // The longest beginning of the tag that the text now ends in. The tag is short, so no table.
    std::string seen(tag.substr(0, matched));
    seen.push_back(bytes[at]);
    matched = std::min(seen.size(), tag.size());
    while (!seen.ends_with(tag.substr(0, matched))) --matched;
  }
  return matched;
}

std::vector<ReasoningGate::Closer> ReasoningGate::find_closers(size_t matched) const {
  // A closer begins with the rest of the tag or holds a '<' and all of the tag: only the first kind occurs in
  // real vocabularies, and it stands together in the tree. The second is looked for once, for matched == 0.
  std::vector<Closer> closers;
  const auto consider = [&](TokenId token) {
    size_t at = 0;
    const std::string_view bytes = trie_->bytes(token);
    if (advance(matched, bytes, at) == options_.close_tag.size()) closers.push_back({token, bytes.substr(at)});
  };
  for (const TokenId token : trie_->find_containing(options_.close_tag)) consider(token);
  if (matched == 0) return closers;
  const std::string_view needed = std::string_view(options_.close_tag).substr(matched);
  const std::vector<TokenTrie::Node>& nodes = trie_->nodes();
  for (uint32_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const size_t depth = node.depth;
    if (depth <= needed.size() && node.byte != static_cast<uint8_t>(needed[depth - 1])) {
      i = node.skip;
      continue;
    }
    if (depth >= needed.size() && node.token >= 0) consider(node.token);  // twice is harmless
    ++i;
  }
  return closers;
}

bool ReasoningGate::allowed(std::span<uint32_t> mask) {
  if (closed_) return inner_->allowed(mask);
  std::vector<TokenId> refused;
  for (const Closer& closer : closers_[matched_])
    if (!closer.rest.empty() && !inner_->fits(closer.rest)) refused.push_back(closer.token);
  if (options_.keep_thinking_open) refused.insert(refused.end(), stop_tokens_.begin(), stop_tokens_.end());
  if (refused.empty()) return false;
  std::fill(mask.begin(), mask.end(), 0xffffffffu);
  for (const TokenId token : refused) mask[static_cast<size_t>(token) / 32] &= ~(1u << (token % 32));
  for (const auto& [token, other] : trie_->duplicates())
    if (std::find(refused.begin(), refused.end(), token) != refused.end())
      mask[static_cast<size_t>(other) / 32] &= ~(1u << (other % 32));
  return true;
}

void ReasoningGate::accept(TokenId token) {
  if (closed_) return inner_->accept(token);
  check(!stopped_, "a token came after the end of the reply");
  if (std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end()) {
    stopped_ = true;
    return;
  }
  if (token < 0 || static_cast<size_t>(token) >= trie_->vocab()) return;  // padding of the vocabulary has no text
  size_t at = 0;
  const std::string_view bytes = trie_->bytes(token);
  matched_ = advance(matched_, bytes, at);
  if (matched_ < options_.close_tag.size()) return;
  closed_ = true;
  if (at < bytes.size()) inner_->accept_text(bytes.substr(at));
}

}  // namespace calla
