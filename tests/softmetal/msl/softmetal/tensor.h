#pragma once
// <metal_tensor>, <metal_cooperative_tensor> and Metal Performance Primitives' matmul2d, for one simdgroup.
// Cooperative tensors have the lane layout of M5-class GPUs, which depends on relaxed_precision, or a shuffled one that
// proves a kernel asks instead of assuming (softmetal::Options::tensor_layout).
#include "softmetal/simd.h"

namespace metal {

inline constexpr int dynamic_extent = -1;

template <class Index, int... E>
struct extents {
  static constexpr int rank = sizeof...(E);
  Index values[sizeof...(E)] = {static_cast<Index>(E)...};
  extents() = default;
  // Either all extents, or those that are dynamic.
  template <class... A>
  requires(sizeof...(A) > 0 && (std::is_convertible_v<A, Index> && ...)) extents(A... a) {
    const Index given[] = {static_cast<Index>(a)...};
    constexpr int fixed[] = {E...};
    if constexpr (sizeof...(A) == sizeof...(E)) {
      for (int i = 0; i < rank; ++i) values[i] = given[i];
    } else {
      int k = 0;
      for (int i = 0; i < rank; ++i)
        if (fixed[i] == dynamic_extent) values[i] = given[k++];
    }
  }
  Index extent(int i) const { return values[i]; }
};

namespace detail {
constexpr int dynamic_at(int) { return dynamic_extent; }
template <class Index, class Sequence>
struct all_dynamic;
template <class Index, int... I>
struct all_dynamic<Index, std::integer_sequence<int, I...>> {
  using type = extents<Index, dynamic_at(I)...>;
};
}  // namespace detail
template <class Index, int Rank>
using dextents = typename detail::all_dynamic<Index, std::make_integer_sequence<int, Rank>>::type;

struct tensor_inline {};
struct tensor_handle {};

// A view of memory; dimension 0 is the contiguous one. Reads outside give 0 through load(), writes are dropped.
template <class T, class Extents, class Kind = tensor_inline>
class tensor {
 public:
  using element_type = std::remove_cv_t<T>;
  using value_type = element_type;

  tensor(T* data, const Extents& e) : data_(data) {
    size_t stride = 1;
    for (int i = 0; i < Extents::rank; ++i) {
      extent_[i] = static_cast<long>(e.extent(i));
      stride_[i] = static_cast<long>(stride);
      stride *= static_cast<size_t>(extent_[i]);
    }
  }
  template <class S, size_t N>
  tensor(T* data, const Extents& e, const array<S, N>& strides) : tensor(data, e) {
    for (int i = 0; i < Extents::rank; ++i) stride_[i] = static_cast<long>(strides[static_cast<size_t>(i)]);
  }

  int get_extent(int i) const { return static_cast<int>(extent_[i]); }
  int get_stride(int i) const { return static_cast<int>(stride_[i]); }

  T& operator[](const array<int, 2>& i) const { return data_[offset(i[0], i[1])]; }
  element_type load(long i, long j = 0) const { return inside(i, j) ? data_[offset(i, j)] : element_type(0); }
  void store(element_type value, long i, long j = 0) const {
    if (inside(i, j)) data_[offset(i, j)] = value;
  }

  // The rest of the tensor from (i, j) on.
  tensor slice(long i, long j) const {
    tensor s = *this;
    s.data_ += i * stride_[0] + j * stride_[1];
    s.extent_[0] -= i;
    s.extent_[1] -= j;
    return s;
  }
  // E0 x E1 from (i, j) on; the whole of it must be inside.
  template <int E0, int E1>
  tensor slice(long i, long j) const {
    tensor s = slice(i, j);
    if (E0 != dynamic_extent) s.extent_[0] = E0;
    if (E1 != dynamic_extent) s.extent_[1] = E1;
    return s;
  }

 private:
  bool inside(long i, long j) const {
    return i >= 0 && i < extent_[0] && j >= 0 && (Extents::rank < 2 || j < extent_[1]);
  }
  long offset(long i, long j) const { return i * stride_[0] + (Extents::rank < 2 ? 0 : j * stride_[1]); }
  T* data_;
  long extent_[Extents::rank < 2 ? 2 : Extents::rank] = {};
  long stride_[Extents::rank < 2 ? 2 : Extents::rank] = {};
};
template <class T, class E>
tensor(T*, const E&) -> tensor<T, E>;
template <class T, class E, class S, size_t N>
tensor(T*, const E&, const array<S, N>&) -> tensor<T, E>;

struct execution_thread {};
template <int N>
struct execution_simdgroups {
  static constexpr int count = N;
};
using execution_simdgroup = execution_simdgroups<1>;

// D0 x D1 elements (dimension 0 contiguous) spread over the 32 lanes of a simdgroup.
template <class T, int D0, int D1, bool Relaxed, softmetal::TensorRole Role>
class cooperative_tensor {
  static_assert(D0 % 16 == 0 && D1 % 16 == 0 && D0 * D1 <= 64 * 32, "sides are multiples of 16, up to 64 slots a lane");
  static constexpr uint kSlots = static_cast<uint>(D0 * D1) / softmetal::kSimdWidth;

 public:
  using element_type = T;
  using value_type = T;
  static constexpr int rows = D1, columns = D0;

  // Registers hold anything at first: here NaN, so that a missing clear shows.
  cooperative_tensor() {
    for (T& v : values_) v = T(std::numeric_limits<float>::quiet_NaN());
  }

  SOFTMETAL_UNCHECKED uint get_capacity() const { return map().capacity; }
  T& operator[](uint i) { return values_[i]; }
  const T& operator[](uint i) const { return values_[i]; }
  T get(uint i) const { return values_[i]; }
  void set(uint i, T v) { values_[i] = v; }
  SOFTMETAL_UNCHECKED bool is_valid_element(uint i) const { return map().place[softmetal::lane_index()][i].valid; }
  SOFTMETAL_UNCHECKED array<int, 2> get_multidimensional_index(uint i) const {
    const auto& p = map().place[softmetal::lane_index()][i];
    return {{p.i0, p.i1}};
  }
  T* begin() { return values_; }
  T* end() { return values_ + get_capacity(); }

  template <class Tensor>
  void load(const Tensor& t) {
    for (uint i = 0; i < get_capacity(); ++i)
      if (is_valid_element(i)) {
        const auto p = get_multidimensional_index(i);
        values_[i] = t.load(p[0], p[1]);
      }
  }
  template <class Tensor>
  void store(const Tensor& t) const {
    static_assert(std::is_same_v<T, typename Tensor::element_type>, "cooperative_tensor::store converts no types");
    for (uint i = 0; i < get_capacity(); ++i)
      if (is_valid_element(i)) {
        const auto p = get_multidimensional_index(i);
        t.store(values_[i], p[0], p[1]);
      }
  }

  static const softmetal::TensorMap& map() { return *softmetal::tensor_map(D0, D1, Relaxed, Role); }

 private:
  T values_[kSlots + softmetal::kSpareTensorSlots];
};

namespace detail {
template <class T>
struct is_cooperative : std::false_type {};
template <class T, int D0, int D1, bool R, softmetal::TensorRole Role>
struct is_cooperative<cooperative_tensor<T, D0, D1, R, Role>> : std::true_type {};
}  // namespace detail

}  // namespace metal

namespace mpp::tensor_ops {
using metal::dynamic_extent;
using metal::uint;

template <class T>
inline constexpr T dynamic_length_v = static_cast<T>(metal::dynamic_extent);

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = metal::dynamic_extent, bool left = false, bool right = false,
                                bool relaxed = false, mode how = mode::multiply)
      : m(m_),
        n(n_),
        k(k_),
        transpose_left(left),
        transpose_right(right),
        relaxed_precision(relaxed),
        matmul_mode(how) {}
};

namespace detail {

// relaxed_precision: float operands may lose mantissa bits, as far as TF32 goes.
template <class T>
inline float operand(T v, bool relaxed) {
  const float f = static_cast<float>(v);
  if constexpr (std::is_same_v<T, float>)
    if (relaxed) return std::bit_cast<float>(std::bit_cast<metal::uint>(f) & 0xFFFFE000u);
  return f;
}

template <class L, class R, class D>
struct Operands {
  L* left;
  R* right;
  D* destination;
};

}  // namespace detail

template <matmul2d_descriptor Desc, class Scope>
class matmul2d {
  static_assert(std::is_same_v<Scope, metal::execution_simdgroup>, "softmetal runs matmul2d on one simdgroup only");
  static constexpr bool kRelaxed = Desc.relaxed_precision;
  using Role = softmetal::TensorRole;

  template <class T>
  using Left = metal::cooperative_tensor<T, Desc.transpose_left ? Desc.m : Desc.k,
                                         Desc.transpose_left ? Desc.k : Desc.m, kRelaxed, Role::kLeft>;
  template <class T>
  using Right = metal::cooperative_tensor<T, Desc.transpose_right ? Desc.k : Desc.n,
                                          Desc.transpose_right ? Desc.n : Desc.k, kRelaxed, Role::kRight>;
  template <class T>
  using Destination = metal::cooperative_tensor<T, Desc.n, Desc.m, kRelaxed, Role::kDestination>;

 public:
  template <class LeftElement, class RightElement, class DestinationElement>
  auto get_left_input_cooperative_tensor() const {
    check_input_tile();
    return Left<LeftElement>();
  }
  template <class LeftElement, class RightElement, class DestinationElement>
  auto get_right_input_cooperative_tensor() const {
    check_input_tile();
    return Right<RightElement>();
  }
  template <class LeftOperand, class RightOperand, class DestinationElement>
  auto get_destination_cooperative_tensor() const {
    return Destination<DestinationElement>();
  }

  template <class L, class R, class D>
  void run(L& left, R& right, D& destination, const std::source_location& at = std::source_location::current()) const {
    static constexpr softmetal::CollectiveKind kind{"matmul2d::run", &apply<L, R, D>, true};
    detail::Operands<L, R, D> o{&left, &right, &destination};
    softmetal::simd_collective(kind, &o, 0, at);
  }

 private:
  static constexpr bool tile(int v) { return v == 16 || v == 32; }
  // The header's rule for cooperative inputs: m, n, k each 16 or 32, at least one of them 32.
  static constexpr void check_input_tile() {
    static_assert(tile(Desc.m) && tile(Desc.n) && tile(Desc.k), "cooperative inputs: m, n, k must each be 16 or 32");
    static_assert(Desc.m == 32 || Desc.n == 32 || Desc.k == 32, "cooperative inputs: one of m, n, k must be 32");
  }

  // values[i1][i0] of an operand, from all lanes or from memory.
  template <class L, class R, class D, class Operand>
  SOFTMETAL_UNCHECKED static void gather(const softmetal::Lanes& lanes, Operand* detail::Operands<L, R, D>::*which,
                                         int d0, int d1, float* values) {
    if constexpr (metal::detail::is_cooperative<Operand>::value) {
      const softmetal::TensorMap& map = Operand::map();
      for (uint lane = 0; lane < softmetal::kSimdWidth; ++lane) {
        const Operand& o = *(static_cast<const detail::Operands<L, R, D>*>(lanes.value[lane])->*which);
        for (uint i = 0; i < map.capacity; ++i) {
          const auto& p = map.place[lane][i];
          if (p.valid) values[p.i1 * d0 + p.i0] = detail::operand(o[i], kRelaxed);
        }
      }
    } else {
      const Operand& o = *(static_cast<const detail::Operands<L, R, D>*>(lanes.value[0])->*which);
      for (int i1 = 0; i1 < d1; ++i1)
        for (int i0 = 0; i0 < d0; ++i0) values[i1 * d0 + i0] = detail::operand(o.load(i0, i1), kRelaxed);
    }
  }

  template <class L, class R, class D>
  SOFTMETAL_UNCHECKED static void apply(const softmetal::Lanes& lanes) {
    static_assert(metal::detail::is_cooperative<D>::value, "softmetal's matmul2d writes a cooperative tensor");
    using T = typename D::element_type;
    const auto* first = static_cast<const detail::Operands<L, R, D>*>(lanes.value[0]);
    const softmetal::TensorMap& map = D::map();
    int k_length = Desc.k;
    if constexpr (Desc.k == metal::dynamic_extent) k_length = first->left->get_extent(Desc.transpose_left ? 1 : 0);
    constexpr int kStep = Desc.k == metal::dynamic_extent ? 32 : Desc.k;
    float left[Desc.m * kStep], right[kStep * Desc.n], sums[Desc.m * Desc.n] = {};
    const int k_end = map.fault == softmetal::TensorFault::kDroppedTail ? k_length - 1 : k_length;
    for (int k0 = 0; k0 < k_end; k0 += kStep) {
      const int used = k_end - k0 < kStep ? k_end - k0 : kStep;
      if constexpr (Desc.k == metal::dynamic_extent) {
        gather_step(*first->left, Desc.transpose_left, k0, Desc.m, left);
        gather_step(*first->right, !Desc.transpose_right, k0, Desc.n, right);
        // both now [row][k]
        for (int m = 0; m < Desc.m; ++m)
          for (int n = 0; n < Desc.n; ++n)
            for (int k = 0; k < used; ++k) sums[m * Desc.n + n] += left[m * kStep + k] * right[n * kStep + k];
      } else {
        gather<L, R, D, L>(lanes, &detail::Operands<L, R, D>::left, Desc.transpose_left ? Desc.m : kStep,
                           Desc.transpose_left ? kStep : Desc.m, left);
        gather<L, R, D, R>(lanes, &detail::Operands<L, R, D>::right, Desc.transpose_right ? kStep : Desc.n,
                           Desc.transpose_right ? Desc.n : kStep, right);
        float by_k[kStep * Desc.n];  // right operand as [k][n], so that the inner loop runs over n
        for (int k = 0; k < kStep; ++k)
          for (int n = 0; n < Desc.n; ++n)
            by_k[k * Desc.n + n] = Desc.transpose_right ? right[n * kStep + k] : right[k * Desc.n + n];
        for (int m = 0; m < Desc.m; ++m)
          for (int k = 0; k < used; ++k) {
            const float a = Desc.transpose_left ? left[k * Desc.m + m] : left[m * kStep + k];
            for (int n = 0; n < Desc.n; ++n) sums[m * Desc.n + n] += a * by_k[k * Desc.n + n];
          }
      }
    }
    if (map.fault == softmetal::TensorFault::kOneElement) sums[Desc.m * Desc.n - 1] *= 1 + 1.0f / 256;
    for (uint lane = 0; lane < softmetal::kSimdWidth; ++lane) {
      D& destination = *static_cast<const detail::Operands<L, R, D>*>(lanes.value[lane])->destination;
      for (uint i = 0; i < map.capacity; ++i) {
        const auto& p = map.place[lane][i];
        if (!p.valid) continue;
        const float sum = sums[p.i1 * Desc.n + p.i0];
        const bool adds = Desc.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
        const float total = adds ? static_cast<float>(destination[i]) + sum : sum;
        destination[i] =
            static_cast<T>(map.fault == softmetal::TensorFault::kShortSums ? float(metal::half(total)) : total);
      }
    }
  }

  // Rows of an operand in memory, K steps from k0 on, as [row][k]; zero outside.
  template <class Operand>
  SOFTMETAL_UNCHECKED static void gather_step(const Operand& o, bool k_is_dim1, int k0, int rows, float* values) {
    for (int r = 0; r < rows; ++r)
      for (int k = 0; k < 32; ++k)
        values[r * 32 + k] = detail::operand(k_is_dim1 ? o.load(r, k0 + k) : o.load(k0 + k, r), kRelaxed);
  }
};

}  // namespace mpp::tensor_ops
