#pragma once
// <metal_simdgroup>, <metal_quadgroup>, <metal_compute>: collectives and barriers. The default argument carries the
// place of the call, which identifies it: lanes that meet in a collective must have come from one place.
#include "softmetal/abi.h"
#include "softmetal/math.h"

namespace metal {

using std_place = std::source_location;

enum class mem_flags : uint {
  mem_none = softmetal::kFenceNone,
  mem_device = softmetal::kFenceDevice,
  mem_threadgroup = softmetal::kFenceThreadgroup,
  mem_texture = softmetal::kFenceTexture,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}

inline void threadgroup_barrier(mem_flags flags, const std_place& at = std_place::current()) {
  softmetal::threadgroup_barrier(static_cast<uint>(flags), at);
}
inline void simdgroup_barrier(mem_flags flags, const std_place& at = std_place::current()) {
  softmetal::simdgroup_barrier(static_cast<uint>(flags), at);
}

namespace detail {

using softmetal::kSimdWidth;
using softmetal::Lanes;

// The sum over lanes pairs neighbours first, then pairs of pairs, as a butterfly of xor-shuffles would.
template <class T, class F, uint kGroup>
SOFTMETAL_UNCHECKED void reduce_lanes(const Lanes& lanes) {
  for (uint base = 0; base < kSimdWidth; base += kGroup) {
    T value[kGroup];
    bool there[kGroup];
    for (uint i = 0; i < kGroup; ++i) {
      there[i] = (lanes.active >> (base + i)) & 1u;
      if (there[i]) value[i] = *static_cast<T*>(lanes.value[base + i]);
    }
    for (uint step = 1; step < kGroup; step *= 2) {
      for (uint i = 0; i < kGroup; i += 2 * step) {
        if (!there[i + step]) continue;
        value[i] = there[i] ? static_cast<T>(F::apply(value[i], value[i + step])) : value[i + step];
        there[i] = true;
      }
    }
    for (uint i = 0; i < kGroup; ++i)
      if ((lanes.active >> (base + i)) & 1u) *static_cast<T*>(lanes.value[base + i]) = value[0];
  }
}

template <class T, class F, bool kInclusive>
SOFTMETAL_UNCHECKED void scan_lanes(const Lanes& lanes) {
  T running = F::template identity<T>();
  for (uint i = 0; i < kSimdWidth; ++i) {
    if (!((lanes.active >> i) & 1u)) continue;
    T& v = *static_cast<T*>(lanes.value[i]);
    const T next = static_cast<T>(F::apply(running, v));
    v = kInclusive ? next : running;
    running = next;
  }
}

// F::source(lane, param) -> lane to read from, or the lane itself.
template <class T, class F>
SOFTMETAL_UNCHECKED void shuffle_lanes(const Lanes& lanes) {
  T before[kSimdWidth];
  for (uint i = 0; i < kSimdWidth; ++i)
    if ((lanes.active >> i) & 1u) before[i] = *static_cast<T*>(lanes.value[i]);
  for (uint i = 0; i < kSimdWidth; ++i) {
    if (!((lanes.active >> i) & 1u)) continue;
    const ulong from = F::source(i, lanes.param[i]);
    if (from >= kSimdWidth || !((lanes.active >> from) & 1u)) softmetal::missing_lane(i, from);
    *static_cast<T*>(lanes.value[i]) = before[from];
  }
}

struct Sum {
  template <class T>
  static T identity() {
    return T(0);
  }
  static auto apply(auto a, auto b) { return a + b; }
};
struct Product {
  template <class T>
  static T identity() {
    return T(1);
  }
  static auto apply(auto a, auto b) { return a * b; }
};
struct Min {
  static auto apply(auto a, auto b) { return min(a, b); }
};
struct Max {
  static auto apply(auto a, auto b) { return max(a, b); }
};
struct And {
  static auto apply(auto a, auto b) { return a & b; }
};
struct Or {
  static auto apply(auto a, auto b) { return a | b; }
};
struct Xor {
  static auto apply(auto a, auto b) { return a ^ b; }
};

struct Direct {
  static ulong source(uint, ulong p) { return p; }
};
struct ByXor {
  static ulong source(uint lane, ulong p) { return lane ^ p; }
};
struct Up {  // edge lanes keep their own value
  static ulong source(uint lane, ulong p) { return lane >= p ? lane - p : lane; }
};
struct Down {
  static ulong source(uint lane, ulong p) { return lane + p < kSimdWidth ? lane + p : lane; }
};
struct RotateUp {
  static ulong source(uint lane, ulong p) { return (lane - p) & (kSimdWidth - 1); }
};
struct RotateDown {
  static ulong source(uint lane, ulong p) { return (lane + p) & (kSimdWidth - 1); }
};
struct QuadDirect {
  static ulong source(uint lane, ulong p) { return p < 4 ? (lane & ~3u) + p : kSimdWidth; }
};
struct QuadXor {
  static ulong source(uint lane, ulong p) { return p < 4 ? lane ^ p : kSimdWidth; }
};
struct QuadUp {
  static ulong source(uint lane, ulong p) { return (lane & 3u) >= p ? lane - p : lane; }
};
struct QuadDown {
  static ulong source(uint lane, ulong p) { return (lane & 3u) + p < 4 ? lane + p : lane; }
};
template <class T>
SOFTMETAL_UNCHECKED void broadcast_first(const Lanes& lanes) {
  const uint first = static_cast<uint>(std::countr_zero(lanes.active));
  const T value = *static_cast<T*>(lanes.value[first]);
  for (uint i = 0; i < kSimdWidth; ++i)
    if ((lanes.active >> i) & 1u) *static_cast<T*>(lanes.value[i]) = value;
}

template <class T>
struct Filled {
  T value, fill;
};
// param = delta | modulo << 32; a lane outside its window of `modulo` lanes takes from the fill data.
template <class T, bool kUp>
SOFTMETAL_UNCHECKED void shuffle_and_fill(const Lanes& lanes) {
  Filled<T> before[kSimdWidth];
  for (uint i = 0; i < kSimdWidth; ++i)
    if ((lanes.active >> i) & 1u) before[i] = *static_cast<Filled<T>*>(lanes.value[i]);
  for (uint i = 0; i < kSimdWidth; ++i) {
    if (!((lanes.active >> i) & 1u)) continue;
    const uint delta = static_cast<uint>(lanes.param[i]), modulo = static_cast<uint>(lanes.param[i] >> 32);
    const uint base = i & ~(modulo - 1), offset = i & (modulo - 1);
    const bool inside = kUp ? offset >= delta : offset + delta < modulo;
    const uint from = base + ((kUp ? offset - delta : offset + delta) & (modulo - 1));
    if (!((lanes.active >> from) & 1u)) softmetal::missing_lane(i, from);
    static_cast<Filled<T>*>(lanes.value[i])->value = inside ? before[from].value : before[from].fill;
  }
}

SOFTMETAL_UNCHECKED inline void ballot_lanes(const Lanes& lanes) {
  ulong votes = 0;
  for (uint i = 0; i < kSimdWidth; ++i)
    if (((lanes.active >> i) & 1u) && lanes.param[i]) votes |= 1ul << i;
  for (uint i = 0; i < kSimdWidth; ++i)
    if ((lanes.active >> i) & 1u) *static_cast<ulong*>(lanes.value[i]) = votes;
}

inline ulong ballot(bool vote, const softmetal::CollectiveKind& kind, const std_place& at) {
  ulong votes = 0;
  softmetal::simd_collective(kind, &votes, vote, at);
  return votes;
}

template <class T>
T collective(const softmetal::CollectiveKind& kind, T value, ulong param, const std_place& at) {
  softmetal::simd_collective(kind, &value, param, at);
  return value;
}

}  // namespace detail

#define SOFTMETAL_COLLECTIVE(name, apply_fn)                           \
  template <class T>                                                   \
  inline T name(T value, const std_place& at = std_place::current()) { \
    static constexpr softmetal::CollectiveKind kind{#name, apply_fn};  \
    return detail::collective(kind, value, 0, at);                     \
  }
#define SOFTMETAL_REDUCTION(name, F, group) SOFTMETAL_COLLECTIVE(name, (&detail::reduce_lanes<T, detail::F, group>))
SOFTMETAL_REDUCTION(simd_sum, Sum, 32)
SOFTMETAL_REDUCTION(simd_product, Product, 32)
SOFTMETAL_REDUCTION(simd_min, Min, 32)
SOFTMETAL_REDUCTION(simd_max, Max, 32)
SOFTMETAL_REDUCTION(simd_and, And, 32)
SOFTMETAL_REDUCTION(simd_or, Or, 32)
SOFTMETAL_REDUCTION(simd_xor, Xor, 32)
SOFTMETAL_REDUCTION(quad_sum, Sum, 4)
SOFTMETAL_REDUCTION(quad_product, Product, 4)
SOFTMETAL_REDUCTION(quad_min, Min, 4)
SOFTMETAL_REDUCTION(quad_max, Max, 4)
SOFTMETAL_REDUCTION(quad_and, And, 4)
SOFTMETAL_REDUCTION(quad_or, Or, 4)
SOFTMETAL_REDUCTION(quad_xor, Xor, 4)
SOFTMETAL_COLLECTIVE(simd_prefix_inclusive_sum, (&detail::scan_lanes<T, detail::Sum, true>))
SOFTMETAL_COLLECTIVE(simd_prefix_exclusive_sum, (&detail::scan_lanes<T, detail::Sum, false>))
SOFTMETAL_COLLECTIVE(simd_prefix_inclusive_product, (&detail::scan_lanes<T, detail::Product, true>))
SOFTMETAL_COLLECTIVE(simd_prefix_exclusive_product, (&detail::scan_lanes<T, detail::Product, false>))
SOFTMETAL_COLLECTIVE(simd_broadcast_first, &detail::broadcast_first<T>)
#undef SOFTMETAL_REDUCTION
#undef SOFTMETAL_COLLECTIVE

#define SOFTMETAL_SHUFFLE(name, F)                                                                \
  template <class T>                                                                              \
  inline T name(T value, ushort lane, const std_place& at = std_place::current()) {               \
    static constexpr softmetal::CollectiveKind kind{#name, &detail::shuffle_lanes<T, detail::F>}; \
    return detail::collective(kind, value, lane, at);                                             \
  }
SOFTMETAL_SHUFFLE(simd_shuffle, Direct)
SOFTMETAL_SHUFFLE(simd_broadcast, Direct)
SOFTMETAL_SHUFFLE(simd_shuffle_xor, ByXor)
SOFTMETAL_SHUFFLE(simd_shuffle_up, Up)
SOFTMETAL_SHUFFLE(simd_shuffle_down, Down)
SOFTMETAL_SHUFFLE(simd_shuffle_rotate_up, RotateUp)
SOFTMETAL_SHUFFLE(simd_shuffle_rotate_down, RotateDown)
SOFTMETAL_SHUFFLE(quad_shuffle, QuadDirect)
SOFTMETAL_SHUFFLE(quad_broadcast, QuadDirect)
SOFTMETAL_SHUFFLE(quad_shuffle_xor, QuadXor)
SOFTMETAL_SHUFFLE(quad_shuffle_up, QuadUp)
SOFTMETAL_SHUFFLE(quad_shuffle_down, QuadDown)
#undef SOFTMETAL_SHUFFLE

template <class T>
inline T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = 32,
                                  const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_shuffle_and_fill_up", &detail::shuffle_and_fill<T, true>};
  return detail::collective(kind, detail::Filled<T>{value, fill}, delta | ulong(modulo) << 32, at).value;
}
template <class T>
inline T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = 32,
                                    const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_shuffle_and_fill_down", &detail::shuffle_and_fill<T, false>};
  return detail::collective(kind, detail::Filled<T>{value, fill}, delta | ulong(modulo) << 32, at).value;
}

// The lanes that voted; bits of missing lanes are 0.
class simd_vote {
 public:
  using vote_t = ulong;
  simd_vote() = default;
  explicit simd_vote(vote_t votes) : votes_(votes) {}
  explicit operator vote_t() const { return votes_; }
  bool any() const { return votes_ != 0; }
  bool all() const { return (votes_ & 0xFFFFFFFFul) == 0xFFFFFFFFul; }

 private:
  vote_t votes_ = 0;
};

inline simd_vote simd_ballot(bool vote, const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_ballot", &detail::ballot_lanes};
  return simd_vote(detail::ballot(vote, kind, at));
}
inline bool simd_any(bool vote, const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_any", &detail::ballot_lanes};
  return detail::ballot(vote, kind, at) != 0;
}
inline bool simd_all(bool vote, const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_all", &detail::ballot_lanes};
  return detail::ballot(!vote, kind, at) == 0;
}
inline simd_vote simd_active_threads_mask(const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_active_threads_mask", &detail::ballot_lanes};
  return simd_vote(detail::ballot(true, kind, at));
}
inline bool simd_is_first(const std_place& at = std_place::current()) {
  static constexpr softmetal::CollectiveKind kind{"simd_is_first", &detail::ballot_lanes};
  const ulong active = detail::ballot(true, kind, at);
  return static_cast<uint>(std::countr_zero(active)) == softmetal::lane_index();
}

}  // namespace metal

inline unsigned short __metal_get_thread_index_in_simdgroup(unsigned short) {
  return static_cast<unsigned short>(softmetal::lane_index());
}
