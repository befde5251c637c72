// TokenPicker against its definition, pick_token, on logits with ties, near ties, infinities and penalties.
#include "backend/cpu/token_picker.h"

#include <gtest/gtest.h>

#include <cmath>

namespace calla::cpu {
namespace {

std::vector<float> random_logits(size_t n, uint64_t seed, float step) {
  std::vector<float> logits(n);
  for (size_t i = 0; i < n; ++i) {
    const float u = draw_uniform(seed, 2 * i) + draw_uniform(seed, 2 * i + 1) - 1;
    logits[i] = step > 0 ? std::round(12 * u / step) * step : 12 * u;
  }
  return logits;
}

TEST(TokenPicker, AgreesWithPickToken) {
  for (const bool avx512 : {true, false}) {
    const Kernels kernels = choose_kernels(avx512);
    TokenPicker picker;
    int differ = 0, total = 0;
    for (size_t vocab : {1u, 5u, 63u, 64u, 65u, 1000u, 5003u})
      for (float step : {0.0f, 1.0f, 1e-5f})
        for (int top_k : {0, 1, 3, 20, 2000})
          for (float temperature : {0.0f, 1e-3f, 0.7f, 50.0f})
            for (int variant = 0; variant < 4; ++variant) {
              const uint64_t seed = vocab * 31 + static_cast<uint64_t>(top_k);
              const std::vector<float> logits = random_logits(vocab, seed, step);
              SamplingParams params;
              params.temperature = temperature;
              params.top_k = top_k;
              params.seed = seed;
              if (variant == 1) params.top_p = 0.8f, params.min_p = 0.02f;
              std::vector<TokenCount> counts(vocab);
              if (variant == 2) {
                params.presence_penalty = 1.5f;
                params.repetition_penalty = 1.2f;
                for (size_t i = 0; i < vocab; i += 3) counts[i] = i % 2 ? TokenCount{2} : kInPrompt;
              }
              std::vector<uint32_t> allowed;
              if (variant == 3) allowed.assign((vocab + 31) / 32, 0x80402010u);
              for (uint64_t position = 0; position < 3; ++position, ++total) {
                std::vector<float> copy = logits;
                const TokenId expected = pick_token(copy, params, counts, allowed, position);
                differ += picker.pick(logits, params, counts, allowed, position, kernels.row) != expected;
              }
            }
    EXPECT_EQ(differ, 0) << "of " << total << ", " << kernels.name;
  }
}

TEST(TokenPicker, NanAndInfinity) {
  const Kernels kernels = choose_kernels();
  TokenPicker picker;
  SamplingParams params;
  for (const int top_k : {0, 5})
    for (const float temperature : {0.0f, 1.0f}) {
      params.top_k = top_k;
      params.temperature = temperature;
      std::vector<float> logits = random_logits(300, 1, 0);
      logits[77] = INFINITY;
      EXPECT_EQ(picker.pick(logits, params, {}, {}, 0, kernels.row), 77);
      logits[299] = NAN;
      EXPECT_EQ(picker.pick(logits, params, {}, {}, 0, kernels.row), -1);
      logits.assign(300, -INFINITY);
      EXPECT_EQ(picker.pick(logits, params, {}, {}, 0, kernels.row), -1);
    }
}

}  // namespace
}  // namespace calla::cpu
