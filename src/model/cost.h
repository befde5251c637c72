#pragma once
// Counted costs: the bytes that a decoded token must move and the operations that a prompt token takes. Limits and
// fractions in benchmarks come from these, so they count what the algorithm needs, not what a backend does.
#include <cstdint>

#include "backend/weights.h"
#include "model/shape.h"

namespace calla {

struct DecodeBytes {
  uint64_t weights = 0;  // read once: all matrices, but of the embedding one row and of the experts those chosen
  uint64_t state = 0;    // GDN states (fp32), read and written, and the convolution tails (bf16)
  uint64_t kv = 0;       // keys and values of `context` positions, bf16
  uint64_t total() const { return weights + state + kv; }
};

// One token of one sequence, after `context` tokens.
DecodeBytes decode_bytes(const ModelShape& shape, const ModelWeights& weights, int context);

// Multiply-add work of a prompt of `tokens` tokens from an empty state, 2 operations each, the head for the last token.
double prefill_flops(const ModelShape& shape, const ModelWeights& weights, int tokens);

}  // namespace calla
