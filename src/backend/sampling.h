#pragma once
// How a token is picked from logits. The definition is exact, so that every backend picks the same token from the
// same logits:
//   1. penalties, on the raw logits (see apply_penalties below for the order);
//   2. tokens outside `allowed` (if given) are dropped;
//   3. temperature == 0: the largest logit, ties to the lowest id;
//   4. otherwise divide by the temperature, softmax over what is left, and order by probability, largest first (ties: lowest id);
//      keep the first top_k (0: all); of those keep p >= min_p * p_max; of those the shortest prefix whose sum
//      reaches top_p of the mass left, at least one; then take the first whose running sum exceeds u * (sum kept),
//      u = draw_uniform(seed, position of the picked token).
#include <cstdint>
#include <span>

#include "model/shape.h"

namespace calla {

struct SamplingParams {
  float temperature = 0;        // 0: greedy
  int top_k = 0;                // 0: no limit
  float top_p = 1;              // in (0, 1]
  float min_p = 0;              // in [0, 1)
  float presence_penalty = 0;   // subtracted once from each token generated so far (prompt excluded)
  float frequency_penalty = 0;  // subtracted per occurrence among the tokens generated so far
  float repetition_penalty =
      1;  // > 0; divides positive / multiplies negative logits of all tokens seen, prompt included
  uint64_t seed = 0;

  bool has_penalties() const { return presence_penalty != 0 || frequency_penalty != 0 || repetition_penalty != 1; }
};

// What a sequence has seen of one token: the low 15 bits count its occurrences among the generated tokens
// (saturating), the high bit says that it occurs in the prompt.
using TokenCount = uint16_t;
inline constexpr TokenCount kInPrompt = 0x8000;

// A uniform number in [0, 1), with 24 random bits: a counter-based generator (SplitMix64 of seed and position), the same on every
// backend and independent of batching.
inline float draw_uniform(uint64_t seed, uint64_t position) {
  uint64_t x = seed + 0x9e3779b97f4a7c15u * (position + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<float>(x >> 40) * 0x1.0p-24f;
}

// Applies the penalties in place: repetition first, then frequency and presence. logits [vocab], counts [vocab].
void apply_penalties(std::span<float> logits, std::span<const TokenCount> counts, const SamplingParams& params);

// log softmax(logits)[token], summed in double. logits [vocab], finite.
double log_probability(std::span<const float> logits, TokenId token);

// Picks a token as defined above. `logits` [vocab] is changed (penalties, masking). `counts` may be empty when there
// are no penalties; `allowed` is a bit per token (bit i % 32 of word i / 32), or empty for no constraint.
// With no token allowed, or with NaN among the logits: returns -1.
TokenId pick_token(std::span<float> logits, const SamplingParams& params, std::span<const TokenCount> counts,
                   std::span<const uint32_t> allowed, uint64_t position);

}  // namespace calla
