#pragma once
// GEMM tiles over quantised weights (prefill). A threadgroup expands 64 x 64 weights to bf16 in threadgroup memory,
// just long enough to multiply them with its 16 or 32 rows; sums are fp32. The expanded matrix never exists.
//
//   rows 16: 2 simdgroups, rows 32: 4 simdgroups; each computes 16 rows x 32 outputs.
//
// The multiplication itself is a type, so that the same kernels exist with simdgroup matrices (qmm.metal) and with
// Metal 4 tensor operations (qmm_tensor.metal):
//   void clear(); void step(a, w): += a [16][64] x w [32][64]^T; void store(out): 16 x 32 floats, pitch kTileN.
#include "quantized.h"

constexpr int tile_threads(int rows) { return kTileThreads * rows / 32; }

// 32 consecutive weights of a row, k a multiple of 32: of one quantisation group, so one scale and one bias. A row beyond
// n is zero. Codes are masked where they are, as in quantized.h, and the scale makes up for their place.
inline void expand32(Matrix m, int bits, int row, int k, threadgroup bfloat4* out) {
  if (row >= m.shape.n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = bfloat4(float4(0));
    return;
  }
  const uint r = uint(row);
  if (bits == 16) {
    const device bfloat* values = (const device bfloat*)m.codes + r * uint(m.shape.k) + uint(k);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      out[i] = bfloat4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    return;
  }
  const device uint2* codes = (const device uint2*)(m.codes + (r * uint(m.shape.k) + uint(k)) / 32u * uint(bits));
  const uint g = r * (uint(m.shape.k) >> m.shape.group_shift) + (uint(k) >> m.shape.group_shift);
  const float scale = float(m.scales[g]);
  const float bias = float(m.biases[g]);
  if (bits == 4) {
    const float4 low = scale * float4(1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096);
    const float4 high = low * (1.0f / 65536);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint word = codes[i / 2][i % 2];
      out[2 * i] = bfloat4(low * float4(uint4(word) & uint4(0xf, 0xf0, 0xf00, 0xf000)) + bias);
      out[2 * i + 1] = bfloat4(high * float4(uint4(word) & uint4(0xf0000, 0xf00000, 0xf000000, 0xf0000000)) + bias);
    }
  } else {
    const float4 scales = scale * float4(1.0f, 1.0f / 256, 1.0f / 65536, 1.0f / 16777216);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint word = codes[i / 2][i % 2];
      out[i] = bfloat4(scales * float4(uint4(word) & uint4(0xff, 0xff00, 0xff0000, 0xff000000)) + bias);
    }
  }
}

// The tile of 64 weight rows x 64 inputs, 32 rows of `upper` over 32 of `lower`: half a row a thread and turn.
template <int kRows>
void load_weights(Matrix upper, int upper_row, Matrix lower, int lower_row, int bits, int k, threadgroup bfloat* tile,
                  int thread_index) {
#pragma unroll
  for (int i = 0; i < 2 * kTileN / tile_threads(kRows); ++i) {
    const int half_row = i * tile_threads(kRows) + thread_index;
    const int row = half_row / 2;
    const int column = half_row % 2 * 32;
    threadgroup bfloat4* out = (threadgroup bfloat4*)(tile + row * kTilePitch + column);
    const bool first = row < kTileN / 2;
    expand32(first ? upper : lower, bits, first ? upper_row + row : lower_row + row - kTileN / 2, k + column, out);
  }
}

// A thread's quarter of an input row: 16 elements. A null row becomes zero.
inline void load_input_quarter(const device bfloat* row, int k, threadgroup bfloat* tile, int thread_index) {
  const int column = thread_index % 4 * 16;
  threadgroup bfloat4* out = (threadgroup bfloat4*)(tile + thread_index / 4 * kTilePitch + column);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = row ? *((const device bfloat4*)(row + k + column) + i) : bfloat4(float4(0));
  }
}

// The tile's products: 16 or 32 input rows (a quarter of a row a thread, from `in`) times 64 weight rows, 32 of `upper`
// and 32 of `lower`, over all of K. Returns them as [rows][kTileN] fp32, where the weights were: a tile that keeps no
// memory of its own for them lets more threadgroups share a core. Called by all threads.
template <int kRows, typename Mma>
threadgroup float* multiply(const device bfloat* in, Matrix upper, int upper_row, Matrix lower, int lower_row, int bits,
                            threadgroup bfloat4* input_words, threadgroup bfloat4* weight_words, int thread_index,
                            ushort sg, ushort lane) {
  static_assert(kRows * kTileN * sizeof(float) <= kTileN * kTilePitch * sizeof(bfloat), "the sums fit");
  threadgroup bfloat* input = (threadgroup bfloat*)input_words;
  threadgroup bfloat* weight = (threadgroup bfloat*)weight_words;
  threadgroup float* sums = (threadgroup float*)weight_words;
  const int sub_row = int(sg) / 2 * 16;
  const int sub_n = int(sg) % 2 * 32;
  Mma mma;
  mma.clear();
  for (int k = 0; k < upper.shape.k; k += kTileK) {
    load_input_quarter(in, k, input, thread_index);
    load_weights<kRows>(upper, upper_row, lower, lower_row, bits, k, weight, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mma.step(input + sub_row * kTilePitch, weight + sub_n * kTilePitch, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  mma.store(sums + sub_row * kTileN + sub_n, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return sums;
}

// affine_qmm: out[m][n] = sum_k w[n,k] * x[m,k] for the dense matrices.
//   x [M, in_stride] bf16   w [N, K]   out [M, out_stride] bf16 or f32, or f32 added to (kOutput)
//   Launch    grid (ceil(N/64), ceil(M/rows)), threadgroup 4 * rows threads.
//   Requires  K % 64 == 0.
//   Moves     ceil(M/rows) * N * K * 0.5625 bytes of weights at worst, less what the caches keep.
//   Numerics  weights and inputs rounded to bf16, fp32 sums in steps of 64.
template <int kRows, typename Mma>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void affine_qmm(
    constant QmmParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]], const device uint* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]], const device bfloat* biases [[buffer(4)]],
    device bfloat* out [[buffer(5)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat4 input_words[kRows * kTilePitch / 4];
  threadgroup bfloat4 weight_words[kTileN * kTilePitch / 4];
  const Matrix m = {codes, scales, biases, p.matrix};
  const int row0 = int(tg.y) * kRows;
  const int n0 = int(tg.x) * kTileN;
  const int my_row = row0 + int(thread_index) / 4;
  const device bfloat* in = my_row < p.rows ? x + uint(my_row) * uint(p.in_stride) : nullptr;

  const threadgroup float* sums = multiply<kRows, Mma>(in, m, n0, m, n0 + kTileN / 2, kBits0, input_words, weight_words,
                                                       int(thread_index), sg, lane);
  for (int i = int(thread_index); i < kRows * kTileN; i += tile_threads(kRows)) {
    const int row = row0 + i / kTileN;
    const int n = n0 + i % kTileN;
    if (row >= p.rows || n >= p.matrix.n) continue;
    const uint at = uint(row) * uint(p.out_stride) + uint(n);
    if (kOutput == 0) {
      out[at] = bfloat(sums[i]);
    } else if (kOutput == 1) {
      ((device float*)out)[at] = sums[i];
    } else {
      ((device float*)out)[at] += sums[i];
    }
  }
}

// experts_up_qmm: hidden = silu(gate x) * up x for the rows of one block, all of the same expert; the weight tile holds
// 32 rows of gate over 32 rows of up.
//   x [R, K] bf16   sorted: pair numbers (row * 9 + choice) by expert   hidden [R, 8 W + Ws] bf16
//   Launch    indirect: grid (ceil(max(W, Ws)/32), blocks), threadgroup 4 * rows threads.
template <int kRows, typename Mma>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_up_qmm(
    constant ExpertsParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]],
    const device int* sorted [[buffer(2)]], const device ExpertBlock* blocks [[buffer(3)]],
    const device uint* gate_codes [[buffer(4)]], const device bfloat* gate_scales [[buffer(5)]],
    const device bfloat* gate_biases [[buffer(6)]], const device uint* up_codes [[buffer(7)]],
    const device bfloat* up_scales [[buffer(8)]], const device bfloat* up_biases [[buffer(9)]],
    const device uint* shared_gate_codes [[buffer(10)]], const device bfloat* shared_gate_scales [[buffer(11)]],
    const device bfloat* shared_gate_biases [[buffer(12)]], const device uint* shared_up_codes [[buffer(13)]],
    const device bfloat* shared_up_scales [[buffer(14)]], const device bfloat* shared_up_biases [[buffer(15)]],
    device bfloat* hidden [[buffer(16)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat4 input_words[kRows * kTilePitch / 4];
  threadgroup bfloat4 weight_words[kTileN * kTilePitch / 4];
  const ExpertBlock block = blocks[tg.y];
  const bool shared = block.expert == p.experts;
  const int width = shared ? p.shared.n : p.expert.n;
  const int n0 = int(tg.x) * (kTileN / 2);
  if (n0 >= width) return;
  Matrix gate, up;
  if (shared) {
    gate = {shared_gate_codes, shared_gate_scales, shared_gate_biases, p.shared};
    up = {shared_up_codes, shared_up_scales, shared_up_biases, p.shared};
  } else {
    gate = expert_of({gate_codes, gate_scales, gate_biases, p.expert}, kBits0, block.expert);
    up = expert_of({up_codes, up_scales, up_biases, p.expert}, kBits0, block.expert);
  }
  const int bits = shared ? kBits1 : kBits0;
  const int my_row = int(thread_index) / 4;
  const device bfloat* in =
      my_row < block.count ? x + uint(sorted[block.first + my_row] / kPairs) * uint(p.in_stride) : nullptr;

  const threadgroup float* sums =
      multiply<kRows, Mma>(in, gate, n0, up, n0, bits, input_words, weight_words, int(thread_index), sg, lane);
  for (int i = int(thread_index); i < kRows * kTileN / 2; i += tile_threads(kRows)) {
    const int row = i / (kTileN / 2);
    const int n = i % (kTileN / 2);
    if (row >= block.count || n0 + n >= width) continue;
    const int pair = sorted[block.first + row];
    const float g = sums[row * kTileN + n];
    const float u = sums[row * kTileN + kTileN / 2 + n];
    hidden[uint(pair / kPairs) * uint(p.out_stride) + uint(pair % kPairs * p.expert.n + n0 + n)] = bfloat(silu(g) * u);
  }
}

// experts_down_qmm: y[pair] = down hidden[pair] for the rows of one block.
//   hidden [R, 8 W + Ws] bf16   sorted, blocks as above   y [R, 9, N] bf16
//   Launch    indirect: grid (ceil(N/64), blocks), threadgroup 4 * rows threads.
template <int kRows, typename Mma>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void experts_down_qmm(
    constant ExpertsParams& p [[buffer(0)]], const device bfloat* hidden [[buffer(1)]],
    const device int* sorted [[buffer(2)]], const device ExpertBlock* blocks [[buffer(3)]],
    const device uint* down_codes [[buffer(4)]], const device bfloat* down_scales [[buffer(5)]],
    const device bfloat* down_biases [[buffer(6)]], const device uint* shared_codes [[buffer(7)]],
    const device bfloat* shared_scales [[buffer(8)]], const device bfloat* shared_biases [[buffer(9)]],
    device bfloat* y [[buffer(10)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat4 input_words[kRows * kTilePitch / 4];
  threadgroup bfloat4 weight_words[kTileN * kTilePitch / 4];
  const ExpertBlock block = blocks[tg.y];
  const bool shared = block.expert == p.experts;
  const int n0 = int(tg.x) * kTileN;
  Matrix down;
  if (shared) {
    down = {shared_codes, shared_scales, shared_biases, p.shared};
  } else {
    down = expert_of({down_codes, down_scales, down_biases, p.expert}, kBits0, block.expert);
  }
  const int bits = shared ? kBits1 : kBits0;
  const int my_row = int(thread_index) / 4;
  const device bfloat* in = nullptr;
  if (my_row < block.count) {
    const int pair = sorted[block.first + my_row];
    in = hidden + uint(pair / kPairs) * uint(p.in_stride) + uint(pair % kPairs * p.expert.k);
  }

  const threadgroup float* sums = multiply<kRows, Mma>(in, down, n0, down, n0 + kTileN / 2, bits, input_words,
                                                       weight_words, int(thread_index), sg, lane);
  for (int i = int(thread_index); i < kRows * kTileN; i += tile_threads(kRows)) {
    const int row = i / kTileN;
    const int n = i % kTileN;
    if (row >= block.count || n0 + n >= p.expert.n) continue;
    y[uint(sorted[block.first + row]) * uint(p.out_stride) + uint(n0 + n)] = bfloat(sums[i]);
  }
}
