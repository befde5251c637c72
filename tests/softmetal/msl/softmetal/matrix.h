#pragma once
// <metal_simdgroup_matrix>: 8 x 8 matrices spread over a simdgroup, two elements a lane, in the layout that M1 to M5
// share (undocumented by Apple, relied on by every engine): docs/softmetal.md, "Lane layouts".
#include "softmetal/simd.h"

namespace metal {

template <class T, int Columns, int Rows>
class simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup matrices are 8 x 8");
  static_assert(SmallFloat<T> || std::is_same_v<T, float>, "simdgroup matrices hold half, bfloat or float");

 public:
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint lane = softmetal::lane_index();
    for (uint i = 0; i < 2; ++i) elements_[static_cast<int>(i)] = row(lane) == column(lane) + i ? diagonal : T(0.0f);
  }

  vec<T, 2>& thread_elements() { return elements_; }
  const vec<T, 2>& thread_elements() const { return elements_; }

  // Where a lane's two elements are: one row, two neighbouring columns.
  static constexpr uint row(uint lane) { return ((lane / 4) & 4u) + lane / 2 % 4; }
  static constexpr uint column(uint lane) { return ((lane / 4) & 2u) * 2 + lane % 2 * 2; }

 private:
  vec<T, 2> elements_;
};

using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

namespace detail {

// Loads and stores move a lane's own elements; in the instrumented build they also meet, to find divergence.
inline void meet(const softmetal::CollectiveKind& kind, const std_place& at) {
  if constexpr (SOFTMETAL_INSTRUMENTED) softmetal::simd_collective(kind, nullptr, 0, at);
}

template <class D, class A, class B, class C>
struct MatrixOperands {
  vec<D, 2>* d;
  const vec<A, 2>* a;
  const vec<B, 2>* b;
  const vec<C, 2>* c;  // null: no addend
};

template <class D, class A, class B, class C>
SOFTMETAL_UNCHECKED void multiply_matrices(const Lanes& lanes) {
  using M = simdgroup_matrix<float, 8, 8>;
  float a[8][8], b[8][8], d[8][8];
  for (uint lane = 0; lane < kSimdWidth; ++lane) {
    const auto& o = *static_cast<const MatrixOperands<D, A, B, C>*>(lanes.value[lane]);
    const uint r = M::row(lane), c = M::column(lane);
    for (int i = 0; i < 2; ++i) {
      const uint column = c + static_cast<uint>(i);
      a[r][column] = static_cast<float>((*o.a)[i]);
      b[r][column] = static_cast<float>((*o.b)[i]);
      d[r][column] = o.c ? static_cast<float>((*o.c)[i]) : 0.0f;
    }
  }
  for (int r = 0; r < 8; ++r)
    for (int k = 0; k < 8; ++k)
      for (int c = 0; c < 8; ++c) d[r][c] += a[r][k] * b[k][c];
  for (uint lane = 0; lane < kSimdWidth; ++lane) {
    const auto& o = *static_cast<const MatrixOperands<D, A, B, C>*>(lanes.value[lane]);
    for (int i = 0; i < 2; ++i) (*o.d)[i] = static_cast<D>(d[M::row(lane)][M::column(lane) + static_cast<uint>(i)]);
  }
}

}  // namespace detail

template <class T, int C, int R>
inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.thread_elements() = vec<T, 2>(value);
  return m;
}

template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* source, ulong elements_per_row = 8,
                           ulong2 origin = ulong2(0ul, 0ul), bool transpose = false,
                           const std_place& at = std_place::current()) {
  static_assert(std::is_same_v<T, std::remove_cv_t<P>>, "simdgroup_load converts no types");
  static constexpr softmetal::CollectiveKind kind{"simdgroup_load", nullptr, true};
  detail::meet(kind, at);
  const uint lane = softmetal::lane_index();
  const ulong r = m.row(lane), c = m.column(lane);
  for (ulong i = 0; i < 2; ++i) {
    const ulong x = origin.x + (transpose ? r : c + i), y = origin.y + (transpose ? c + i : r);
    m.thread_elements()[static_cast<int>(i)] = source[y * elements_per_row + x];
  }
}

template <class T, class P>
inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, P* target, ulong elements_per_row = 8,
                            ulong2 origin = ulong2(0ul, 0ul), bool transpose = false,
                            const std_place& at = std_place::current()) {
  static_assert(std::is_same_v<T, P>, "simdgroup_store converts no types");
  static constexpr softmetal::CollectiveKind kind{"simdgroup_store", nullptr, true};
  detail::meet(kind, at);
  const uint lane = softmetal::lane_index();
  const ulong r = m.row(lane), c = m.column(lane);
  for (ulong i = 0; i < 2; ++i) {
    const ulong x = origin.x + (transpose ? r : c + i), y = origin.y + (transpose ? c + i : r);
    target[y * elements_per_row + x] = m.thread_elements()[static_cast<int>(i)];
  }
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simdgroup_multiply", &detail::multiply_matrices<D, A, B, D>, true};
  detail::MatrixOperands<D, A, B, D> o{&d.thread_elements(), &a.thread_elements(), &b.thread_elements(), nullptr};
  softmetal::simd_collective(kind, &o, 0, at);
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simdgroup_multiply_accumulate",
                                                  &detail::multiply_matrices<D, A, B, C>, true};
  detail::MatrixOperands<D, A, B, C> o{&d.thread_elements(), &a.thread_elements(), &b.thread_elements(),
                                       &c.thread_elements()};
  softmetal::simd_collective(kind, &o, 0, at);
}

template <class D, class A, class B>
inline simdgroup_matrix<D, 8, 8> operator*(const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) =
    delete;  // say which type the product has: simdgroup_multiply

}  // namespace metal
