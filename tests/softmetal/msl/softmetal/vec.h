#pragma once
// vec<T, n>: element-wise operators, splats, swizzles, and the packed forms. Sizes and alignments are MSL's: a
// 3-vector takes the room of a 4-vector. The translator turns v.xy into v.template swizzle<0, 1>().
#include <cstddef>
#include <utility>

#include "softmetal/half.h"

namespace metal {

template <class T, int N>
struct vec;
template <class T, int N>
struct packed_vec;

template <class T>
inline constexpr bool is_scalar_v = std::is_arithmetic_v<T> || SmallFloat<T>;

namespace detail {
template <class T>
struct components : std::integral_constant<int, is_scalar_v<T> ? 1 : 0> {};
template <class T, int N>
struct components<vec<T, N>> : std::integral_constant<int, N> {};
template <class T, int N>
struct components<packed_vec<T, N>> : std::integral_constant<int, N> {};

template <class T>
constexpr size_t vec_align(int n) {
  return sizeof(T) * static_cast<size_t>(n == 3 ? 4 : n);
}

template <class T, int N>
struct alignas(vec_align<T>(N)) vec_storage {
  T e[N];
};
template <class T>
struct alignas(vec_align<T>(2)) vec_storage<T, 2> {
  T x, y;
};
template <class T>
struct alignas(vec_align<T>(3)) vec_storage<T, 3> {
  T x, y, z;
};
template <class T>
struct alignas(vec_align<T>(4)) vec_storage<T, 4> {
  T x, y, z, w;
};

template <class A, class B>
using common_small = std::conditional_t<std::is_same_v<A, B>, A, float>;
}  // namespace detail

// Reference to some components, for assignments such as v.xy = w.
template <class V, int... I>
struct swizzle_reference {
  V& v;
  using value_type = vec<typename V::element, sizeof...(I)>;
  operator value_type() const { return value_type(v[I]...); }
  void operator=(const value_type& o) {
    int k = 0;
    ((v[I] = o[k++]), ...);
  }
  void operator+=(const value_type& o) { *this = value_type(*this) + o; }
  void operator-=(const value_type& o) { *this = value_type(*this) - o; }
  void operator*=(const value_type& o) { *this = value_type(*this) * o; }
  void operator/=(const value_type& o) { *this = value_type(*this) / o; }
};

template <class T, int N>
struct vec : detail::vec_storage<T, N> {
  using element = T;
  static constexpr int size = N;
  using Indices = std::make_integer_sequence<int, N>;

  vec() = default;

  // A scalar fills all components.
  template <class S>
  requires(is_scalar_v<S> && (std::convertible_to<S, T>)) vec(S s) { fill(static_cast<T>(s), Indices{}); }
  template <class S>
  requires(is_scalar_v<S> && !std::convertible_to<S, T>) explicit vec(S s) { fill(static_cast<T>(s), Indices{}); }
  template <class U>
  explicit vec(const vec<U, N>& o) {
    for (int i = 0; i < N; ++i) (*this)[i] = static_cast<T>(o[i]);
  }
  vec(const packed_vec<T, N>& o) {
    for (int i = 0; i < N; ++i) (*this)[i] = o[i];
  }
  // Scalars and vectors, N components in all.
  template <class... A>
  requires(sizeof...(A) >= 2 && (detail::components<A>::value + ...) == N) vec(const A&... a) {
    int k = 0;
    (append(a, k), ...);
  }

  T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; }
  const T& operator[](int i) const { return reinterpret_cast<const T*>(this)[i]; }

  template <int... I>
  vec<T, sizeof...(I)> swizzle() const {
    static_assert(((I < N) && ...), "swizzle component out of range");
    return vec<T, sizeof...(I)>((*this)[I]...);
  }
  template <int... I>
  swizzle_reference<vec, I...> swizzle_ref() {
    static_assert(((I < N) && ...), "swizzle component out of range");
    return {*this};
  }

  template <class F>
  friend vec zip(const vec& a, const vec& b, F f) {
    vec r;
    [&]<int... I>(std::integer_sequence<int, I...>) { ((r[I] = static_cast<T>(f(a[I], b[I]))), ...); }
    (Indices{});
    return r;
  }
  template <class F>
  friend vec<bool, N> compare(const vec& a, const vec& b, F f) {
    vec<bool, N> r;
    for (int i = 0; i < N; ++i) r[i] = f(a[i], b[i]);
    return r;
  }

  friend vec operator+(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x + y; });
  }
  friend vec operator-(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x - y; });
  }
  friend vec operator*(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x * y; });
  }
  friend vec operator/(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x / y; });
  }
  friend vec operator%(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x % y; });
  }
  friend vec operator&(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x & y; });
  }
  friend vec operator|(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x | y; });
  }
  friend vec operator^(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x ^ y; });
  }
  friend vec operator<<(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x << y; });
  }
  friend vec operator>>(const vec& a, const vec& b) {
    return zip(a, b, [](T x, T y) { return x >> y; });
  }
  friend vec<bool, N> operator==(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x == y; });
  }
  friend vec<bool, N> operator!=(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x != y; });
  }
  friend vec<bool, N> operator<(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x < y; });
  }
  friend vec<bool, N> operator<=(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x <= y; });
  }
  friend vec<bool, N> operator>(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x > y; });
  }
  friend vec<bool, N> operator>=(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x >= y; });
  }
  friend vec<bool, N> operator&&(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x && y; });
  }
  friend vec<bool, N> operator||(const vec& a, const vec& b) {
    return compare(a, b, [](T x, T y) { return x || y; });
  }
  friend vec<bool, N> operator!(const vec& a) {
    return compare(a, a, [](T x, T) { return !x; });
  }
  friend vec operator-(const vec& a) {
    return zip(a, a, [](T x, T) { return -x; });
  }
  friend vec operator+(const vec& a) { return a; }
  friend vec operator~(const vec& a) {
    return zip(a, a, [](T x, T) { return ~x; });
  }

  vec& operator+=(const vec& b) { return *this = *this + b; }
  vec& operator-=(const vec& b) { return *this = *this - b; }
  vec& operator*=(const vec& b) { return *this = *this * b; }
  vec& operator/=(const vec& b) { return *this = *this / b; }
  vec& operator%=(const vec& b) { return *this = *this % b; }
  vec& operator&=(const vec& b) { return *this = *this & b; }
  vec& operator|=(const vec& b) { return *this = *this | b; }
  vec& operator^=(const vec& b) { return *this = *this ^ b; }
  vec& operator<<=(const vec& b) { return *this = *this << b; }
  vec& operator>>=(const vec& b) { return *this = *this >> b; }

 private:
  template <int... I>
  void fill(T s, std::integer_sequence<int, I...>) {
    (((*this)[I] = s), ...);
  }
  template <class S>
  void append(const S& s, int& k) {
    if constexpr (is_scalar_v<S>) {
      (*this)[k++] = static_cast<T>(s);
    } else {
      for (int i = 0; i < detail::components<S>::value; ++i) (*this)[k++] = static_cast<T>(s[i]);
    }
  }
};

template <class T, int N>
struct packed_vec {
  T e[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& o) {
    for (int i = 0; i < N; ++i) e[i] = o[i];
  }
  T& operator[](int i) { return e[i]; }
  const T& operator[](int i) const { return e[i]; }
};

// One name per element type and width, as in MSL: float4, packed_float4.
#define SOFTMETAL_VECTOR_NAMES(type, name)      \
  using name##2 = vec<type, 2>;                 \
  using name##3 = vec<type, 3>;                 \
  using name##4 = vec<type, 4>;                 \
  using packed_##name##2 = packed_vec<type, 2>; \
  using packed_##name##3 = packed_vec<type, 3>; \
  using packed_##name##4 = packed_vec<type, 4>;

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
SOFTMETAL_VECTOR_NAMES(bool, bool)
SOFTMETAL_VECTOR_NAMES(signed char, char)
SOFTMETAL_VECTOR_NAMES(unsigned char, uchar)
SOFTMETAL_VECTOR_NAMES(short, short)
SOFTMETAL_VECTOR_NAMES(unsigned short, ushort)
SOFTMETAL_VECTOR_NAMES(int, int)
SOFTMETAL_VECTOR_NAMES(unsigned int, uint)
SOFTMETAL_VECTOR_NAMES(long, long)
SOFTMETAL_VECTOR_NAMES(unsigned long, ulong)
SOFTMETAL_VECTOR_NAMES(half, half)
SOFTMETAL_VECTOR_NAMES(bfloat, bfloat)
SOFTMETAL_VECTOR_NAMES(float, float)
#undef SOFTMETAL_VECTOR_NAMES

static_assert(sizeof(float3) == 16 && alignof(float3) == 16 && sizeof(packed_float3) == 12);
static_assert(sizeof(half4) == 8 && alignof(half4) == 8 && sizeof(uchar4) == 4 && alignof(bfloat2) == 4);

// Columns of `Rows`-vectors, m[c][r].
template <class T, int Columns, int Rows>
struct matrix {
  vec<T, Rows> columns[Columns];
  matrix() = default;
  explicit matrix(T diagonal) {
    for (int c = 0; c < Columns; ++c)
      for (int r = 0; r < Rows; ++r) columns[c][r] = c == r ? diagonal : T(0);
  }
  template <class... V>
  requires(sizeof...(V) == Columns && Columns > 1) matrix(const V&... v) : columns{vec<T, Rows>(v)...} {}
  template <class U>
  explicit matrix(const matrix<U, Columns, Rows>& o) {
    for (int c = 0; c < Columns; ++c) columns[c] = vec<T, Rows>(o[c]);
  }
  vec<T, Rows>& operator[](int c) { return columns[c]; }
  const vec<T, Rows>& operator[](int c) const { return columns[c]; }
  friend vec<T, Rows> operator*(const matrix& m, const vec<T, Columns>& v) {
    vec<T, Rows> r = T(0);
    for (int c = 0; c < Columns; ++c) r += m.columns[c] * vec<T, Rows>(v[c]);
    return r;
  }
};
using float2x2 = matrix<float, 2, 2>;
using float2x4 = matrix<float, 2, 4>;
using float3x3 = matrix<float, 3, 3>;
using float4x4 = matrix<float, 4, 4>;
using half2x2 = matrix<half, 2, 2>;
using half2x4 = matrix<half, 2, 4>;
using half4x4 = matrix<half, 4, 4>;

template <class T, size_t N>
struct array {
  T elements[N];
  T& operator[](size_t i) { return elements[i]; }
  const T& operator[](size_t i) const { return elements[i]; }
  static constexpr size_t size() { return N; }
};

}  // namespace metal

using metal::bfloat;
using metal::half;
