#pragma once
// Built-in kernel inputs, converted to the type that the kernel declares.
#include "softmetal/abi.h"
#include "softmetal/vec.h"

namespace softmetal {

struct IndexArgument {
  uint32_t x, y, z;
  template <std::integral T>
  operator T() const {
    return static_cast<T>(x);
  }
  template <class T>
  operator metal::vec<T, 2>() const {
    return metal::vec<T, 2>(static_cast<T>(x), static_cast<T>(y));
  }
  template <class T>
  operator metal::vec<T, 3>() const {
    return metal::vec<T, 3>(static_cast<T>(x), static_cast<T>(y), static_cast<T>(z));
  }
};

inline uint32_t volume(const Size3& s) { return s.x * s.y * s.z; }
inline IndexArgument index_of(const Size3& s) { return {s.x, s.y, s.z}; }
inline IndexArgument index_of(uint32_t v) { return {v, 0, 0}; }
inline uint32_t group_simdgroups(const Size3& s) { return (volume(s) + kSimdWidth - 1) / kSimdWidth; }

inline IndexArgument thread_position_in_threadgroup(const Invocation& in) {
  const uint32_t i = in.thread_index, w = in.group_threads.x, h = in.group_threads.y;
  return {i % w, i / w % h, i / (w * h)};
}
inline IndexArgument thread_position_in_grid(const Invocation& in) {
  const IndexArgument p = thread_position_in_threadgroup(in);
  return {in.threadgroup_position.x * in.dispatch_threads.x + p.x,
          in.threadgroup_position.y * in.dispatch_threads.y + p.y,
          in.threadgroup_position.z * in.dispatch_threads.z + p.z};
}
inline IndexArgument threads_per_grid(const Invocation& in) { return index_of(in.threads_in_grid); }
inline IndexArgument threadgroup_position_in_grid(const Invocation& in) { return index_of(in.threadgroup_position); }
inline IndexArgument threadgroups_per_grid(const Invocation& in) { return index_of(in.threadgroups); }
inline IndexArgument threads_per_threadgroup(const Invocation& in) { return index_of(in.group_threads); }
inline IndexArgument dispatch_threads_per_threadgroup(const Invocation& in) { return index_of(in.dispatch_threads); }
inline IndexArgument thread_index_in_threadgroup(const Invocation& in) { return index_of(in.thread_index); }
inline IndexArgument thread_index_in_simdgroup(const Invocation& in) { return index_of(in.thread_index % kSimdWidth); }
inline IndexArgument simdgroup_index_in_threadgroup(const Invocation& in) {
  return index_of(in.thread_index / kSimdWidth);
}
inline IndexArgument simdgroups_per_threadgroup(const Invocation& in) {
  return index_of(group_simdgroups(in.group_threads));
}
inline IndexArgument dispatch_simdgroups_per_threadgroup(const Invocation& in) {
  return index_of(group_simdgroups(in.dispatch_threads));
}
inline IndexArgument threads_per_simdgroup(const Invocation&) { return index_of(kSimdWidth); }
inline IndexArgument thread_execution_width(const Invocation&) { return index_of(kSimdWidth); }
inline IndexArgument thread_index_in_quadgroup(const Invocation& in) { return index_of(in.thread_index % 4); }
inline IndexArgument quadgroup_index_in_threadgroup(const Invocation& in) { return index_of(in.thread_index / 4); }
inline IndexArgument quadgroups_per_threadgroup(const Invocation& in) {
  return index_of((volume(in.group_threads) + 3) / 4);
}
inline IndexArgument dispatch_quadgroups_per_threadgroup(const Invocation& in) {
  return index_of((volume(in.dispatch_threads) + 3) / 4);
}
inline IndexArgument grid_origin(const Invocation&) { return {0, 0, 0}; }
inline IndexArgument grid_size(const Invocation& in) { return index_of(in.threads_in_grid); }

}  // namespace softmetal
