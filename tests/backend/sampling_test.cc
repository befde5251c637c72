#include "backend/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <vector>

namespace calla {
namespace {

std::vector<float> flat(float value = 2) { return std::vector<float>(8, value); }

TEST(Sampling, GreedyTakesTheLargestAndTheLowestIdOnTies) {
  std::vector<float> logits = {1, 3, 2, 3};
  EXPECT_EQ(pick_token(logits, {}, {}, {}, 0), 1);
}

TEST(Sampling, PresencePenaltyCountsGeneratedTokensOnce) {
  // Prompt {1, 2}; generated 3, 3, 5, 6 and forty times 7.
  std::vector<TokenCount> counts = {0, kInPrompt, kInPrompt, 2, 0, 1, 1, 40};
  for (float penalty : {0.0f, 1.5f, -2.0f, 2.0f}) {
    SamplingParams params;
    params.presence_penalty = penalty;
    std::vector<float> logits = flat();
    apply_penalties(logits, counts, params);
    for (int token : {3, 5, 6, 7}) EXPECT_EQ(logits[token], 2 - penalty) << token;
    for (int token : {0, 1, 2, 4}) EXPECT_EQ(logits[token], 2) << token;
  }
}

TEST(Sampling, PenaltiesReachGreedy) {
  std::vector<TokenCount> counts = {0, 0, 0, 1};
  SamplingParams params;
  params.presence_penalty = 1.5f;
  std::vector<float> logits = {0, 1, 2, 3};
  EXPECT_EQ(pick_token(logits, params, counts, {}, 0), 2);
}

TEST(Sampling, RepetitionPenaltyCoversThePromptFrequencyDoesNot) {
  std::vector<TokenCount> counts = {kInPrompt, 3, 0};
  SamplingParams params;
  params.repetition_penalty = 2;
  params.frequency_penalty = 0.25f;
  std::vector<float> logits = {4, -1, 4};
  apply_penalties(logits, counts, params);
  EXPECT_FLOAT_EQ(logits[0], 2);
  EXPECT_FLOAT_EQ(logits[1], -2.75f);
  EXPECT_FLOAT_EQ(logits[2], 4);
}

TEST(Sampling, MaskAndNothingAllowed) {
  std::vector<float> logits = {5, 4, 3};
  const std::vector<uint32_t> only_two = {1u << 2}, none = {0};
  EXPECT_EQ(pick_token(logits, {}, {}, only_two, 0), 2);
  logits = {5, 4, 3};
  EXPECT_EQ(pick_token(logits, {}, {}, none, 0), -1);
}

TEST(Sampling, NanIsRefused) {
  std::vector<float> logits = {1, std::numeric_limits<float>::quiet_NaN(), 3};
  EXPECT_EQ(pick_token(logits, {}, {}, {}, 0), -1);
}

std::map<TokenId, int> histogram(const std::vector<float>& base, SamplingParams params, int draws = 20000) {
  std::map<TokenId, int> counts;
  for (int i = 0; i < draws; ++i) {
    std::vector<float> logits = base;
    ++counts[pick_token(logits, params, {}, {}, static_cast<uint64_t>(i))];
  }
  return counts;
}

TEST(Sampling, FollowsTheSoftmax) {
  SamplingParams params;
  params.temperature = 1;
  params.seed = 3;
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  const auto counts = histogram(logits, params);
  EXPECT_NEAR(counts.at(0) / 20000.0, 0.5, 0.015);
  EXPECT_NEAR(counts.at(1) / 20000.0, 0.3, 0.015);
  EXPECT_NEAR(counts.at(2) / 20000.0, 0.2, 0.015);
}

TEST(Sampling, TopKTopPMinPCutTheTail) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  SamplingParams params;
  params.temperature = 1;
  params.top_k = 2;
  EXPECT_EQ(histogram(logits, params).size(), 2u);
  params = {};
  params.temperature = 1;
  params.top_p = 0.75f;
  EXPECT_EQ(histogram(logits, params).size(), 2u);
  params = {};
  params.temperature = 1;
  params.top_p = 0.4f;
  EXPECT_EQ(histogram(logits, params).size(), 1u);
  params = {};
  params.temperature = 1;
  params.min_p = 0.2f;
  EXPECT_EQ(histogram(logits, params).size(), 3u);
}

TEST(Sampling, SameSeedAndPositionSameToken) {
  SamplingParams params;
  params.temperature = 1;
  params.seed = 42;
  for (uint64_t position = 0; position < 50; ++position) {
    std::vector<float> a = flat(), b = flat();
    EXPECT_EQ(pick_token(a, params, {}, {}, position), pick_token(b, params, {}, {}, position));
  }
}

}  // namespace
}  // namespace calla
