// Kernels that exercise the shim library: collectives, vectors, overloads, matrices, tensors.
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

// One line of 32 results for each collective.
kernel void collectives(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  const float v = x[lane];
  const uint u = uint(lane);
  int line = 0;
  y[32 * line++ + lane] = simd_sum(v);
  y[32 * line++ + lane] = simd_product(lane < 4 ? v + 1 : 1.0);
  y[32 * line++ + lane] = simd_min(v);
  y[32 * line++ + lane] = simd_max(v);
  y[32 * line++ + lane] = simd_prefix_inclusive_sum(v);
  y[32 * line++ + lane] = simd_prefix_exclusive_sum(v);
  y[32 * line++ + lane] = simd_shuffle(v, ushort(31 - lane));
  y[32 * line++ + lane] = simd_shuffle_xor(v, 5);
  y[32 * line++ + lane] = simd_shuffle_up(v, 3);
  y[32 * line++ + lane] = simd_shuffle_down(v, 3);
  y[32 * line++ + lane] = simd_shuffle_rotate_up(v, 3);
  y[32 * line++ + lane] = simd_shuffle_rotate_down(v, 3);
  y[32 * line++ + lane] = simd_broadcast(v, 17);
  y[32 * line++ + lane] = simd_broadcast_first(v);
  y[32 * line++ + lane] = float(simd_or(u & 20u));
  y[32 * line++ + lane] = float(simd_and(u | 8u));
  y[32 * line++ + lane] = float(simd_xor(u));
  y[32 * line++ + lane] = simd_any(lane == 9) && !simd_all(lane == 9) ? 1 : 0;
  y[32 * line++ + lane] = float(popcount(uint(ulong(simd_ballot(lane % 3 == 0)))));
  y[32 * line++ + lane] = quad_sum(v);
  y[32 * line++ + lane] = quad_shuffle_xor(v, 2);
  y[32 * line++ + lane] = simd_shuffle_and_fill_up(v, -v, 2, 8);
  y[32 * line++ + lane] = simd_shuffle_and_fill_down(v, -v, 2);
  y[32 * line++ + lane] = simd_is_first() ? 1 : 0;
}

// The lanes that have returned do not count.
kernel void sums_what_is_there(device float* y [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i % 2) return;
  y[i / 2] = simd_sum(float(i));
}

struct Record {
  packed_float3 p;
  half h;
  uchar4 c;
};
static_assert(sizeof(Record) == 20, "packed layout");

kernel void vectors(device float* y [[buffer(0)]]) {
  float4 a = float4(1, 2, 3, 4);
  float2 b = a.wy;
  a.xz = b * 10.0;
  a.yw += float2(0.5);
  y[0] = a.x;
  y[1] = a.y;
  y[2] = a.z;
  y[3] = a.w;
  const half4 h = half4(a);
  y[4] = float(dot(h, half4(1.0h)));
  y[5] = all(a > float4(0)) ? 1 : 0;
  y[6] = as_type<float>(as_type<uint>(2.5));
  y[7] = float(bfloat(1.00390625)) + 0.0bf;  // halfway: to even
  const uint4 u = (uint4(0xF0, 0x12, 3, 4) >> 4) & 0xF;
  y[8] = float(u.x + u.y);
  y[9] = clamp(5.0, 0.0, 3.0) + max(1, 2) + fast::exp(0.0) + select(1.0, 2.0, true);
  y[10] = 2.0h * 3.0f + 1;
  y[11] = float(3) / 2 + 1e-1 * 10.0;
  const float3 c = float3(b, 7);
  y[12] = length(c.zz * float2(3.0 / 7, 4.0 / 7));
  y[13] = float(half(65504.0h) + half(16.0h));  // rounds to infinity
  y[14] = float(ctz(8u)) + float(extract_bits(0xABCDu, 4, 8));
  y[15] = M_PI_F;
}

inline float at(const device float* p, int i) { return p[i]; }
inline float at(const threadgroup float* p, int i) { return 100 * p[i]; }

kernel void overloads(device float* y [[buffer(0)]], threadgroup float* extra [[threadgroup(0)]],
                      uint i [[thread_index_in_threadgroup]]) {
  extra[i] = float(i);
  y[i] = 1;
  y[32 + i] = at(extra, int(i)) + at(y, int(i));
}

kernel void positions(device uint* y [[buffer(0)]], uint3 grid [[thread_position_in_grid]],
                      uint3 size [[threads_per_grid]], ushort3 in_group [[thread_position_in_threadgroup]],
                      ushort3 group_size [[threads_per_threadgroup]], uint3 group [[threadgroup_position_in_grid]],
                      uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                      ushort simdgroup [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]],
                      ushort simdgroups [[simdgroups_per_threadgroup]]) {
  const uint at = (grid.z * size.y + grid.y) * size.x + grid.x;
  const bool right = grid.x == group.x * 8 + in_group.x && grid.y == group.y * 4 + in_group.y &&
                     index == uint((in_group.z * group_size.y + in_group.y) * group_size.x + in_group.x) &&
                     index == simdgroup * 32u + lane && simdgroup < simdgroups && groups.z == 3;
  y[at] = right ? at : 0xFFFFFFFFu;
}

// C [16][24] = A [16][K] x B [K][24] (or B^T), K = 32, by 8 x 8 matrices; one simdgroup.
template <typename T, bool kTransposed>
[[kernel]] void matrices(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                         device float* c [[buffer(2)]]) {
  for (int m = 0; m < 16; m += 8) {
    for (int n = 0; n < 24; n += 8) {
      simdgroup_matrix<float, 8, 8> sum(0.0);
      for (int k = 0; k < 32; k += 8) {
        simdgroup_matrix<T, 8, 8> left, right;
        simdgroup_load(left, a, 32, ulong2(k, m));
        if (kTransposed) {
          simdgroup_load(right, b + n * 32 + k, 32, ulong2(0, 0), true);
        } else {
          simdgroup_load(right, b + k * 24 + n, 24);
        }
        simdgroup_multiply_accumulate(sum, left, right, sum);
      }
      simdgroup_store(sum, c + m * 24 + n, 24);
    }
  }
}
template [[host_name("matrices_float")]] [[kernel]] decltype(matrices<float, false>) matrices<float, false>;
template [[host_name("matrices_bfloat_t")]] [[kernel]] decltype(matrices<bfloat, true>) matrices<bfloat, true>;

// C [16][32] = A [16][K] x W [32][K]^T with cooperative tensors; kAsks: through get_multidimensional_index, else by M5's
// map for relaxed precision.
template <bool kAsks>
[[kernel]] void tensors(device const bfloat* a [[buffer(0)]], device const bfloat* w [[buffer(1)]],
                        device float* c [[buffer(2)]], constant int& k_length [[buffer(3)]],
                        ushort lane [[thread_index_in_simdgroup]]) {
  constexpr auto kDescriptor = mpp::tensor_ops::matmul2d_descriptor(
      16, 32, 16, false, true, true, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
  mpp::tensor_ops::matmul2d<kDescriptor, execution_simdgroup> op;
  auto left = op.template get_left_input_cooperative_tensor<bfloat, bfloat, float>();
  auto right = op.template get_right_input_cooperative_tensor<bfloat, bfloat, float>();
  auto sum = op.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  for (ushort i = 0; i < sum.get_capacity(); ++i) sum[i] = 0;
  const int row = (lane >> 2 & 4) | (lane >> 1 & 3);
  const int column = ((lane >> 2 & 2) | (lane & 1)) * 4;
  for (int k = 0; k < k_length; k += 16) {
    if (kAsks) {
      for (ushort i = 0; i < left.get_capacity(); ++i) {
        const auto p = left.get_multidimensional_index(i);
        if (left.is_valid_element(i)) left[i] = a[p[1] * k_length + k + p[0]];
      }
      for (ushort i = 0; i < right.get_capacity(); ++i) {
        const auto p = right.get_multidimensional_index(i);
        if (right.is_valid_element(i)) right[i] = w[p[1] * k_length + k + p[0]];
      }
    } else {
      for (int i = 0; i < 8; ++i) left[i] = a[(row + 8 * (i / 4)) * k_length + k + column + i % 4];
      for (int i = 0; i < 16; ++i)
        right[i] = w[(i / 8 * 16 + row + 8 * (i % 8 / 4)) * k_length + k + column + i % 4];
    }
    op.run(left, right, sum);
  }
  if (kAsks) {
    sum.store(tensor(c, extents<int, 32, 16>()));
  } else {
    for (int i = 0; i < 16; ++i)
      c[(row + 8 * (i % 8 / 4)) * 32 + i / 8 * 16 + column + i % 4] = sum[i];
  }
}
template [[host_name("tensors_ask")]] [[kernel]] decltype(tensors<true>) tensors<true>;
template [[host_name("tensors_assume")]] [[kernel]] decltype(tensors<false>) tensors<false>;

// The same with tensors in memory: one op loops over K itself, edges are dropped.
kernel void tensors_in_memory(device bfloat* a [[buffer(0)]], device bfloat* w [[buffer(1)]],
                              device float* c [[buffer(2)]], constant int& k_length [[buffer(3)]],
                              constant int& rows [[buffer(4)]]) {
  constexpr auto kDescriptor = mpp::tensor_ops::matmul2d_descriptor(16, 32, dynamic_extent, false, true, false);
  mpp::tensor_ops::matmul2d<kDescriptor, execution_simdgroup> op;
  auto left = tensor(a, dextents<int, 2>(k_length, rows));
  auto right = tensor(w, dextents<int, 2>(k_length, 32), array<int, 2>{1, k_length});
  auto out = tensor(c, dextents<int, 2>(32, rows));
  auto sum = op.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  op.run(left, right, sum);
  sum.store(out);
}

kernel void counts(device atomic_uint* bins [[buffer(0)]], device atomic_int* extreme [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(&bins[i % 7], 2u, memory_order_relaxed);
  atomic_fetch_max_explicit(extreme, int(i), memory_order_relaxed);
}

// How the counters see loads: every lane 4 bytes of one line; a stride of 128 bytes; 16 bytes a lane.
kernel void loads_coalesced(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            uint i [[thread_position_in_grid]]) {
  y[i] = x[i];
}
kernel void loads_strided(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  y[i] = x[i * 32];
}
kernel void loads_vectors(device const float4* x [[buffer(0)]], device float4* y [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * 2.0;
}
kernel void loads_in_a_loop(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                            constant int& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float sum = 0;
  for (int k = 0; k < n; ++k) sum += x[uint(k) * 32 + i];
  y[i] = sum;
}
