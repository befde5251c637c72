#pragma once
// SplitMix64 as a counter-based generator: any element of a random sequence on its own.
#include <cstdint>

namespace calla {

// The number at `index` of the sequence that belongs to `key`.
inline uint64_t random_word(uint64_t key, uint64_t index) {
  uint64_t x = key + 0x9e3779b97f4a7c15u * (index + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace calla
