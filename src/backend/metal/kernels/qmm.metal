// The GEMMs with simdgroup matrices: M1 to M4, and wherever the tensor operations are not to be trusted.
#include "qmm_tile.h"

// 16 rows x 32 outputs as 2 x 4 matrices of 8 x 8.
struct SimdgroupMma {
  simdgroup_matrix<float, 8, 8> sums[2][4];

  void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
  void step(const threadgroup bfloat* a, const threadgroup bfloat* w, ushort) {
    for (int k = 0; k < kTileK; k += 8) {
      simdgroup_matrix<bfloat, 8, 8> left[2];
      simdgroup_matrix<bfloat, 8, 8> right;
#pragma unroll
      for (int i = 0; i < 2; ++i) simdgroup_load(left[i], a + i * 8 * kTilePitch + k, kTilePitch);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        simdgroup_load(right, w + j * 8 * kTilePitch + k, kTilePitch, ulong2(0, 0), true);
#pragma unroll
        for (int i = 0; i < 2; ++i) simdgroup_multiply_accumulate(sums[i][j], left[i], right, sums[i][j]);
      }
    }
  }
  void store(threadgroup float* out, ushort) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) simdgroup_store(sums[i][j], out + i * 8 * kTileN + j * 8, kTileN);
    }
  }
};

// clang-format off
template [[host_name("affine_qmm_16")]] [[kernel]] decltype(affine_qmm<16, SimdgroupMma>) affine_qmm<16, SimdgroupMma>;
template [[host_name("affine_qmm_32")]] [[kernel]] decltype(affine_qmm<32, SimdgroupMma>) affine_qmm<32, SimdgroupMma>;
template [[host_name("experts_up_qmm_16")]] [[kernel]] decltype(experts_up_qmm<16, SimdgroupMma>) experts_up_qmm<16, SimdgroupMma>;
template [[host_name("experts_up_qmm_32")]] [[kernel]] decltype(experts_up_qmm<32, SimdgroupMma>) experts_up_qmm<32, SimdgroupMma>;
template [[host_name("experts_down_qmm_16")]] [[kernel]] decltype(experts_down_qmm<16, SimdgroupMma>) experts_down_qmm<16, SimdgroupMma>;
template [[host_name("experts_down_qmm_32")]] [[kernel]] decltype(experts_down_qmm<32, SimdgroupMma>) experts_down_qmm<32, SimdgroupMma>;
// clang-format on

// rmsnorm: rows normalised once, for the GEMMs that follow (prefill).
//   x [R, H] f32   weight [H] f32   out [R, H] bf16
//   Launch    grid (R), threadgroup 128 = 4 simdgroups. Moves 6 bytes an element.
[[max_total_threads_per_threadgroup(kNormThreads)]] kernel void rmsnorm(
    constant RmsnormParams& p [[buffer(0)]], const device float* x [[buffer(1)]],
    const device float* weight [[buffer(2)]], device bfloat* out [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[kNormThreads / kLanes];
  const device float* in = x + row * uint(p.hidden);
  float squares = 0;
  for (int k = int(thread_index) * 4; k < p.hidden; k += kNormThreads * 4) {
    const float4 t = load4(in + k);
    squares += dot(t, t);
  }
  squares = simd_sum(squares);
  if (lane == 0) partial[sg] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float scale = rsqrt((partial[0] + partial[1] + partial[2] + partial[3]) / float(p.hidden) + p.eps);
  for (int k = int(thread_index) * 4; k < p.hidden; k += kNormThreads * 4) {
    store4(out + row * uint(p.hidden) + uint(k), load4(in + k) * scale * load4(weight + k));
  }
}

// dequantise: a whole (stacked) matrix expanded to bf16 in memory: the control of `fused-dequant`.
//   Launch    grid (ceil(K/8/32), stack * N), threadgroup 32: a lane expands eight weights.
[[max_total_threads_per_threadgroup(kLanes)]] kernel void dequantise(constant DequantiseParams& p [[buffer(0)]],
                                                                     const device uint* codes [[buffer(1)]],
                                                                     const device bfloat* scales [[buffer(2)]],
                                                                     const device bfloat* biases [[buffer(3)]],
                                                                     device bfloat* out [[buffer(4)]],
                                                                     uint2 tg [[threadgroup_position_in_grid]],
                                                                     ushort lane [[thread_index_in_simdgroup]]) {
  const int k = (int(tg.x) * kLanes + int(lane)) * 8;
  if (k >= p.matrix.k) return;
  const Matrix m = {codes, scales, biases, p.matrix};
  float w[8];
  dequantise8(m, kBits0, int(tg.y), k, w);
  device bfloat* at = out + ulong(tg.y) * ulong(p.matrix.k) + ulong(k);
  store4(at, float4(w[0], w[1], w[2], w[3]));
  store4(at + 4, float4(w[4], w[5], w[6], w[7]));
}
