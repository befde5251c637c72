#pragma once
// TokenTrie: the bytes of all tokens as a prefix tree, laid out in depth-first order, so that a walk that
// prunes is one forward scan. Built once per model and shared by all requests; read-only after that.
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "grammar/grammar.h"
#include "model/shape.h"

namespace calla {

class TokenTrie {
 public:
  struct Node {
    uint32_t skip;  // index of the first node after this one's subtree
    TokenId token;  // ends here; -1: none
    uint8_t byte;
    uint8_t depth;  // 1: a first byte
  };

  // Tokens that are plain text inside a JSON string or raw text: whole characters, none that could end the
  // text.
  struct PlainText {
    std::vector<TokenId> by_length;     // ascending number of characters
    std::vector<uint32_t> count_up_to;  // [n]: how many have at most n characters
    std::vector<uint32_t> bits;         // all of them as a mask
    std::vector<Node> rest;             // the tree of all other tokens
  };

  // `texts[id]` is the text of token `id`; empty for tokens that must never be generated as text: control
  // tokens such as the end of a turn, and unused ids. `markup` are tokens with a text that stand for
  // themselves only (such as <tool_call>): a grammar asks for them by id, and they are never part of other
  // text. Throws CheckpointError if a byte that JSON needs has no token of its own. Tokens longer than 255
  // bytes are left out.
  TokenTrie(std::span<const std::string_view> texts, std::span<const TokenId> markup);

  size_t vocab() const { return offsets_.size() - 1; }
  std::string_view bytes(TokenId token) const {
    const auto id = static_cast<size_t>(token);
    return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }
  bool is_markup(TokenId token) const;
  // The markup token with this text, or -1.
  TokenId find_markup(std::string_view text) const;

  // The tokens that have `text` somewhere in them, markup excepted.
  std::vector<TokenId> find_containing(std::string_view text) const;

  const std::vector<Node>& nodes() const { return nodes_; }
  const PlainText& plain(Grammar::TextKind kind) const {
    return kind == Grammar::TextKind::kJsonString ? json_string_ : raw_text_;
  }
  // Pairs (token in the tree, another token of the same text).
  const std::vector<std::pair<TokenId, TokenId>>& duplicates() const { return duplicates_; }
  size_t memory_bytes() const;

 private:
  std::vector<Node> build(std::span<const TokenId> sorted) const;
  PlainText split(std::span<const TokenId> sorted, Grammar::TextKind kind) const;

  std::string bytes_;              // all texts, one after the other
  std::vector<uint32_t> offsets_;  // [vocab + 1]
  std::vector<TokenId> markup_;
  std::vector<std::pair<TokenId, TokenId>> duplicates_;
  std::vector<Node> nodes_;
  PlainText json_string_;
  PlainText raw_text_;
};

}  // namespace calla
