#pragma once
// half: IEEE binary16, the element of the KV cache. Storage only. Eight times finer than bf16; keys are normalised and
// values small, so its range (65504) is wide enough.
#include <algorithm>
#include <bit>
#include <cstdint>

namespace calla::cpu {

struct half {
  uint16_t bits = 0;
};
static_assert(sizeof(half) == 2);

inline float to_float(half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400u) {  // zero and subnormal: a multiple of 2^-24
    const float x = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -x : x;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

// Rounds to nearest, ties to even; what is out of range becomes the largest number. NaN stays NaN.
inline half to_half(float value) {
  constexpr uint32_t kLargest = 0x477fe000u;  // 65504
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return half{static_cast<uint16_t>(sign | 0x7e00u)};
  magnitude = std::min(magnitude, kLargest);
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    return half{static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(sum) - 0x3f000000u))};
  }
  magnitude += 0xfffu + (magnitude >> 13 & 1u);
  return half{static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13))};
}

}  // namespace calla::cpu
