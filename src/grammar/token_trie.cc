#include "grammar/token_trie.h"

#include <algorithm>

#include "base/error.h"
#include "grammar/characters.h"

namespace calla {
namespace {

constexpr size_t kMaxTokenBytes = 255;

// Characters of `text` if all of it is plain text of this kind, else -1.
int plain_characters(std::string_view text, Grammar::TextKind kind) {
  int characters = 0;
  for (size_t at = 0; at < text.size(); ++characters) {
    const auto byte = static_cast<uint8_t>(text[at]);
    if (byte < 0x20 && !(kind == Grammar::TextKind::kRawText && byte == '\t')) return -1;
    if (kind == Grammar::TextKind::kJsonString && (byte == '"' || byte == '\\')) return -1;
    const size_t length = character_length(text.substr(at));
    if (length == 0) return -1;
    at += length;
  }
  return characters;
}

}  // namespace

TokenTrie::TokenTrie(std::span<const std::string_view> texts, std::span<const TokenId> markup)
    : markup_(markup.begin(), markup.end()) {
  size_t total = 0;
  for (const std::string_view text : texts) total += text.size();
  bytes_.reserve(total);
  offsets_.reserve(texts.size() + 1);
  offsets_.push_back(0);
  for (const std::string_view text : texts) {
    bytes_ += text;
    offsets_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  std::sort(markup_.begin(), markup_.end());

  std::vector<TokenId> sorted;
  sorted.reserve(texts.size());
  std::array<bool, 256> single{};
  for (TokenId id = 0; id < static_cast<TokenId>(texts.size()); ++id) {
    const std::string_view text = texts[static_cast<size_t>(id)];
    if (text.empty() || text.size() > kMaxTokenBytes || is_markup(id)) continue;
    sorted.push_back(id);
    if (text.size() == 1) single[static_cast<uint8_t>(text[0])] = true;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const bool needed = byte == '\n' || (byte >= 0x20 && byte <= 0x7e) || (byte >= 0x80 && byte <= 0xbf) ||
                        (byte >= 0xc2 && byte <= 0xf4);
    if (needed && !single[static_cast<size_t>(byte)])
      throw CheckpointError("tokenizer: no token stands for the single byte " + std::to_string(byte) +
                            "; constrained output needs a byte-level vocabulary");
  }
  // Sorting by the first eight bytes settles nearly all comparisons without a look at the text.
  std::vector<std::pair<uint64_t, TokenId>> keyed;
  keyed.reserve(sorted.size());
  for (TokenId id : sorted) {
    uint64_t key = 0;
    const std::string_view text = bytes(id);
    for (size_t i = 0; i < 8; ++i) key = key << 8 | (i < text.size() ? static_cast<uint8_t>(text[i]) : 0u);
    keyed.emplace_back(key, id);
  }
  std::sort(keyed.begin(), keyed.end(), [this](const auto& a, const auto& b) {
    if (a.first != b.first) return a.first < b.first;
    const int order = bytes(a.second).compare(bytes(b.second));
    return order != 0 ? order < 0 : a.second < b.second;
  });
  sorted.clear();
  for (const auto& [key, id] : keyed) {
    if (!sorted.empty() && bytes(sorted.back()) == bytes(id))
      duplicates_.emplace_back(sorted.back(), id);
    else
      sorted.push_back(id);
  }
  nodes_ = build(sorted);
  json_string_ = split(sorted, Grammar::TextKind::kJsonString);
  raw_text_ = split(sorted, Grammar::TextKind::kRawText);
}

std::vector<TokenTrie::Node> TokenTrie::build(std::span<const TokenId> sorted) const {
  std::vector<Node> nodes;
  std::vector<uint32_t> open;  // the path to the last node
  std::string_view previous;
  const auto close_to = [&](size_t depth) {
    while (open.size() > depth) {
      nodes[open.back()].skip = static_cast<uint32_t>(nodes.size());
      open.pop_back();
    }
  };
  for (TokenId id : sorted) {
    const std::string_view text = bytes(id);
    const auto [mine, theirs] = std::mismatch(text.begin(), text.end(), previous.begin(), previous.end());
    const auto shared = static_cast<size_t>(mine - text.begin());
    close_to(shared);
    for (size_t i = shared; i < text.size(); ++i) {
      open.push_back(static_cast<uint32_t>(nodes.size()));
      nodes.push_back(
          {.skip = 0, .token = -1, .byte = static_cast<uint8_t>(text[i]), .depth = static_cast<uint8_t>(i + 1)});
    }
    nodes.back().token = id;
    previous = text;
  }
  close_to(0);
  nodes.shrink_to_fit();
  return nodes;
}

TokenTrie::PlainText TokenTrie::split(std::span<const TokenId> sorted, Grammar::TextKind kind) const {
  PlainText plain;
  plain.bits.assign((vocab() + 31) / 32, 0);
  plain.count_up_to.assign(kMaxTokenBytes + 1, 0);
  std::vector<TokenId> rest;
  std::vector<std::pair<uint8_t, TokenId>> found;
  for (TokenId id : sorted) {
    const int characters = plain_characters(bytes(id), kind);
    if (characters < 0) {
      rest.push_back(id);
      continue;
    }
    found.emplace_back(static_cast<uint8_t>(characters), id);
    ++plain.count_up_to[static_cast<size_t>(characters)];
    plain.bits[static_cast<size_t>(id) / 32] |= 1u << (id % 32);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  plain.by_length.reserve(found.size());
  for (const auto& [length, id] : found) plain.by_length.push_back(id);
  while (plain.count_up_to.size() > 1 && plain.count_up_to.back() == 0) plain.count_up_to.pop_back();
  for (size_t n = 1; n < plain.count_up_to.size(); ++n) plain.count_up_to[n] += plain.count_up_to[n - 1];
  plain.rest = build(rest);
  return plain;
}

bool TokenTrie::is_markup(TokenId token) const { return std::binary_search(markup_.begin(), markup_.end(), token); }

TokenId TokenTrie::find_markup(std::string_view text) const {
  for (TokenId id : markup_)
    if (bytes(id) == text) return id;
  return -1;
}

std::vector<TokenId> TokenTrie::find_containing(std::string_view text) const {
  std::vector<TokenId> found;
  for (size_t at = bytes_.find(text); at != std::string::npos; at = bytes_.find(text, at + 1)) {
    const auto next = std::upper_bound(offsets_.begin(), offsets_.end(), static_cast<uint32_t>(at));
    const auto token = static_cast<TokenId>(next - offsets_.begin() - 1);
    const bool is_whole = at + text.size() <= *next;  // not half in this token and half in the next
    if (is_whole && !is_markup(token) && (found.empty() || found.back() != token)) found.push_back(token);
  }
  return found;
}

size_t TokenTrie::memory_bytes() const {
  size_t total = bytes_.capacity() + offsets_.capacity() * sizeof(uint32_t) + nodes_.capacity() * sizeof(Node);
  for (const PlainText* plain : {&json_string_, &raw_text_})
    total += plain->by_length.capacity() * sizeof(TokenId) + plain->bits.capacity() * sizeof(uint32_t) +
             plain->count_up_to.capacity() * sizeof(uint32_t) + plain->rest.capacity() * sizeof(Node);
  return total;
}

}  // namespace calla
