#pragma once
// TokenPicker: pick_token (backend/sampling.h) with the same result and less work. Under a top_k limit only the tokens
// near the top matter: a vectorised pass finds them, and pick_token decides among these few.
#include <cstdint>
#include <span>
#include <vector>

#include "backend/cpu/kernels.h"
#include "backend/sampling.h"

namespace calla::cpu {

class TokenPicker {
 public:
  // As pick_token; `logits` is not changed.
  TokenId pick(std::span<const float> logits, const SamplingParams& params, std::span<const TokenCount> counts,
               std::span<const uint32_t> allowed, uint64_t position, const RowKernels& kernels);

 private:
  TokenId pick_among_best(std::span<const float> logits, const SamplingParams& params, uint64_t position,
                          const RowKernels& kernels);

  std::vector<float> logits_;   // after penalties and mask
  std::vector<float> maxima_;   // of blocks of kMaxBlock logits
  std::vector<float> ordered_;  // the same, partly sorted
  std::vector<float> values_;   // candidates, ascending id
  std::vector<TokenId> ids_;
};

}  // namespace calla::cpu
