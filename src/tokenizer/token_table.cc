#include "tokenizer/token_table.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace calla {
namespace {

// Eight bytes at a time through a multiplication whose halves are folded together.
uint64_t hash_bytes(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15u;
  const auto mix = [](uint64_t a) {
    a *= kMultiplier;
    return a ^ (a >> 32);
  };
  uint64_t hash = bytes.size();
  while (bytes.size() >= 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data(), 8);
    hash = mix(hash ^ word);
    bytes.remove_prefix(8);
  }
  uint64_t tail = 0;
  if (bytes.size() >= 4) {  // two reads that may overlap
    uint32_t low = 0, high = 0;
    std::memcpy(&low, bytes.data(), 4);
    std::memcpy(&high, bytes.data() + bytes.size() - 4, 4);
    tail = low | (static_cast<uint64_t>(high) << 32);
  } else {
    for (const char c : bytes) tail = (tail << 8) | static_cast<unsigned char>(c);
  }
  return mix(mix(hash ^ tail));
}

}  // namespace

TokenTable::TokenTable(std::span<const std::string> bytes) {
  size_t total = 0;
  for (const std::string& token : bytes) total += token.size();
  check(total <= std::numeric_limits<uint32_t>::max(), "token bytes fit 32-bit offsets");
  buffer_.reserve(total);
  offsets_.reserve(bytes.size() + 1);
  offsets_.push_back(0);
  for (const std::string& token : bytes) {
    buffer_.append(token);
    offsets_.push_back(static_cast<uint32_t>(buffer_.size()));
  }
  slots_.assign(std::bit_ceil(2 * bytes.size() + 1), -1);
  for (TokenId id = 0; id < size(); ++id) {
    if (this->bytes(id).empty()) continue;
    size_t slot = hash_bytes(this->bytes(id)) & (slots_.size() - 1);
    while (slots_[slot] >= 0 && this->bytes(slots_[slot]) != this->bytes(id)) slot = (slot + 1) & (slots_.size() - 1);
    if (slots_[slot] < 0) {
      slots_[slot] = id;
    } else if (!duplicate_) {
      duplicate_ = id;
    }
  }
}

std::optional<TokenId> TokenTable::find(std::string_view wanted) const {
  if (wanted.empty()) return std::nullopt;
  for (size_t slot = hash_bytes(wanted) & (slots_.size() - 1); slots_[slot] >= 0;
       slot = (slot + 1) & (slots_.size() - 1)) {
    if (bytes(slots_[slot]) == wanted) return slots_[slot];
  }
  return std::nullopt;
}

}  // namespace calla
