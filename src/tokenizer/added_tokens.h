#pragma once
// Finds added tokens (control tokens such as <|im_start|>) in text.
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/shape.h"

namespace calla {

class AddedTokenFinder {
 public:
  // The texts are not empty and differ.
  explicit AddedTokenFinder(std::vector<std::pair<std::string, TokenId>> tokens);

  struct Hit {
    size_t begin = 0, end = 0;  // bytes
    TokenId id = 0;
  };
  // The leftmost added token that lies in text[begin, end); of several that start there, the longest.
  std::optional<Hit> find(std::string_view text, size_t begin, size_t end) const;

 private:
  std::optional<Hit> longest_at(std::string_view text, size_t begin, size_t end) const;

  std::vector<std::pair<std::string, TokenId>> tokens_;  // sorted by text
  std::array<bool, 256> starts_{};                       // first bytes
  std::optional<char> only_start_;                       // if all tokens begin with the same byte
};

}  // namespace calla
