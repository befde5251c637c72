#pragma once
// Affine quantisation as MLX does it: per group of inputs w = scale * code + bias, codes of 4 or 8 bits packed from
// the low bits of 32-bit words up.
#include <cstdint>
#include <span>
#include <vector>

#include "base/bf16.h"
#include "checkpoint/config.h"

namespace calla {

struct QuantisedMatrix {
  std::vector<uint32_t> codes;  // [rows][columns * bits / 32]
  std::vector<bf16> scales;     // [rows][columns / group]
  std::vector<bf16> biases;     // [rows][columns / group]
};

// `weights` is row-major with rows of whole groups, so rows need not be told apart. The group's extreme value of
// larger magnitude gets an exact code, and zero does. Codes are chosen with the scale and bias before they are rounded
// to bf16.
QuantisedMatrix quantise(std::span<const float> weights, const QuantSpec& spec);

// The weights that the codes stand for, with the rounded scales and biases.
std::vector<float> dequantise(const QuantisedMatrix& matrix, const QuantSpec& spec);

}  // namespace calla
