// The sparse MoE of a decode step: routing, and the chosen experts as GEMVs beside the shared expert.
#include "quantized.h"

// router_topk: the eight largest router logits of a row, their softmax weights renormalised, and the shared gate.
//   logits [R, E] f32   shared_logit [R] f32   ids [R, 8]   weights [R, 8] f32   shared_gate [R] f32
//   Launch    grid (R), threadgroup 32: one simdgroup a row; lane l holds the logits of experts l, l + 32, ... in
//             registers, since eight rounds of loads would be most of the kernel's time.
//   Numerics  p_i / sum p over the chosen is exp(l_i - max) / sum exp over the chosen. Ties: the lower id.
[[max_total_threads_per_threadgroup(kLanes)]] kernel void router_topk(
    constant TopkParams& p [[buffer(0)]], const device float* logits [[buffer(1)]],
    const device float* shared_logit [[buffer(2)]], device int* ids [[buffer(3)]], device float* weights [[buffer(4)]],
    device float* shared_gate [[buffer(5)]], uint row [[threadgroup_position_in_grid]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int kMine = kMaxExperts / kLanes;
  const device float* l = logits + row * uint(p.experts);
  float mine[kMine];  // of experts lane, lane + 32, ...; -inf: not there, or chosen already
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int id = j * kLanes + int(lane);
    mine[j] = id < p.experts ? l[id] : -INFINITY;
    finite = finite && !isnan(mine[j]);
  }
  finite = simd_all(finite);  // a NaN is never the largest, so it has to be carried into the weights
  float top = 0;
  float sum = 0;
  float my_weight = 0;  // lane i < 8 keeps the i-th choice
  int my_id = 0;
  for (int i = 0; i < kTopExperts; ++i) {
    float best = -INFINITY;
    int id = p.experts;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (mine[j] > best) {
        best = mine[j];
        id = j * kLanes + int(lane);
      }
    }
    float value = simd_max(best);
    int chosen = simd_min(best == value ? id : p.experts);
    if (chosen == p.experts) {  // nothing above -inf is left
      chosen = i;
      value = NAN;
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      if (chosen == j * kLanes + int(lane)) mine[j] = -INFINITY;
    }
    if (i == 0) top = value;
    const float e = precise::exp(value - top);
    sum += e;
    if (int(lane) == i) {
      my_weight = e;
      my_id = chosen;
    }
  }
  if (int(lane) < kTopExperts) {
    ids[row * uint(kTopExperts) + lane] = my_id;
    weights[row * uint(kTopExperts) + lane] = finite ? my_weight / sum : NAN;
  }
  if (lane == 0) shared_gate[row] = sigmoid(shared_logit[row]);
}

// experts_up_qmv: hidden = silu(gate x) * up x, for the eight chosen experts and the shared one, in one dispatch.
//   x [R, K] bf16   ids [R, 8]   gate, up [E, W, K]   shared_gate, shared_up [Ws, K]   hidden [R, 8 W + Ws] bf16
//   Launch    grid (ceil(max(W, Ws)/8), R * 9), threadgroup 64 = 2 simdgroups, 4 outputs (8 weight rows) each.
//   Moves     2 * (8 W + Ws) * K * 0.5625 bytes of weights a row.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void experts_up_qmv(
    constant ExpertsParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]], const device int* ids [[buffer(2)]],
    const device uint* gate_codes [[buffer(3)]], const device bfloat* gate_scales [[buffer(4)]],
    const device bfloat* gate_biases [[buffer(5)]], const device uint* up_codes [[buffer(6)]],
    const device bfloat* up_scales [[buffer(7)]], const device bfloat* up_biases [[buffer(8)]],
    const device uint* shared_gate_codes [[buffer(9)]], const device bfloat* shared_gate_scales [[buffer(10)]],
    const device bfloat* shared_gate_biases [[buffer(11)]], const device uint* shared_up_codes [[buffer(12)]],
    const device bfloat* shared_up_scales [[buffer(13)]], const device bfloat* shared_up_biases [[buffer(14)]],
    device bfloat* hidden [[buffer(15)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = tg.y / uint(kPairs);
  const int pair = int(tg.y % uint(kPairs));
  const bool shared = pair == kTopExperts;
  const int row0 = int(tg.x) * kQmvGroupRows + int(sg) * kQmvRows;
  const int width = shared ? p.shared.n : p.expert.n;
  if (row0 >= width) return;

  PlainInput input = {x + row * uint(p.in_stride)};
  Matrix m[2] = {{gate_codes, gate_scales, gate_biases, p.expert}, {up_codes, up_scales, up_biases, p.expert}};
  float sums[2 * kQmvRows] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (shared) {
    m[0] = {shared_gate_codes, shared_gate_scales, shared_gate_biases, p.shared};
    m[1] = {shared_up_codes, shared_up_scales, shared_up_biases, p.shared};
    dot_rows_of<kQmvRows, 2>(kBits1, m, row0, input, lane, sums);
  } else {
    const int expert = ids[row * uint(kTopExperts) + uint(pair)];
    m[0] = expert_of(m[0], kBits0, expert);
    m[1] = expert_of(m[1], kBits0, expert);
    dot_rows_of<kQmvRows, 2>(kBits0, m, row0, input, lane, sums);
  }
  device bfloat* out = hidden + row * uint(p.out_stride) + uint(pair * p.expert.n);
#pragma unroll
  for (int r = 0; r < kQmvRows; ++r) {
    const float g = simd_sum(sums[r]);
    const float u = simd_sum(sums[kQmvRows + r]);
    if (lane == 0 && row0 + r < width) out[row0 + r] = bfloat(silu(g) * u);
  }
}

// experts_down_qmv: residual += sum_i weight_i * down_i hidden_i + shared_gate * shared_down hidden_shared.
//   hidden [R, 8 W + Ws] bf16   ids, weights [R, 8]   shared_gate [R]   down [E, N, W]   residual [R, N] f32
//   Launch    grid (ceil(N/8), R), threadgroup 64 = 2 simdgroups, 4 rows each, which walk the nine experts.
//   Moves     N * (8 W + Ws) * 0.5625 bytes of weights a row.
//   Numerics  the router weight multiplies each lane's partial sum, so nine experts cost one reduction.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void experts_down_qmv(
    constant ExpertsParams& p [[buffer(0)]], const device bfloat* hidden [[buffer(1)]],
    const device int* ids [[buffer(2)]], const device float* weights [[buffer(3)]],
    const device float* shared_gate [[buffer(4)]], const device uint* down_codes [[buffer(5)]],
    const device bfloat* down_scales [[buffer(6)]], const device bfloat* down_biases [[buffer(7)]],
    const device uint* shared_codes [[buffer(8)]], const device bfloat* shared_scales [[buffer(9)]],
    const device bfloat* shared_biases [[buffer(10)]], device float* residual [[buffer(11)]],
    uint2 tg [[threadgroup_position_in_grid]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = tg.y;
  const int row0 = int(tg.x) * kQmvGroupRows + int(sg) * kQmvRows;
  if (row0 >= p.expert.n) return;
  const Matrix down = {down_codes, down_scales, down_biases, p.expert};
  PlainInput input = {hidden + row * uint(p.in_stride)};
  float total[kQmvRows] = {0, 0, 0, 0};
  for (int pair = 0; pair < kTopExperts; ++pair) {
    const Matrix m = expert_of(down, kBits0, ids[row * uint(kTopExperts) + uint(pair)]);
    float sums[kQmvRows] = {0, 0, 0, 0};
    dot_rows_of<kQmvRows, 1>(kBits0, &m, row0, input, lane, sums);
    const float weight = weights[row * uint(kTopExperts) + uint(pair)];
#pragma unroll
    for (int r = 0; r < kQmvRows; ++r) total[r] += weight * sums[r];
    input.x += p.expert.k;
  }
  const Matrix shared = {shared_codes, shared_scales, shared_biases, p.shared};
  float sums[kQmvRows] = {0, 0, 0, 0};
  dot_rows_of<kQmvRows, 1>(kBits1, &shared, row0, input, lane, sums);
  const float weight = shared_gate[row];
#pragma unroll
  for (int r = 0; r < kQmvRows; ++r) {
    const float y = simd_sum(total[r] + weight * sums[r]);
    if (lane == 0 && row0 + r < p.expert.n) residual[row * uint(p.out_stride) + uint(row0 + r)] += y;
  }
}

// experts_qmv: one projection of the nine experts without what follows it: the control of the chain ablations.
//   x [R, in_stride] bf16, the pair's input at pair * pair_stride   w [E, N, K]   out [R, 9, out_stride] bf16
//   Launch    grid (ceil(max N / 8), R * 9), threadgroup 64.
[[max_total_threads_per_threadgroup(kQmvThreads)]] kernel void experts_qmv(
    constant ExpertsParams& p [[buffer(0)]], const device bfloat* x [[buffer(1)]], const device int* ids [[buffer(2)]],
    const device uint* codes [[buffer(3)]], const device bfloat* scales [[buffer(4)]],
    const device bfloat* biases [[buffer(5)]], const device uint* shared_codes [[buffer(6)]],
    const device bfloat* shared_scales [[buffer(7)]], const device bfloat* shared_biases [[buffer(8)]],
    device bfloat* out [[buffer(9)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = tg.y / uint(kPairs);
  const int pair = int(tg.y % uint(kPairs));
  const int row0 = int(tg.x) * kQmvGroupRows + int(sg) * kQmvRows;
  const bool shared = pair == kTopExperts;
  const int width = shared ? p.shared.n : p.expert.n;
  if (row0 >= width) return;
  PlainInput input = {x + row * uint(p.in_stride) + uint(pair * p.pair_stride)};
  Matrix m = {codes, scales, biases, p.expert};
  float sums[kQmvRows] = {0, 0, 0, 0};
  if (shared) {
    m = {shared_codes, shared_scales, shared_biases, p.shared};
    dot_rows_of<kQmvRows, 1>(kBits1, &m, row0, input, lane, sums);
  } else {
    m = expert_of(m, kBits0, ids[row * uint(kTopExperts) + uint(pair)]);
    dot_rows_of<kQmvRows, 1>(kBits0, &m, row0, input, lane, sums);
  }
#pragma unroll
  for (int r = 0; r < kQmvRows; ++r) {
    const float y = simd_sum(sums[r]);
    if (lane == 0 && row0 + r < width) out[tg.y * uint(p.out_stride) + uint(row0 + r)] = bfloat(y);
  }
}

// swiglu: hidden = silu(gate) * up, apart from the projections: a control as above.
//   gate, up [R, 9, stride] bf16   hidden [R, 8 W + Ws] bf16
//   Launch    grid (ceil(width/256), R * 9), threadgroup 256.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void swiglu(
    constant SwigluParams& p [[buffer(0)]], const device bfloat* gate [[buffer(1)]],
    const device bfloat* up [[buffer(2)]], device bfloat* hidden [[buffer(3)]],
    uint2 tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = tg.y / uint(kPairs);
  const int pair = int(tg.y % uint(kPairs));
  const int n = int(tg.x) * kElementThreads + int(thread_index);
  if (n >= (pair == kTopExperts ? p.shared_width : p.expert_width)) return;
  const uint stride = uint(max(p.expert_width, p.shared_width));
  const uint at = tg.y * stride + uint(n);
  const uint out_stride = uint(kTopExperts * p.expert_width + p.shared_width);
  hidden[row * out_stride + uint(pair * p.expert_width + n)] = bfloat(silu(float(gate[at])) * float(up[at]));
}
