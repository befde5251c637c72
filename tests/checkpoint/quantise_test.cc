// The quantiser: worked examples, and bounds that hold for any weights.
#include "checkpoint/quantise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace calla {
namespace {

using testing::Each;
using testing::ElementsAre;

// 32 values of which only the first few matter; the rest are `fill`.
std::vector<float> group_of(std::initializer_list<float> values, float fill = 0) {
  std::vector<float> group(values);
  group.resize(32, fill);
  return group;
}
uint32_t code(const QuantisedMatrix& m, size_t i, int bits) {
  const size_t per_word = 32 / static_cast<size_t>(bits);
  return (m.codes[i / per_word] >> (i % per_word * static_cast<size_t>(bits))) & ((1u << bits) - 1);
}

// min -8, max 7: the edge of larger magnitude is the minimum, steps of exactly 1.
TEST(Quantise, PositiveScaleFromTheMinimum) {
  const QuantisedMatrix m = quantise(group_of({-8, 7, 0, 3}), {4, 32});
  EXPECT_EQ(to_float(m.scales[0]), 1.0f);
  EXPECT_EQ(to_float(m.biases[0]), -8.0f);
  EXPECT_EQ(code(m, 0, 4), 0u);
  EXPECT_EQ(code(m, 1, 4), 15u);
  EXPECT_EQ(code(m, 2, 4), 8u);
  EXPECT_EQ(code(m, 3, 4), 11u);
}

// The other way round: the scale is negative, the bias is the maximum.
TEST(Quantise, NegativeScaleFromTheMaximum) {
  const QuantisedMatrix m = quantise(group_of({8, -7, 0, 3}), {4, 32});
  EXPECT_EQ(to_float(m.scales[0]), -1.0f);
  EXPECT_EQ(to_float(m.biases[0]), 8.0f);
  EXPECT_EQ(code(m, 0, 4), 0u);
  EXPECT_EQ(code(m, 1, 4), 15u);
  EXPECT_EQ(code(m, 2, 4), 8u);
  EXPECT_EQ(code(m, 3, 4), 5u);
}

// Equal magnitudes count as the maximum's.
TEST(Quantise, TiesGoToTheMaximum) {
  const QuantisedMatrix m = quantise(group_of({15, -15}), {4, 32});
  EXPECT_LT(to_float(m.scales[0]), 0);
  EXPECT_EQ(to_float(m.biases[0]), 15.0f);
}

// The scale is stretched so that zero has an exact code: edge -10, (max - min) / 15 = 1, rint(-10 / 1) = -10.
TEST(Quantise, ZeroHasAnExactCode) {
  const QuantisedMatrix m = quantise(group_of({-10.25, 4.75}), {4, 32});
  EXPECT_EQ(to_float(m.scales[0]), to_float(to_bf16(1.025f)));
  EXPECT_EQ(to_float(m.biases[0]), -10.25f);
  EXPECT_EQ(code(m, 5, 4), 10u);
}

TEST(Quantise, ConstantGroups) {
  EXPECT_THAT(dequantise(quantise(group_of({}), {4, 32}), {4, 32}), Each(0.0f));
  EXPECT_THAT(dequantise(quantise(group_of({}, 0.5f), {4, 32}), {4, 32}), Each(0.5f));
  EXPECT_THAT(dequantise(quantise(group_of({}, -2.0f), {8, 32}), {8, 32}), Each(-2.0f));
}

TEST(Quantise, PacksFromTheLowBitsUp) {
  std::vector<float> ramp(32);
  for (size_t i = 0; i < 32; ++i) ramp[i] = static_cast<float>(i % 16) - 8;
  EXPECT_THAT(quantise(ramp, {4, 32}).codes, ElementsAre(0x76543210u, 0xfedcba98u, 0x76543210u, 0xfedcba98u));
  for (size_t i = 0; i < 32; ++i) ramp[i] = static_cast<float>(i) - 128;
  ramp[31] = 127;
  EXPECT_EQ(quantise(ramp, {8, 32}).codes[0], 0x03020100u);
}

// Every weight comes back within half a step, plus what rounding scale and bias to bf16 moves it.
TEST(Quantise, RoundTripStaysWithinHalfAStep) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 0.02f);
  for (const QuantSpec spec :
       {QuantSpec{4, 32}, QuantSpec{4, 64}, QuantSpec{4, 128}, QuantSpec{8, 32}, QuantSpec{8, 64}, QuantSpec{8, 128}}) {
    std::vector<float> weights(20 * 128);
    for (float& weight : weights) weight = normal(random);
    const QuantisedMatrix m = quantise(weights, spec);
    const std::vector<float> back = dequantise(m, spec);
    ASSERT_EQ(back.size(), weights.size());
    const float steps = static_cast<float>((1 << spec.bits) - 1);
    for (size_t i = 0; i < weights.size(); ++i) {
      const size_t group = i / static_cast<size_t>(spec.group);
      const float step = std::abs(to_float(m.scales[group]));
      const float bias = std::abs(to_float(m.biases[group]));
      const float rounding = (steps * step + bias) * 0x1p-8f;
      // Stretching the scale can push the far edge out by up to half a step more.
      ASSERT_LE(std::abs(back[i] - weights[i]), step * 1.01f + rounding) << spec.bits << " bits, element " << i;
    }
    double error = 0;
    double size = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      error += std::pow(back[i] - weights[i], 2);
      size += std::pow(weights[i], 2);
    }
    EXPECT_LT(std::sqrt(error / size), spec.bits == 4 ? 0.13 : 0.012) << spec.group;
  }
}

}  // namespace
}  // namespace calla
