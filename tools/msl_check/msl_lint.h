// Macros that stand for Metal words confuse clang-format, and its result is not stable.
// clang-format off
// Declarations of the MSL library for the conformance check: clang compiles kernels against them as C++ for OpenCL,
// whose front end enforces address spaces. Nothing here runs.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define NULL 0
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.402823466e+38f
#define MAXFLOAT FLT_MAX
#define INT_MAX 2147483647
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159274f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
#define LINT_NAMES(T)                                 \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
LINT_NAMES(char)
LINT_NAMES(uchar)
LINT_NAMES(short)
LINT_NAMES(ushort)
LINT_NAMES(int)
LINT_NAMES(uint)
LINT_NAMES(long)
LINT_NAMES(ulong)
LINT_NAMES(half)
LINT_NAMES(float)
typedef char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

// No conversion from float without a cast.
struct bfloat {
  ushort bits;
  bfloat() = default;
  explicit bfloat(float);
  explicit bfloat(half);
  explicit bfloat(int);
  explicit bfloat(uint);
  operator float() const;
  operator float() const __constant;
};
bfloat operator+(bfloat, bfloat);
bfloat operator-(bfloat, bfloat);
bfloat operator*(bfloat, bfloat);
bfloat operator/(bfloat, bfloat);
bfloat operator-(bfloat);

namespace metal {

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B>
inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool C, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool C, class A, class B>
using conditional_t = typename conditional<C, A, B>::type;
template <bool C, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool C, class T = void>
using enable_if_t = typename enable_if<C, T>::type;
template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> {
  using type = T;
};
template <class T>
using remove_addrspace_t = T;

// --- vectors ---------------------------------------------------------------------------------------------------
template <int N>
struct bvec {
  bfloat x, y;
  bfloat z[N > 2 ? N - 2 : 1];
  bfloat& operator[](int);
  const bfloat& operator[](int) const;
};
template <class T, int N>
struct vec_of;
template <class V>
struct parts {
  static constexpr int count = 1;
};
template <class T>
struct identity {
  using type = T;
};
#define LINT_VECTORS(T)                                 \
  template <>                                           \
  struct vec_of<T, 2> {                                 \
    using type = T __attribute__((ext_vector_type(2))); \
  };                                                    \
  template <>                                           \
  struct vec_of<T, 3> {                                 \
    using type = T __attribute__((ext_vector_type(3))); \
  };                                                    \
  template <>                                           \
  struct vec_of<T, 4> {                                 \
    using type = T __attribute__((ext_vector_type(4))); \
  };                                                    \
  template <>                                           \
  struct parts<typename vec_of<T, 2>::type> {           \
    static constexpr int count = 2;                     \
    using element = T;                                  \
  };                                                    \
  template <>                                           \
  struct parts<typename vec_of<T, 3>::type> {           \
    static constexpr int count = 3;                     \
    using element = T;                                  \
  };                                                    \
  template <>                                           \
  struct parts<typename vec_of<T, 4>::type> {           \
    static constexpr int count = 4;                     \
    using element = T;                                  \
  };
LINT_VECTORS(char)
LINT_VECTORS(uchar)
LINT_VECTORS(short)
LINT_VECTORS(ushort)
LINT_VECTORS(int)
LINT_VECTORS(uint)
LINT_VECTORS(long)
LINT_VECTORS(ulong)
LINT_VECTORS(half)
LINT_VECTORS(float)
template <int N>
struct vec_of<bfloat, N> {
  using type = bvec<N>;
};
template <int N>
struct parts<bvec<N>> {
  static constexpr int count = N;
  using element = bfloat;
};
template <class T, int N>
using vec = typename vec_of<T, N>::type;

// float4(a, b, c, d) of MSL; the check rewrites it to construct<float4>(a, b, c, d).
template <class V, class... A>
V construct(A...) {
  constexpr int given = (parts<A>::count + ... + 0);
  static_assert(given == parts<V>::count || (given == 1 && sizeof...(A) == 1) || given == 0,
                "a vector is built from as many components as it has");
  return V();
}

template <class T, size_t N>
struct array {
  T elements[N];
  T& operator[](size_t);
  const T& operator[](size_t) const;
};

}  // namespace metal
using bfloat2 = metal::bvec<2>;
using bfloat3 = metal::bvec<3>;
using bfloat4 = metal::bvec<4>;
using metal::array;
struct packed_float3 {
  float e[3];
};

template <class T, class F>
T as_type(const F&) {
  static_assert(sizeof(T) == sizeof(F), "as_type needs types of one size");
  return T();
}

namespace metal {

// --- functions -------------------------------------------------------------------------------------------------
#define LINT_1(f)                 \
  float f(float);                 \
  half f(half);                   \
  vec<float, 2> f(vec<float, 2>); \
  vec<float, 3> f(vec<float, 3>); \
  vec<float, 4> f(vec<float, 4>); \
  vec<half, 2> f(vec<half, 2>);   \
  vec<half, 4> f(vec<half, 4>);
#define LINT_2(f)                                \
  float f(float, float);                         \
  half f(half, half);                            \
  vec<float, 2> f(vec<float, 2>, vec<float, 2>); \
  vec<float, 4> f(vec<float, 4>, vec<float, 4>); \
  vec<half, 4> f(vec<half, 4>, vec<half, 4>);
#define LINT_MATH                                                                                                    \
  LINT_1(exp)                                                                                                        \
  LINT_1(exp2)                                                                                                       \
  LINT_1(exp10) LINT_1(log) LINT_1(log2) LINT_1(log10) LINT_1(sin) LINT_1(cos) LINT_1(tan) LINT_1(asin) LINT_1(acos) \
      LINT_1(atan) LINT_1(sinh) LINT_1(cosh) LINT_1(tanh) LINT_1(sqrt) LINT_1(rsqrt) LINT_1(floor) LINT_1(ceil)      \
          LINT_1(trunc) LINT_1(round) LINT_1(rint) LINT_1(fract) LINT_1(fabs) LINT_2(pow) LINT_2(powr) LINT_2(fmod)  \
              LINT_2(fmin) LINT_2(fmax) LINT_2(atan2) LINT_2(divide)
LINT_MATH
LINT_1(sign) LINT_1(saturate) LINT_2(copysign) namespace fast { LINT_MATH }
namespace precise {
LINT_MATH
}
#define LINT_COMMON(T)             \
  T min(T, T);                     \
  T max(T, T);                     \
  T clamp(T, T, T);                \
  T select(T, T, bool);            \
  T abs(T);                        \
  T popcount(T);                   \
  T clz(T);                        \
  T ctz(T);                        \
  T rotate(T, T);                  \
  T reverse_bits(T);               \
  T extract_bits(T, uint, uint);   \
  T insert_bits(T, T, uint, uint); \
  T mulhi(T, T);                   \
  T absdiff(T, T);
LINT_COMMON(char)
LINT_COMMON(uchar)
LINT_COMMON(short)
LINT_COMMON(ushort)
LINT_COMMON(int)
LINT_COMMON(uint)
LINT_COMMON(long)
LINT_COMMON(ulong)
#define LINT_FLOATS(T)  \
  T min(T, T);          \
  T max(T, T);          \
  T clamp(T, T, T);     \
  T select(T, T, bool); \
  T abs(T);             \
  T fma(T, T, T);       \
  T mad(T, T, T);       \
  T mix(T, T, T);       \
  T ldexp(T, int);
LINT_FLOATS(half)
LINT_FLOATS(float)
bfloat min(bfloat, bfloat);
bfloat max(bfloat, bfloat);
#define LINT_FLOAT_VECTORS(V, T) \
  V min(V, V);                   \
  V max(V, V);                   \
  V clamp(V, V, V);              \
  V fma(V, V, V);                \
  V abs(V);                      \
  T dot(V, V);                   \
  T length(V);
LINT_FLOAT_VECTORS(float2, float)
LINT_FLOAT_VECTORS(float3, float)
LINT_FLOAT_VECTORS(float4, float)
LINT_FLOAT_VECTORS(half2, half)
LINT_FLOAT_VECTORS(half4, half)
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool all(int4);
bool any(int4);

// --- threads ---------------------------------------------------------------------------------------------------
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define LINT_ONE(f)  \
  template <class T> \
  T f(T);
#define LINT_LANE(f) \
  template <class T> \
  T f(T, ushort);
LINT_ONE(simd_sum)
LINT_ONE(simd_product)
LINT_ONE(simd_min) LINT_ONE(simd_max) LINT_ONE(simd_and) LINT_ONE(simd_or) LINT_ONE(simd_xor) LINT_ONE(quad_sum)
    LINT_ONE(quad_min) LINT_ONE(quad_max) LINT_ONE(simd_prefix_inclusive_sum) LINT_ONE(simd_prefix_exclusive_sum)
        LINT_ONE(simd_prefix_inclusive_product) LINT_ONE(simd_prefix_exclusive_product) LINT_ONE(simd_broadcast_first)
            LINT_LANE(simd_shuffle) LINT_LANE(simd_broadcast) LINT_LANE(simd_shuffle_xor) LINT_LANE(simd_shuffle_up)
                LINT_LANE(simd_shuffle_down) LINT_LANE(simd_shuffle_rotate_up) LINT_LANE(simd_shuffle_rotate_down)
                    LINT_LANE(quad_shuffle_xor) LINT_LANE(quad_broadcast) template <class T>
                    T simd_shuffle_and_fill_up(T, T, ushort, ushort = 32);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort, ushort = 32);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();
struct simd_vote {
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

template <class T>
__local T& lint_local();

// --- atomics ---------------------------------------------------------------------------------------------------
template <class T>
struct lint_atomic {
  T value;
};
enum lint_order { lint_relaxed };
template <class T>
struct lint_value {
  using type = T;
};
#define LINT_ATOMIC_IN(space)                                                                                 \
  template <class T>                                                                                          \
  T lint_atomic_load_explicit(const volatile space lint_atomic<T>*, lint_order);                              \
  template <class T>                                                                                          \
  void lint_atomic_store_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order);  \
  template <class T>                                                                                          \
  T lint_atomic_exchange_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order);  \
  template <class T>                                                                                          \
  T lint_atomic_fetch_add_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  T lint_atomic_fetch_sub_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  T lint_atomic_fetch_max_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  T lint_atomic_fetch_min_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  T lint_atomic_fetch_or_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order);  \
  template <class T>                                                                                          \
  T lint_atomic_fetch_and_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  T lint_atomic_fetch_xor_explicit(volatile space lint_atomic<T>*, typename lint_value<T>::type, lint_order); \
  template <class T>                                                                                          \
  bool lint_atomic_compare_exchange_weak_explicit(volatile space lint_atomic<T>*, __private T*,               \
                                                  typename lint_value<T>::type, lint_order, lint_order);
LINT_ATOMIC_IN(__global)
LINT_ATOMIC_IN(__local)
enum lint_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

// --- matrices --------------------------------------------------------------------------------------------------
template <class T, int C, int R>
struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
  vec<T, 2> elements;
};
template <class T, int C, int R>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define LINT_MATRIX_IN(space)                                                                           \
  template <class T>                                                                                    \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false); \
  template <class T>                                                                                    \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>&, space T*, ulong = 8, ulong2 = 0, bool = false);
LINT_MATRIX_IN(__global)
LINT_MATRIX_IN(__local)
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);

template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
};

// --- tensors ---------------------------------------------------------------------------------------------------
inline constexpr int dynamic_extent = -1;
struct execution_simdgroup {};
template <int N>
struct execution_simdgroups {};
template <class Index, int... E>
struct extents {
  extents() = default;
  template <class... A>
  extents(A...);
};
template <class Index, int Rank>
struct dextents {
  dextents() = default;
  template <class... A>
  dextents(A...);
};
struct tensor_inline {};
struct tensor_handle {};
template <class P, class Extents, class Kind = tensor_inline>
struct tensor {
  P* data;
  tensor(P*, const Extents&);
  tensor(P*, const Extents&, const array<int, 2>&);
  tensor slice(int, int) const;
  template <int E0, int E1>
  tensor slice(int, int) const;
  int get_extent(int) const;
};
template <class P, class E>
tensor(P*, const E&) -> tensor<P, E>;
template <class P, class E>
tensor(P*, const E&, const array<int, 2>&) -> tensor<P, E>;

template <class T>
struct cooperative_tensor {
  T values[34];
  uint get_capacity() const;
  T& operator[](uint);
  const T& operator[](uint) const;
  bool is_valid_element(uint) const;
  array<int, 2> get_multidimensional_index(uint) const;
  template <class P, class E>
  void load(const tensor<P, E>&);
  template <class P, class E>
  void store(const tensor<P, E>&) const;
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool left, right, relaxed;
  mode how;
  constexpr matmul2d_descriptor(int m_, int n_, int k_ = -1, bool l = false, bool r = false, bool x = false,
                                mode h = mode::multiply)
      : m(m_), n(n_), k(k_), left(l), right(r), relaxed(x), how(h) {}
};
// The descriptor is a template argument in MSL; C++17 has none of class type, so the check drops it.
template <class Scope>
struct lint_matmul2d {
  template <class L, class R, class D>
  metal::cooperative_tensor<L> get_left_input_cooperative_tensor() const;
  template <class L, class R, class D>
  metal::cooperative_tensor<R> get_right_input_cooperative_tensor() const;
  template <class L, class R, class D>
  metal::cooperative_tensor<D> get_destination_cooperative_tensor() const;
  template <class L, class R, class D>
  void run(__private L&, __private R&, __private D&) const;
};
}  // namespace tensor_ops
}  // namespace mpp
