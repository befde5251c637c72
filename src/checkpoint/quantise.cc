#include "checkpoint/quantise.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace calla {
namespace {

struct Affine {
  float scale = 0;
  float bias = 0;
};

// The scale's sign is such that the bias is the edge (minimum or maximum) of larger magnitude; then the scale is
// stretched so that a whole number of steps lies between the edge and zero.
Affine fit_group(std::span<const float> group, float steps) {
  const auto [low, high] = std::minmax_element(group.begin(), group.end());
  const bool from_low = std::abs(*low) > std::abs(*high);
  float scale = std::max((*high - *low) / steps, 1e-7f);
  if (!from_low) scale = -scale;
  const float edge = from_low ? *low : *high;
  const float steps_to_edge = std::rint(edge / scale);
  if (steps_to_edge == 0) return {scale, 0};
  return {edge / steps_to_edge, edge};
}

}  // namespace

QuantisedMatrix quantise(std::span<const float> weights, const QuantSpec& spec) {
  const auto group = static_cast<size_t>(spec.group);
  const auto bits = static_cast<size_t>(spec.bits);
  check((bits == 4 || bits == 8) && group > 0 && weights.size() % group == 0, "quantise: whole groups of 4 or 8 bits");
  const size_t per_word = 32 / bits;
  const float steps = static_cast<float>((1u << bits) - 1);
  QuantisedMatrix out;
  out.codes.resize(weights.size() / per_word);
  for (size_t begin = 0; begin < weights.size(); begin += group) {
    const Affine fit = fit_group(weights.subspan(begin, group), steps);
    out.scales.push_back(to_bf16(fit.scale));
    out.biases.push_back(to_bf16(fit.bias));
    for (size_t i = begin; i < begin + group; ++i) {
      const float code = std::clamp(std::rint((weights[i] - fit.bias) / fit.scale), 0.0f, steps);
      out.codes[i / per_word] |= static_cast<uint32_t>(code) << (i % per_word * bits);
    }
  }
  return out;
}

std::vector<float> dequantise(const QuantisedMatrix& matrix, const QuantSpec& spec) {
  const auto bits = static_cast<size_t>(spec.bits);
  const size_t per_word = 32 / bits;
  std::vector<float> out(matrix.codes.size() * per_word);
  for (size_t i = 0; i < out.size(); ++i) {
    const uint32_t code = (matrix.codes[i / per_word] >> (i % per_word * bits)) & ((1u << bits) - 1);
    const size_t group = i / static_cast<size_t>(spec.group);
    out[i] = to_float(matrix.scales[group]) * static_cast<float>(code) + to_float(matrix.biases[group]);
  }
  return out;
}

}  // namespace calla
