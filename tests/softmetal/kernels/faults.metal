// Kernels that are wrong on purpose, each in one way; fault_test.cc expects softmetal to find exactly that.
#include <metal_stdlib>
using namespace metal;

kernel void reads_past_end(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                           uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1];
}

kernel void writes_past_end(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
  y[i * 2] = x[i];
}

kernel void writes_before_offset(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[int(i) - 1] = 1.0;
}

kernel void writes_threadgroup_past_end(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[32];
  threadgroup float b[32];
  threadgroup float* p = a;
  b[i] = 0;
  p[i + 1] = float(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[i] + b[i];
}

kernel void reads_fresh_buffer(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                               uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
}

kernel void reads_fresh_threadgroup_memory(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  if (i < 32) a[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[i] = a[i];
}

kernel void races_in_threadgroup_memory(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[i] = float(i);
  y[i] = a[63 - i];  // no barrier
}

kernel void barrier_orders_nothing(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[i] = float(i);
  threadgroup_barrier(mem_flags::mem_device);  // the wrong memory
  y[i] = a[63 - i];
}

kernel void races_in_simdgroup(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float a[32];
  a[i] = float(i);
  y[i] = simd_sum(a[i ^ 1]);  // lanes of one simdgroup are not ordered either
}

kernel void races_across_threadgroups(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]],
                                      uint n [[threads_per_grid]]) {
  y[i] = float(i);
  y[n] = y[(i + 64) % n];
}

kernel void adds_without_atomics(device uint* count [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 0) count[0] += 1;
}

kernel void mixes_atomics_and_plain(device atomic_uint* count [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 7) {
    ((device uint*)count)[0] = 3;
  } else {
    atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
  }
}

kernel void diverges_at_barrier(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 40) threadgroup_barrier(mem_flags::mem_none);
  y[i] = 1;
}

kernel void returns_before_barrier(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 5) return;
  threadgroup_barrier(mem_flags::mem_none);
  y[i] = 1;
}

kernel void meets_at_two_barriers(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 32) {
    threadgroup_barrier(mem_flags::mem_none);
  } else {
    threadgroup_barrier(mem_flags::mem_none);
  }
  y[i] = 1;
}

kernel void diverges_in_simdgroup(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float v;
  if (i < 16) {
    v = simd_sum(1.0);
  } else {
    v = simd_max(2.0);
  }
  y[i] = v;
}

kernel void sums_in_half_a_simdgroup_at_barrier(device float* y [[buffer(0)]],
                                                uint i [[thread_index_in_threadgroup]]) {
  float v = 0;
  if (i < 16) v = simd_sum(1.0);
  threadgroup_barrier(mem_flags::mem_none);
  y[i] = v;
}

kernel void shuffles_from_missing_lane(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i >= 24) return;
  y[i] = simd_shuffle_xor(float(i), 8);
}

kernel void shuffles_from_lane_40(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  y[i] = simd_shuffle(float(i), ushort(40));
}

kernel void multiplies_with_missing_lanes(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 31) return;
  simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(1.0);
  simdgroup_multiply(m, m, m);
  y[i] = m.thread_elements()[0];
}

struct Params {
  uint n;
  uint other;
};

kernel void writes_constant(constant Params& p [[buffer(0)]], device float* y [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
  const_cast<thread Params&>(p).n = i;  // Apple's compiler refuses the cast; the check is a second line
  y[i] = 1;
}

kernel void needs_big_arguments(constant Params& p [[buffer(0)]], device float* y [[buffer(1)]],
                                uint i [[thread_position_in_grid]]) {
  y[i] = float(p.n);
}

kernel void reads_misaligned(device const char* x [[buffer(0)]], device float* y [[buffer(1)]],
                             uint i [[thread_position_in_grid]]) {
  y[i] = *(device const float*)(x + i + 1);
}

kernel void reads_misaligned_vector(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                    uint i [[thread_position_in_grid]]) {
  const float4 v = *(device const float4*)(x + i);
  y[i] = v.x + v.w;
}

kernel void indexes_past_an_array(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float mine[4] = {1, 2, 3, 4};
  y[i] = mine[i];
}

kernel void divides_by_zero(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  y[i] = float(100 / i);
}

kernel void never_ends(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  volatile device float* v = y;
  while (v[i] == 0) {
  }
}

kernel void fills(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = float(i); }

kernel void doubles(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  y[i] = 2 * x[i];
}
