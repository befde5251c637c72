#pragma once
// ReasoningGate: lets the model think freely and constrains what comes after </think>. Masking the first
// token of an open think block would make the closing tag unreachable, or put the answer into the reasoning.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/generation.h"
#include "grammar/token_constraint.h"
#include "grammar/token_trie.h"

namespace calla {

struct ReasoningGateOptions {
  std::string close_tag = "</think>";
  // Do not let the reply end inside the think block, which would leave the constrained part empty.
  bool keep_thinking_open = false;
};

class ReasoningGate : public TokenConstraint {
 public:
  // For a prompt that ends inside an open think block. `inner` constrains what follows the closing tag, blank
  // space included; the tag is one markup token, or text spread over tokens, even with the answer's start
  // behind it.
  ReasoningGate(std::shared_ptr<const TokenTrie> trie, std::unique_ptr<GrammarConstraint> inner,
                std::span<const TokenId> stop_tokens, ReasoningGateOptions options = {});

  // False (all allowed) inside the think block, but where a token could carry the tag's end and a wrong
  // answer.
  bool allowed(std::span<uint32_t> mask) override;
  void accept(TokenId token) override;

  bool is_thinking() const { return !closed_; }
  const GrammarConstraint& inner() const { return *inner_; }

 private:
  // Tokens that complete the tag after `matched` of its bytes, with what they carry behind it.
  struct Closer {
    TokenId token;
    std::string_view rest;
  };
  std::vector<Closer> find_closers(size_t matched) const;
  // How many bytes of the tag stand at the end of the text; sets `at` past the tag and returns its size when
  // complete.
  size_t advance(size_t matched, std::string_view bytes, size_t& at) const;

  std::shared_ptr<const TokenTrie> trie_;
  std::unique_ptr<GrammarConstraint> inner_;
  std::vector<TokenId> stop_tokens_;
  ReasoningGateOptions options_;
  std::vector<std::vector<Closer>> closers_;  // by bytes matched so far
  size_t matched_ = 0;
  bool closed_ = false;
  bool stopped_ = false;
};

}  // namespace calla
