#pragma once
// half and bfloat: 16-bit storage, one rounding to nearest even per operation, as MSL 4 section 8 has it.
#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace metal {

namespace detail {

inline float half_bits_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1Fu;
  const uint32_t mantissa = h & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

inline uint16_t float_to_half_bits(float f) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(f, 0));
#else
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal in half: adding 0.5 leaves the rounded mantissa in the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

inline float bfloat_bits_to_float(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

inline uint16_t float_to_bfloat_bits(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace detail

struct bfloat;

struct half {
  uint16_t bits;

  half() = default;
  half(float f) : bits(detail::float_to_half_bits(f)) {}
  half(bfloat) = delete;
  template <std::integral I>
  half(I i) : half(static_cast<float>(i)) {}
  operator float() const { return detail::half_bits_to_float(bits); }
  static half from_bits(uint16_t b) {
    half h;
    h.bits = b;
    return h;
  }

  half operator-() const { return from_bits(static_cast<uint16_t>(bits ^ 0x8000u)); }
  half operator+() const { return *this; }
  half& operator++() { return *this = half(float(*this) + 1.0f); }
  half& operator--() { return *this = half(float(*this) - 1.0f); }
};

// No conversion from float or half without a cast, and no mixing with half (MSL 4 sections 2.22, 3.1).
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  explicit bfloat(float f) : bits(detail::float_to_bfloat_bits(f)) {}
  explicit bfloat(half h) : bfloat(float(h)) {}
  template <std::integral I>
  explicit bfloat(I i) : bfloat(static_cast<float>(i)) {}
  operator float() const { return detail::bfloat_bits_to_float(bits); }
  static bfloat from_bits(uint16_t b) {
    bfloat v;
    v.bits = b;
    return v;
  }

  bfloat operator-() const { return from_bits(static_cast<uint16_t>(bits ^ 0x8000u)); }
  bfloat operator+() const { return *this; }
};

template <class T>
concept SmallFloat = std::same_as<T, half> || std::same_as<T, bfloat>;

// Two of one kind give that kind; with a float the result is a float, with an integer the 16-bit type.
template <SmallFloat T>
inline T operator+(T a, T b) {
  return T(float(a) + float(b));
}
template <SmallFloat T>
inline T operator-(T a, T b) {
  return T(float(a) - float(b));
}
template <SmallFloat T>
inline T operator*(T a, T b) {
  return T(float(a) * float(b));
}
template <SmallFloat T>
inline T operator/(T a, T b) {
  return T(float(a) / float(b));
}

template <SmallFloat T, std::floating_point F>
inline float operator+(T a, F b) {
  return float(a) + float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator-(T a, F b) {
  return float(a) - float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator*(T a, F b) {
  return float(a) * float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator/(T a, F b) {
  return float(a) / float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator+(F a, T b) {
  return float(a) + float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator-(F a, T b) {
  return float(a) - float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator*(F a, T b) {
  return float(a) * float(b);
}
template <SmallFloat T, std::floating_point F>
inline float operator/(F a, T b) {
  return float(a) / float(b);
}

template <SmallFloat T, std::integral I>
inline T operator+(T a, I b) {
  return a + T(b);
}
template <SmallFloat T, std::integral I>
inline T operator-(T a, I b) {
  return a - T(b);
}
template <SmallFloat T, std::integral I>
inline T operator*(T a, I b) {
  return a * T(b);
}
template <SmallFloat T, std::integral I>
inline T operator/(T a, I b) {
  return a / T(b);
}
template <SmallFloat T, std::integral I>
inline T operator+(I a, T b) {
  return T(a) + b;
}
template <SmallFloat T, std::integral I>
inline T operator-(I a, T b) {
  return T(a) - b;
}
template <SmallFloat T, std::integral I>
inline T operator*(I a, T b) {
  return T(a) * b;
}
template <SmallFloat T, std::integral I>
inline T operator/(I a, T b) {
  return T(a) / b;
}

void operator+(half, bfloat) = delete;
void operator-(half, bfloat) = delete;
void operator*(half, bfloat) = delete;
void operator/(half, bfloat) = delete;
void operator+(bfloat, half) = delete;
void operator-(bfloat, half) = delete;
void operator*(bfloat, half) = delete;
void operator/(bfloat, half) = delete;

// half takes any number; bfloat only what converts to it without a cast: bfloat and integers.
template <class S>
concept HalfOperand = std::same_as<S, half> || std::is_arithmetic_v<S>;
template <HalfOperand S>
inline half& operator+=(half& a, S b) {
  return a = half(float(a) + float(b));
}
template <HalfOperand S>
inline half& operator-=(half& a, S b) {
  return a = half(float(a) - float(b));
}
template <HalfOperand S>
inline half& operator*=(half& a, S b) {
  return a = half(float(a) * float(b));
}
template <HalfOperand S>
inline half& operator/=(half& a, S b) {
  return a = half(float(a) / float(b));
}
template <class S>
concept BfloatOperand = std::same_as<S, bfloat> || std::integral<S>;
template <BfloatOperand S>
inline bfloat& operator+=(bfloat& a, S b) {
  return a = bfloat(float(a) + float(b));
}
template <BfloatOperand S>
inline bfloat& operator-=(bfloat& a, S b) {
  return a = bfloat(float(a) - float(b));
}
template <BfloatOperand S>
inline bfloat& operator*=(bfloat& a, S b) {
  return a = bfloat(float(a) * float(b));
}
template <BfloatOperand S>
inline bfloat& operator/=(bfloat& a, S b) {
  return a = bfloat(float(a) / float(b));
}

}  // namespace metal
