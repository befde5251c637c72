#pragma once
// Byte-level BPE: a word's bytes become tokens, then the adjacent pair of the lowest rank merges, the
// leftmost first, until no pair has a merge.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "model/shape.h"
#include "tokenizer/token_table.h"

namespace calla {

struct BpeMerge {
  TokenId left = 0, right = 0, result = 0;
};

class Bpe {
 public:
  // `byte_tokens[b]` is the token of the single byte b; a merge's rank is its index; pairs differ. `tokens`
  // holds the tokens of the model (not the added ones) and must outlive this object.
  Bpe(const TokenTable& tokens, const std::array<TokenId, 256>& byte_tokens, std::span<const BpeMerge> merges);

  // Appends the tokens of one word. Cost: one look-up if the word is a token that it merges to; O(n^2) with a
  // small constant up to kShortWord bytes, O(n log n) beyond. Safe to call from many threads at once.
  void encode(std::string_view word, std::vector<TokenId>& out) const;

  static constexpr size_t kShortWord = 64;

 private:
  struct Found {
    uint32_t rank = 0;
    TokenId result = 0;
  };
  static constexpr uint32_t kNoMerge = ~uint32_t{0};

  Found find(TokenId left, TokenId right) const;
  void merge_short(std::string_view word, std::vector<TokenId>& out) const;
  void merge_long(std::string_view word, std::vector<TokenId>& out) const;

  // The merges in an open-addressing table, at most half full.
  struct Slot {
    uint64_t pair = ~uint64_t{0};
    Found found{kNoMerge, 0};
  };
  const TokenTable& tokens_;
  std::array<TokenId, 256> byte_tokens_;
  std::vector<Slot> slots_;
  int shift_ = 0;

  // Whether merging a token's bytes gives the token itself; found out when the word is first met. Most words
  // of a text are such tokens, and then the look-up is all the work.
  enum class Whole : uint8_t { kUnknown, kYes, kNo };
  mutable std::unique_ptr<std::atomic<Whole>[]> whole_;
};

}  // namespace calla
