#include "backend/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"

namespace calla {

void apply_penalties(std::span<float> logits, std::span<const TokenCount> counts, const SamplingParams& params) {
  if (!params.has_penalties()) return;
  check(counts.size() >= logits.size(), "penalties need a count for every token");
  for (size_t i = 0; i < logits.size(); ++i) {
    const TokenCount count = counts[i];
    if (count == 0) continue;
    float& logit = logits[i];
    if (params.repetition_penalty != 1)
      logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    const int generated = count & ~kInPrompt;
    if (generated == 0) continue;
    logit -= params.frequency_penalty * static_cast<float>(generated) + params.presence_penalty;
  }
}

double log_probability(std::span<const float> logits, TokenId token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return logits[static_cast<size_t>(token)] - max - std::log(sum);
}

TokenId pick_token(std::span<float> logits, const SamplingParams& params, std::span<const TokenCount> counts,
                   std::span<const uint32_t> allowed, uint64_t position) {
  apply_penalties(logits, counts, params);
  if (!allowed.empty()) {
    check(allowed.size() * 32 >= logits.size(), "the token mask covers the vocabulary");
    for (size_t i = 0; i < logits.size(); ++i)
      if (!((allowed[i / 32] >> (i % 32)) & 1u)) logits[i] = -INFINITY;
  }
  TokenId best = -1;
  float max = -INFINITY;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > max) {
      max = logits[i];
      best = static_cast<TokenId>(i);
    }
  }
  if (best < 0 || params.temperature <= 0) return best;
  if (max == INFINITY) return best;

  struct Candidate {
    float weight;  // probability, before it is divided by the sum
    TokenId token;
  };
  // A token whose weight underflows to zero can never be drawn; leaving it out keeps the sort short.
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float weight = std::exp((logits[i] - max) / params.temperature);
    if (weight <= 0) continue;
    if (weight >= params.min_p) candidates.push_back({weight, static_cast<TokenId>(i)});
  }
  const auto more_likely = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  };
  size_t keep = candidates.size();
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < keep) {
    keep = static_cast<size_t>(params.top_k);
    std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(keep), candidates.end(),
                      more_likely);
    candidates.resize(keep);
  } else {
    std::sort(candidates.begin(), candidates.end(), more_likely);
  }
  // top_p is a share of the mass that top_k and min_p left.
  double mass = 0;
  for (const Candidate& candidate : candidates) mass += candidate.weight;
  if (params.top_p < 1) {
    double sum = 0;
    keep = 0;
    while (keep < candidates.size()) {
      sum += candidates[keep++].weight;
      if (sum >= static_cast<double>(params.top_p) * mass) break;
    }
    candidates.resize(keep);
    mass = sum;
  }
  const double target = static_cast<double>(draw_uniform(params.seed, position)) * mass;
  double sum = 0;
  for (const Candidate& candidate : candidates) {
    sum += candidate.weight;
    if (sum > target) return candidate.token;
  }
  return candidates.back().token;
}

}  // namespace calla
