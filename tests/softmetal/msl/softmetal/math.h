#pragma once
// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric> for float, half, integers and
// vectors. Results are those of the C library in float; a GPU's differ within the limits of MSL 4 table 8.2.
#include <bit>
#include <cfloat>
#include <climits>
#include <cmath>
#include <limits>

#include "softmetal/vec.h"

inline constexpr float M_PI_F = 3.14159265358979323846f;
inline constexpr float M_PI_2_F = 1.57079632679489661923f;
inline constexpr float M_1_PI_F = 0.318309886183790671538f;
inline constexpr float M_2_PI_F = 0.636619772367581343076f;
inline constexpr float M_E_F = 2.71828182845904523536f;
inline constexpr float M_LOG2E_F = 1.44269504088896340736f;
inline constexpr float M_LN2_F = 0.693147180559945309417f;
inline constexpr float M_LN10_F = 2.30258509299404568402f;
inline constexpr float M_SQRT2_F = 1.41421356237309504880f;
inline constexpr float M_SQRT1_2_F = 0.707106781186547524401f;
#ifndef MAXFLOAT
#define MAXFLOAT FLT_MAX
#endif
#define HALF_MAX (metal::numeric_limits<half>::max())

namespace metal {

// SOFTMETAL_MATH1(name, expression in x): float, half and vectors of them.
#define SOFTMETAL_MATH1(name, expression)                          \
  inline float name(float x) { return expression; }                \
  inline half name(half h) {                                       \
    const float x = h;                                             \
    return half(expression);                                       \
  }                                                                \
  template <class T, int N>                                        \
  inline vec<T, N> name(const vec<T, N>& v) {                      \
    vec<T, N> r;                                                   \
    for (int i = 0; i < N; ++i) r[i] = static_cast<T>(name(v[i])); \
    return r;                                                      \
  }
#define SOFTMETAL_MATH2(name, expression)                                \
  inline float name(float x, float y) { return expression; }             \
  inline half name(half hx, half hy) {                                   \
    const float x = hx, y = hy;                                          \
    return half(expression);                                             \
  }                                                                      \
  template <class T, int N>                                              \
  inline vec<T, N> name(const vec<T, N>& a, const vec<T, N>& b) {        \
    vec<T, N> r;                                                         \
    for (int i = 0; i < N; ++i) r[i] = static_cast<T>(name(a[i], b[i])); \
    return r;                                                            \
  }
#define SOFTMETAL_MATH(one, two)                                                                                     \
  one(exp, std::exp(x)) one(exp2, std::exp2(x)) one(exp10, std::pow(10.0f, x)) one(log, std::log(x))                 \
      one(log2, std::log2(x)) one(log10, std::log10(x)) one(sin, std::sin(x)) one(cos, std::cos(x))                  \
          one(tan, std::tan(x)) one(asin, std::asin(x)) one(acos, std::acos(x)) one(atan, std::atan(x))              \
              one(sinh, std::sinh(x)) one(cosh, std::cosh(x)) one(tanh, std::tanh(x)) one(sqrt, std::sqrt(x))        \
                  one(rsqrt, 1.0f / std::sqrt(x)) one(floor, std::floor(x)) one(ceil, std::ceil(x))                  \
                      one(trunc, std::trunc(x)) one(round, std::round(x)) one(rint, std::nearbyint(x))               \
                          one(fract, std::fmin(x - std::floor(x), 0x1.fffffep-1f)) one(fabs, std::fabs(x))           \
                              two(pow, std::pow(x, y)) two(powr, std::pow(x, y)) two(fmod, std::fmod(x, y))          \
                                  two(fmin, std::fmin(x, y)) two(fmax, std::fmax(x, y)) two(atan2, std::atan2(x, y)) \
                                      two(fdim, std::fdim(x, y)) two(divide, x / y)

SOFTMETAL_MATH(SOFTMETAL_MATH1, SOFTMETAL_MATH2)
SOFTMETAL_MATH2(copysign, std::copysign(x, y))
SOFTMETAL_MATH1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == x ? x : 0.0f)
SOFTMETAL_MATH1(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)

// fast:: and precise:: exist for float only.
#define SOFTMETAL_FLOAT1(name, expression) using metal::name;
#define SOFTMETAL_FLOAT2(name, expression) using metal::name;
namespace fast {
SOFTMETAL_MATH(SOFTMETAL_FLOAT1, SOFTMETAL_FLOAT2)
}
namespace precise {
SOFTMETAL_MATH(SOFTMETAL_FLOAT1, SOFTMETAL_FLOAT2)
}
#undef SOFTMETAL_FLOAT1
#undef SOFTMETAL_FLOAT2
#undef SOFTMETAL_MATH

inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline half fma(half a, half b, half c) { return half(std::fma(float(a), float(b), float(c))); }
inline float mad(float a, float b, float c) { return a * b + c; }
inline half mad(half a, half b, half c) { return half(float(a) * float(b) + float(c)); }
template <class T, int N>
inline vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = T(fma(a[i], b[i], c[i]));
  return r;
}
inline float ldexp(float x, int k) { return std::ldexp(x, k); }
inline half ldexp(half x, int k) { return half(std::ldexp(float(x), k)); }
inline float frexp(float x, int& exponent) { return std::frexp(x, &exponent); }
inline float modf(float x, float& whole) { return std::modf(x, &whole); }
inline float sincos(float x, float& cosine) {
  cosine = std::cos(x);
  return std::sin(x);
}

// min, max, abs, clamp: one overload a scalar type, so that literals and mixed arguments resolve as in MSL.
#define SOFTMETAL_COMMON(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; }           \
  inline T max(T a, T b) { return a < b ? b : a; }           \
  inline T min3(T a, T b, T c) { return min(min(a, b), c); } \
  inline T max3(T a, T b, T c) { return max(max(a, b), c); } \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
SOFTMETAL_COMMON(char)
SOFTMETAL_COMMON(signed char)
SOFTMETAL_COMMON(unsigned char)
SOFTMETAL_COMMON(short)
SOFTMETAL_COMMON(unsigned short)
SOFTMETAL_COMMON(int)
SOFTMETAL_COMMON(unsigned int)
SOFTMETAL_COMMON(long)
SOFTMETAL_COMMON(unsigned long)
#undef SOFTMETAL_COMMON
// With a NaN, the other argument (as fmin, fmax).
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline half min(half a, half b) { return half(std::fmin(float(a), float(b))); }
inline half max(half a, half b) { return half(std::fmax(float(a), float(b))); }
inline bfloat min(bfloat a, bfloat b) { return bfloat(std::fmin(float(a), float(b))); }
inline bfloat max(bfloat a, bfloat b) { return bfloat(std::fmax(float(a), float(b))); }
inline float min3(float a, float b, float c) { return min(min(a, b), c); }
inline float max3(float a, float b, float c) { return max(max(a, b), c); }
inline float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
inline half clamp(half x, half lo, half hi) { return min(max(x, lo), hi); }
inline bfloat clamp(bfloat x, bfloat lo, bfloat hi) { return min(max(x, lo), hi); }
template <class T, int N>
inline vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = min(a[i], b[i]);
  return r;
}
template <class T, int N>
inline vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = max(a[i], b[i]);
  return r;
}
template <class T, int N, class S>
requires(is_scalar_v<S>) inline vec<T, N> min(const vec<T, N>& a, S b) { return min(a, vec<T, N>(b)); }
template <class T, int N, class S>
requires(is_scalar_v<S>) inline vec<T, N> max(const vec<T, N>& a, S b) { return max(a, vec<T, N>(b)); }
template <class T, int N>
inline vec<T, N> clamp(const vec<T, N>& x, const vec<T, N>& lo, const vec<T, N>& hi) {
  return min(max(x, lo), hi);
}
template <class T, int N, class S>
requires(is_scalar_v<S>) inline vec<T, N> clamp(const vec<T, N>& x, S lo, S hi) { return min(max(x, lo), hi); }

inline int abs(int x) { return x < 0 ? -x : x; }
inline short abs(short x) { return static_cast<short>(x < 0 ? -x : x); }
inline long abs(long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return std::fabs(x); }
inline half abs(half x) { return half::from_bits(static_cast<uint16_t>(x.bits & 0x7FFFu)); }
inline bfloat abs(bfloat x) { return bfloat::from_bits(static_cast<uint16_t>(x.bits & 0x7FFFu)); }
template <class T, int N>
inline vec<T, N> abs(const vec<T, N>& a) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = abs(a[i]);
  return r;
}

inline float mix(float x, float y, float a) { return x + (y - x) * a; }
inline float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
inline float smoothstep(float e0, float e1, float x) {
  const float t = clamp((x - e0) / (e1 - e0), 0.0f, 1.0f);
  return t * t * (3.0f - 2.0f * t);
}
template <class T, int N>
inline vec<T, N> mix(const vec<T, N>& x, const vec<T, N>& y, T a) {
  return x + (y - x) * vec<T, N>(a);
}

template <class T>
requires(is_scalar_v<T>) inline T select(T if_false, T if_true, bool c) { return c ? if_true : if_false; }
template <class T, int N>
inline vec<T, N> select(const vec<T, N>& if_false, const vec<T, N>& if_true, const vec<bool, N>& c) {
  vec<T, N> r;
  for (int i = 0; i < N; ++i) r[i] = c[i] ? if_true[i] : if_false[i];
  return r;
}
template <int N>
inline bool all(const vec<bool, N>& v) {
  for (int i = 0; i < N; ++i)
    if (!v[i]) return false;
  return true;
}
template <int N>
inline bool any(const vec<bool, N>& v) {
  for (int i = 0; i < N; ++i)
    if (v[i]) return true;
  return false;
}

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::fabs(x) == std::numeric_limits<float>::infinity(); }
inline bool isfinite(float x) { return std::fabs(x) < std::numeric_limits<float>::infinity(); }
inline bool signbit(float x) { return std::signbit(x); }

template <class T, int N>
inline T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum = T(sum + a[i] * b[i]);
  return sum;
}
template <class T, int N>
inline T length_squared(const vec<T, N>& v) {
  return dot(v, v);
}
template <class T, int N>
inline T length(const vec<T, N>& v) {
  return T(sqrt(dot(v, v)));
}
template <class T, int N>
inline vec<T, N> normalize(const vec<T, N>& v) {
  return v * vec<T, N>(T(rsqrt(dot(v, v))));
}

// --- integers ----------------------------------------------------------------------------------------------------
template <std::integral T>
inline T popcount(T x) {
  return static_cast<T>(std::popcount(static_cast<std::make_unsigned_t<T>>(x)));
}
template <std::integral T>
inline T clz(T x) {
  return static_cast<T>(std::countl_zero(static_cast<std::make_unsigned_t<T>>(x)));
}
template <std::integral T>
inline T ctz(T x) {
  return static_cast<T>(std::countr_zero(static_cast<std::make_unsigned_t<T>>(x)));
}
inline uint mulhi(uint a, uint b) { return static_cast<uint>((static_cast<ulong>(a) * b) >> 32); }
inline int mulhi(int a, int b) { return static_cast<int>((static_cast<long>(a) * b) >> 32); }
inline uint mad24(uint a, uint b, uint c) { return a * b + c; }
inline int mad24(int a, int b, int c) { return a * b + c; }
inline uint mul24(uint a, uint b) { return a * b; }
inline int mul24(int a, int b) { return a * b; }
template <std::integral T>
inline std::make_unsigned_t<T> absdiff(T a, T b) {
  using U = std::make_unsigned_t<T>;
  return static_cast<U>(a > b ? static_cast<U>(a) - static_cast<U>(b) : static_cast<U>(b) - static_cast<U>(a));
}
template <std::integral T>
inline T rotate(T v, T n) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(std::rotl(static_cast<U>(v), static_cast<int>(n)));
}
template <std::integral T>
inline T reverse_bits(T v) {
  using U = std::make_unsigned_t<T>;
  U r = 0;
  for (size_t i = 0; i < sizeof(T) * 8; ++i)
    if ((static_cast<U>(v) >> i) & 1u) r = static_cast<U>(r | (U(1) << (sizeof(T) * 8 - 1 - i)));
  return static_cast<T>(r);
}
template <std::integral T>
inline T extract_bits(T v, uint offset, uint bits) {
  if (bits == 0) return 0;
  const uint width = sizeof(T) * 8;
  return static_cast<T>(static_cast<T>(static_cast<std::make_unsigned_t<T>>(v) << (width - bits - offset)) >>
                        (width - bits));
}
template <std::integral T>
inline T insert_bits(T base, T insert, uint offset, uint bits) {
  using U = std::make_unsigned_t<T>;
  const U mask = static_cast<U>((bits >= sizeof(T) * 8 ? ~U(0) : ((U(1) << bits) - 1u)) << offset);
  return static_cast<T>((static_cast<U>(base) & ~mask) | ((static_cast<U>(insert) << offset) & mask));
}
template <std::integral T>
inline T addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  return b > 0 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
}
template <std::integral T>
inline T subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  return b > 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
}

// --- bits --------------------------------------------------------------------------------------------------------
template <class To, class From>
inline To as_type_of(const From& v) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To r;
  __builtin_memcpy(static_cast<void*>(&r), &v, sizeof r);
  return r;
}
inline float2 unpack_half2(uint v) {
  return float2(float(half::from_bits(static_cast<uint16_t>(v))),
                float(half::from_bits(static_cast<uint16_t>(v >> 16))));
}

#undef SOFTMETAL_MATH1
#undef SOFTMETAL_MATH2

// --- <metal_limits>, <metal_type_traits> --------------------------------------------------------------------------
template <class T>
struct numeric_limits : std::numeric_limits<T> {};
template <>
struct numeric_limits<half> {
  static constexpr bool is_specialized = true;
  static half infinity() { return half::from_bits(0x7C00u); }
  static half quiet_NaN() { return half::from_bits(0x7E00u); }
  static half max() { return half::from_bits(0x7BFFu); }
  static half lowest() { return half::from_bits(0xFBFFu); }
  static half min() { return half::from_bits(0x0400u); }
  static half epsilon() { return half::from_bits(0x1400u); }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bool is_specialized = true;
  static bfloat infinity() { return bfloat::from_bits(0x7F80u); }
  static bfloat quiet_NaN() { return bfloat::from_bits(0x7FC0u); }
  static bfloat max() { return bfloat::from_bits(0x7F7Fu); }
  static bfloat lowest() { return bfloat::from_bits(0xFF7Fu); }
  static bfloat min() { return bfloat::from_bits(0x0080u); }
  static bfloat epsilon() { return bfloat::from_bits(0x3C00u); }
};

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible_v;
using std::is_same;
using std::is_same_v;
using std::remove_const_t;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
using std::void_t;
template <class T>
inline constexpr bool is_floating_point_v = std::is_floating_point_v<T> || SmallFloat<T>;
template <class T>
inline constexpr bool is_integral_v = std::is_integral_v<T>;
template <class T>
inline constexpr bool is_unsigned_v = std::is_unsigned_v<T>;
template <class T>
inline constexpr bool is_signed_v = std::is_signed_v<T> || SmallFloat<T>;
template <class T>
struct remove_addrspace {
  using type = T;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T>
struct make_scalar {
  using type = T;
};
template <class T, int N>
struct make_scalar<vec<T, N>> {
  using type = T;
};
template <class T>
using make_scalar_t = typename make_scalar<T>::type;

}  // namespace metal

// as_type<T>(x) is a keyword-like operator of MSL, outside any namespace.
template <class To, class From>
inline To as_type(const From& v) {
  return metal::as_type_of<To>(v);
}
