// Row-parallel GEMV for the dense matrices (decode): a simdgroup works on four or eight outputs together, its lanes read
// neighbouring parts of each weight row. Grids have the activation rows first, so that the threadgroups of several rows
// that read the same weights run side by side and share them in the caches.
#include "quantized.h"

// embed_rows: residual[row] = embedding[token], de-quantised; token may be the one that the last step picked.
//   embedding [vocab, K]      residual [R, K] f32
//   Launch    grid (K/256 rounded up, R), threadgroup 32: a lane expands eight values.
//   Moves     R * (K * 0.5625 + 4 K) bytes.
[[max_total_threads_per_threadgroup(kLanes)]] kernel void embed_rows(
    constant EmbedParams& p [[buffer(0)]], const device uint* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]], const device bfloat* biases [[buffer(3)]],
    const device RowInfo* rows [[buffer(4)]], const device int* last_tokens [[buffer(5)]],
    device float* residual [[buffer(6)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const RowInfo row = rows[tg.y];
  const int k = (int(tg.x) * kLanes + int(lane)) * 8;
  if (k >= p.matrix.k) return;
  const Matrix m = {codes, scales, biases, p.matrix};
  // A slot that has picked nothing holds -1; row 0 keeps the load inside, and the host rejects the step's result.
  const int token = clamp(row.token >= 0 ? row.token : last_tokens[row.slot * kLastTokenStride], 0, p.matrix.n - 1);
  float w[8];
  dequantise8(m, kBits0, token, k, w);
  device float* out = residual + tg.y * uint(p.matrix.k) + uint(k);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = w[i];
}

// rmsnorm_qmv: RMSNorm, then up to four matrices over the same input, each with its own output.
//   x [R, H] f32   norm [H] f32   w_i [n_i, H] affine or bf16   out_i [R, n_i] bf16 or f32   normed [R, H] bf16
//   Used for  the input projections of both mixers, the router with the shared expert's gate, and lm_head.
//   Launch    grid (rows; sum of ceil(n_i / 16), plus one with kWriteNormed), threadgroup 64 = 2 simdgroups of 8 rows:
//             x and norm are 8 bytes an element, four times a bf16 input, so twice the rows share each load.
//   Requires  H % 64 == 0; codes 8-byte aligned.
//   Moves     sum n_i * H * 0.5625 bytes of weights a row (4 bits, group 64); bandwidth-bound.
//   Numerics  y = (sum w * (x * norm)) / rms: the division moves behind the sum.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void rmsnorm_qmv(
    constant RmsnormQmvParams& p [[buffer(0)]], const device float* x [[buffer(1)]],
    const device float* norm [[buffer(2)]], const device int* row_list [[buffer(3)]],
    const device uint* codes0 [[buffer(4)]], const device bfloat* scales0 [[buffer(5)]],
    const device bfloat* biases0 [[buffer(6)]], const device uint* codes1 [[buffer(7)]],
    const device bfloat* scales1 [[buffer(8)]], const device bfloat* biases1 [[buffer(9)]],
    const device uint* codes2 [[buffer(10)]], const device bfloat* scales2 [[buffer(11)]],
    const device bfloat* biases2 [[buffer(12)]], const device uint* codes3 [[buffer(13)]],
    const device bfloat* scales3 [[buffer(14)]], const device bfloat* biases3 [[buffer(15)]],
    device bfloat* out0 [[buffer(16)]], device bfloat* out1 [[buffer(17)]], device bfloat* out2 [[buffer(18)]],
    device bfloat* out3 [[buffer(19)]], device bfloat* normed [[buffer(20)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = kGatherRows ? uint(row_list[tg.x]) : tg.x;
  NormedInput input = {x + row * uint(p.hidden), norm, 0.0f};

  int which = 0;
  int block = int(tg.y);
  for (; which < 4; ++which) {
    const int blocks = (p.matrix[which].n + kNormedGroupRows - 1) / kNormedGroupRows;
    if (block < blocks) break;
    block -= blocks;
  }
  if (which == 4) {  // the threadgroup that stores the normed row
    if (!kWriteNormed || sg != 0) return;
    float squares = 0;
    for (int k = int(lane) * 4; k < p.hidden; k += kLanes * 4) {
      const float4 t = load4(input.x + k);
      squares += dot(t, t);
    }
    const float scale = rsqrt(simd_sum(squares) / float(p.hidden) + p.eps);
    for (int k = int(lane) * 4; k < p.hidden; k += kLanes * 4) {
      store4(normed + tg.x * uint(p.hidden) + uint(k), load4(input.x + k) * load4(norm + k) * scale);
    }
    return;
  }

  Matrix m = {codes0, scales0, biases0, p.matrix[which]};
  device bfloat* out = out0;
  int bits = kBits0;
  if (which == 1) {
    m.codes = codes1, m.scales = scales1, m.biases = biases1;
    out = out1, bits = kBits1;
  } else if (which == 2) {
    m.codes = codes2, m.scales = scales2, m.biases = biases2;
    out = out2, bits = kBits2;
  } else if (which == 3) {
    m.codes = codes3, m.scales = scales3, m.biases = biases3;
    out = out3, bits = kBits3;
  }

  const int row0 = block * kNormedGroupRows + int(sg) * kNormedRows;
  float sums[kNormedRows] = {0, 0, 0, 0, 0, 0, 0, 0};
  dot_rows_of<kNormedRows, 1>(bits, &m, row0, input, lane, sums);
  const float scale = rsqrt(simd_sum(input.sum_squares) / float(p.hidden) + p.eps);
#pragma unroll
  for (int r = 0; r < kNormedRows; ++r) {
    const float y = simd_sum(sums[r]) * scale;
    if (lane == 0 && row0 + r < m.shape.n) {
      const uint at = tg.x * uint(m.shape.n) + uint(row0 + r);
      if (p.float_out[which] != 0) {
        ((device float*)out)[at] = y;
      } else {
        out[at] = bfloat(y);
      }
    }
  }
}

// qmv_residual: residual[n] += sum_k w[n,k] * x[k]: the output projections.
//   x [R, stride] bf16   w [N, K]   residual [R, N] f32
//   Launch    grid (R, ceil(N/8)), threadgroup 64 = 2 simdgroups, 4 rows each.
//   Moves     N * K * 0.5625 + 2 K + 8 N bytes a row.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void qmv_residual(
    constant QmvParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]], const device uint* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]], const device bfloat* biases [[buffer(4)]],
    device float* residual [[buffer(5)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const Matrix m = {codes, scales, biases, p.matrix};
  PlainInput input = {x + tg.x * uint(p.in_stride)};
  const int row0 = int(tg.y) * kQmvGroupRows + int(sg) * kQmvRows;
  float sums[kQmvRows] = {0, 0, 0, 0};
  dot_rows_of<kQmvRows, 1>(kBits0, &m, row0, input, lane, sums);
#pragma unroll
  for (int r = 0; r < kQmvRows; ++r) {
    const float y = simd_sum(sums[r]);
    if (lane == 0 && row0 + r < m.shape.n) residual[tg.x * uint(p.out_stride) + uint(row0 + r)] += y;
  }
}

// qmv_thread_residual: the same product with one thread an output: the control of the `row-parallel` ablation.
//   Launch    grid (R, ceil(N/64)), threadgroup 64. Neighbouring lanes read rows that lie K/2 bytes apart.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void qmv_thread_residual(
    constant QmvParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]], const device uint* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]], const device bfloat* biases [[buffer(4)]],
    device float* residual [[buffer(5)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const Matrix m = {codes, scales, biases, p.matrix};
  const int row = int(tg.y) * kQmvThreads + int(thread_index);
  if (row >= p.matrix.n) return;
  const device bfloat* in = x + tg.x * uint(p.in_stride);
  float y = 0;
  for (int k = 0; k < p.matrix.k; k += 8) {
    float w[8];
    dequantise8(m, kBits0, row, k, w);
#pragma unroll
    for (int i = 0; i < 8; ++i) y += w[i] * float(in[k + i]);
  }
  residual[tg.x * uint(p.out_stride) + uint(row)] += y;
}
