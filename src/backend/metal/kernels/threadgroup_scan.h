#pragma once
// Sums over a threadgroup of 1024 threads (32 simdgroups). `scratch` holds 32 values; every thread must call.
#include "common.h"

// The sum of the values of all threads before this one; `total` gets the sum of all.
template <typename T>
T exclusive_sum(T value, threadgroup T* scratch, ushort sg, ushort lane, thread T& total) {
  const T inside = simd_prefix_exclusive_sum(value);
  if (int(lane) == kLanes - 1) scratch[sg] = inside + value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const T other = scratch[lane];
  const T before = simd_sum(lane < sg ? other : T(0));
  total = simd_sum(other);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return before + inside;
}

template <typename T>
T threadgroup_sum(T value, threadgroup T* scratch, ushort sg, ushort lane) {
  const T inside = simd_sum(value);
  if (lane == 0) scratch[sg] = inside;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const T total = simd_sum(scratch[lane]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return total;
}

inline int threadgroup_min(int value, threadgroup int* scratch, ushort sg, ushort lane) {
  const int inside = simd_min(value);
  if (lane == 0) scratch[sg] = inside;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int least = simd_min(scratch[lane]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return least;
}
