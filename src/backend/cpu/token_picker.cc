#include "backend/cpu/token_picker.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace calla::cpu {

TokenId TokenPicker::pick(std::span<const float> logits, const SamplingParams& params,
                          std::span<const TokenCount> counts, std::span<const uint32_t> allowed, uint64_t position,
                          const RowKernels& kernels) {
  SamplingParams rest = params;
  if (params.has_penalties() || !allowed.empty()) {
    logits_.assign(logits.begin(), logits.end());
    apply_penalties(logits_, counts, params);
    for (size_t i = 0; i < allowed.size(); ++i)
      for (size_t bit = 0; bit < 32 && i * 32 + bit < logits_.size(); ++bit)
        if (((allowed[i] >> bit) & 1u) == 0) logits_[i * 32 + bit] = -std::numeric_limits<float>::infinity();
    logits = logits_;
    rest.presence_penalty = rest.frequency_penalty = 0;
    rest.repetition_penalty = 1;
  }
  if (rest.temperature <= 0)
    return static_cast<TokenId>(kernels.argmax(logits.data(), static_cast<int64_t>(logits.size())));
  if (rest.top_k > 0) return pick_among_best(logits, rest, position, kernels);
  if (logits.data() != logits_.data()) logits_.assign(logits.begin(), logits.end());
  return pick_token(logits_, rest, {}, {}, position);
}

TokenId TokenPicker::pick_among_best(std::span<const float> logits, const SamplingParams& params, uint64_t position,
                                     const RowKernels& kernels) {
  const size_t blocks = (logits.size() + kMaxBlock - 1) / kMaxBlock;
  maxima_.resize(blocks);
  if (!kernels.block_maxima(logits.data(), static_cast<int64_t>(logits.size()), maxima_.data())) return -1;
  // The k-th largest maximum of a block is at most the k-th largest logit.
  float least = -std::numeric_limits<float>::infinity();
  if (static_cast<size_t>(params.top_k) <= blocks) {
    ordered_ = maxima_;
    const auto kth = ordered_.begin() + (params.top_k - 1);
    std::nth_element(ordered_.begin(), kth, ordered_.end(), std::greater<>());
    // pick_token orders by weight, and weights of logits that are this close can round to the same number.
    least = *kth - 1e-3f * params.temperature;
  }
  values_.clear();
  ids_.clear();
  for (size_t b = 0; b < blocks; ++b) {
    if (!(maxima_[b] >= least)) continue;
    const size_t end = std::min(logits.size(), (b + 1) * kMaxBlock);
    for (size_t i = b * kMaxBlock; i < end; ++i)
      if (logits[i] >= least) {
        values_.push_back(logits[i]);
        ids_.push_back(static_cast<TokenId>(i));
      }
  }
  const TokenId index = pick_token(values_, params, {}, {}, position);
  return index < 0 ? index : ids_[static_cast<size_t>(index)];
}

}  // namespace calla::cpu
