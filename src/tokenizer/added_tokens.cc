#include "tokenizer/added_tokens.h"

#include <algorithm>

namespace calla {

AddedTokenFinder::AddedTokenFinder(std::vector<std::pair<std::string, TokenId>> tokens) : tokens_(std::move(tokens)) {
  std::sort(tokens_.begin(), tokens_.end());
  for (const auto& [text, id] : tokens_) starts_[static_cast<unsigned char>(text[0])] = true;
  if (!tokens_.empty() && tokens_.front().first[0] == tokens_.back().first[0]) only_start_ = tokens_.front().first[0];
}

std::optional<AddedTokenFinder::Hit> AddedTokenFinder::find(std::string_view text, size_t begin, size_t end) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t i = begin; i < end; ++i) {
    if (only_start_) {
      i = std::min(text.find(*only_start_, i), end);
      if (i == end) break;
    } else if (!starts_[static_cast<unsigned char>(text[i])]) {
      continue;
    }
    if (const auto hit = longest_at(text, i, end)) return hit;
  }
  return std::nullopt;
}

// Narrows the sorted tokens, byte by byte, to those that the text spells.
std::optional<AddedTokenFinder::Hit> AddedTokenFinder::longest_at(std::string_view text, size_t begin,
                                                                  size_t end) const {
  std::optional<Hit> best;
  auto first = tokens_.begin(), last = tokens_.end();
  for (size_t depth = 0; first != last; ++depth) {
    if (first->first.size() == depth) {  // a token that ends here sorts before those that go on
      best = Hit{begin, begin + depth, first->second};
      ++first;
    }
    if (begin + depth == end) break;
    const auto wanted = static_cast<unsigned char>(text[begin + depth]);
    const auto byte = [depth](const auto& token) { return static_cast<unsigned char>(token.first[depth]); };
    first = std::partition_point(first, last, [&](const auto& token) { return byte(token) < wanted; });
    last = std::partition_point(first, last, [&](const auto& token) { return byte(token) == wanted; });
  }
  return best;
}

}  // namespace calla
