#pragma once
// TokenTable: the bytes of every token, side by side in one buffer, and the way back from bytes to token.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/shape.h"

namespace calla {

class TokenTable {
 public:
  TokenTable() : TokenTable(std::span<const std::string>()) {}
  // `bytes[id]` is the token's bytes; empty where an id has no token.
  explicit TokenTable(std::span<const std::string> bytes);

  // An id whose bytes a lower id has too, if there is one; find() gives the lower.
  std::optional<TokenId> duplicate() const { return duplicate_; }

  int size() const { return static_cast<int>(offsets_.size()) - 1; }
  // The empty view for an id that has no token.
  std::string_view bytes(TokenId id) const {
    if (id < 0 || id >= size()) return {};
    return std::string_view(buffer_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }
  std::optional<TokenId> find(std::string_view bytes) const;

 private:
  std::string buffer_;
  std::vector<uint32_t> offsets_;  // size() + 1
  std::vector<TokenId> slots_;     // open addressing, a power of two, at most half full; -1: free
  std::optional<TokenId> duplicate_;
};

}  // namespace calla
