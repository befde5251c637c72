#pragma once
// GrammarConstraint: which tokens may come next so that the text stays within a grammar. The bridge between
// the grammar's bytes and the engine's token ids.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/generation.h"
#include "grammar/grammar.h"
#include "grammar/matcher.h"
#include "grammar/token_trie.h"

namespace calla {

class GrammarConstraint : public TokenConstraint {
 public:
  // `stop_tokens` are allowed exactly when the text is complete.
  GrammarConstraint(std::shared_ptr<const TokenTrie> trie, std::shared_ptr<const Grammar> grammar,
                    std::span<const TokenId> stop_tokens);

  // Always returns true. An empty mask means that the grammar was too ambiguous to follow (see accept). The mask may be longer than the vocabulary of the trie; tokens beyond it are not
  // allowed.
  bool allowed(std::span<uint32_t> mask) override;
  // A token that allowed() left out is a bug of the caller: check() fails.
  void accept(TokenId token) override;

  // Whether the text that was accepted so far is complete.
  bool complete() const { return stopped_ || matcher_.accepting(state_); }
  // Whether these bytes could come next; changes nothing that the caller can see.
  bool fits(std::string_view bytes);
  // Accepts text by its bytes instead of by tokens; it must fit.
  void accept_text(std::string_view bytes);

 private:
  // The last expensive masks, by state.
  struct CachedMask {
    Matcher::StateId state = Matcher::kDead;
    std::vector<uint32_t> bits;
  };
  static constexpr size_t kCachedMasks = 16;
  static constexpr size_t kCheapWalk = 2048;  // tree nodes; a walk below this is not worth a cache entry

  void trim(bool force = false);
  bool is_stop(TokenId token) const;
  void fill(std::span<uint32_t> mask);
  size_t walk(std::span<const TokenTrie::Node> nodes, std::span<uint32_t> mask);

  std::shared_ptr<const TokenTrie> trie_;
  std::vector<TokenId> stop_tokens_;
  Matcher matcher_;
  Matcher::StateId state_;
  bool stopped_ = false;
  std::vector<CachedMask> cache_;
  size_t next_slot_ = 0;
  std::vector<Matcher::StateId> path_;  // walk(): the state at each depth
  std::vector<TokenId> token_list_;
};

}  // namespace calla
