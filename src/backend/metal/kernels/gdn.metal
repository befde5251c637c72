// Gated DeltaNet. The state of a value head is kept column by column, [128 columns][128 rows] fp32, so that a
// simdgroup owns a column: lane l holds rows 4 l .. 4 l + 3, a product with k or q is one simd_sum, and a column moves
// as one run of 512 bytes.
//
// The convolution's tail (the last three input rows) is kept twice: a step reads one copy and writes the other, so that
// no threadgroup overwrites what another still needs. The host alternates (phase 0, 1) per slot and layer.
//   tails [slots][layers][2][3][conv_width] bf16      states [slots][layers][value heads][128][128] f32
#include "common.h"

inline ulong tail_base(constant GdnParams& p, int slot, int phase) {
  return (ulong(slot * p.layers + p.layer) * 2 + ulong(phase)) * ulong((kTaps - 1) * p.conv_width);
}

inline ulong state_base(constant GdnParams& p, int slot, int head) {
  return (ulong(slot * p.layers + p.layer) * ulong(p.value_heads) + ulong(head)) * ulong(kStateSize * kStateSize);
}

// decay and beta of one head and row.
inline float2 gates_of(float a, float b, float a_log, float dt_bias) {
  return float2(precise::exp(-precise::exp(a_log) * softplus(a + dt_bias)), sigmoid(b));
}

// One step of the recurrence on a lane's share of a column; returns the column's output.
inline float delta_rule(thread float4& s, float4 k, float4 q, float v, float2 gates) {
  s *= gates.x;
  const float memory = simd_sum(dot(s, k));
  s += k * (gates.y * (v - memory));
  return simd_sum(dot(s, q));
}

// gdn_step: convolution, q/k normalisation, gates, one recurrent step and the gated RMSNorm, for sequences of one row.
//   qkv [R, C] bf16  z [R, Vw] bf16  a, b [R, Hv] f32  conv [C, 4] f32  a_log, dt_bias [Hv] f32  norm [128] f32
//   mixed [R, stride] bf16
//   Launch    grid (value heads, R), threadgroup 512 = 16 simdgroups, 8 columns each.
//   Moves     128 KiB of state a head and row (read and written), 12 bytes a channel of tail.
[[max_total_threads_per_threadgroup(kGdnStepThreads)]] kernel void gdn_step(
    constant GdnParams& p [[buffer(0)]], const device bfloat* qkv [[buffer(1)]], const device bfloat* z [[buffer(2)]],
    const device float* a [[buffer(3)]], const device float* b [[buffer(4)]], const device float* conv [[buffer(5)]],
    const device float* a_log [[buffer(6)]], const device float* dt_bias [[buffer(7)]],
    const device float* norm [[buffer(8)]], const device SequenceInfo* sequences [[buffer(9)]],
    const device int* phases [[buffer(10)]], device bfloat* tails [[buffer(11)]], device float* states [[buffer(12)]],
    device bfloat* mixed [[buffer(13)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float channels[3 * kStateSize];  // q, k, v after the convolution
  threadgroup float outputs[kStateSize];
  const SequenceInfo seq = sequences[tg.y];
  const uint row = uint(seq.first_row);
  const int head = int(tg.x);
  const int ratio = p.value_heads / p.key_heads;
  const int key_width = p.key_heads * kStateSize;

  // The state is asked for first: it is nearly all that this kernel reads, and comes while the convolution runs.
  constexpr int kColumns = kStateSize / kGdnStepSimdgroups;
  const int column0 = int(sg) * kColumns;
  device float4* state = (device float4*)(states + state_base(p, seq.slot, head) + uint(column0 * kStateSize)) + lane;
  float4 s[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) s[c] = state[c * kStateSize / 4];

  if (thread_index < uint(3 * kStateSize)) {
    const int part = int(thread_index) / kStateSize;
    const int i = int(thread_index) % kStateSize;
    const int key_channel = head / ratio * kStateSize + i;
    const int channel = part == 2 ? 2 * key_width + head * kStateSize + i : part * key_width + key_channel;
    const int phase = phases[tg.y];
    const device bfloat* old_tail = tails + tail_base(p, seq.slot, phase) + channel;
    const bfloat x1 = old_tail[p.conv_width];
    const bfloat x2 = old_tail[2 * p.conv_width];
    const bfloat x3 = qkv[row * uint(p.conv_width) + uint(channel)];
    const float4 w = load4(conv + channel * kTaps);
    channels[thread_index] = silu(dot(w, float4(float(old_tail[0]), float(x1), float(x2), float(x3))));
    if (part == 2 || head % ratio == 0) {  // heads that share a key head would write the same
      device bfloat* new_tail = tails + tail_base(p, seq.slot, 1 - phase) + channel;
      new_tail[0] = x1;
      new_tail[p.conv_width] = x2;
      new_tail[2 * p.conv_width] = x3;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float4 q = load4_shared(channels + lane * 4);
  float4 k = load4_shared(channels + kStateSize + lane * 4);
  q *= rsqrt(simd_sum(dot(q, q)) + 1e-6f) * rsqrt(float(kStateSize));
  k *= rsqrt(simd_sum(dot(k, k)) + 1e-6f);
  const uint gate_at = row * uint(p.value_heads) + uint(head);
  const float2 gates = gates_of(a[gate_at], b[gate_at], a_log[head], dt_bias[head]);

#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const float o = delta_rule(s[c], k, q, channels[2 * kStateSize + column0 + c], gates);
    state[c * kStateSize / 4] = s[c];
    if (lane == 0) outputs[column0 + c] = o;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (sg == 0) {
    const float4 o = load4_shared(outputs + lane * 4);
    const float4 w = load4(norm + lane * 4);
    const uint at = uint(head * kStateSize) + uint(lane) * 4;
    const float4 gate = load4(z + row * uint(p.value_heads * kStateSize) + at);
    const float scale = rsqrt(simd_sum(dot(o, o)) / float(kStateSize) + p.eps);
    const float4 y = o * scale * w;
    store4(mixed + row * uint(p.mixed_stride) + at, y * float4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w)));
  }
}

// gdn_conv: the convolution with SiLU of all rows, q and k normalised, the gates, and the new tail (prefill).
//   qkv [R, C] bf16   conv_out [R, C] bf16   gates [R, Hv] float2 (decay, beta)
//   Launch    grid (ceil((2 Hk + Hv + 1) / 4), R), threadgroup 128 = 4 simdgroups, one head of 128 channels each; the
//             last "head" has the gates.
//   Moves     R * C * 4 bytes, and the three rows before each from the cache.
[[max_total_threads_per_threadgroup(kHeadThreads)]] kernel void gdn_conv(
    constant GdnParams& p [[buffer(0)]], const device bfloat* qkv [[buffer(1)]], const device float* a [[buffer(2)]],
    const device float* b [[buffer(3)]], const device float* conv [[buffer(4)]],
    const device float* a_log [[buffer(5)]], const device float* dt_bias [[buffer(6)]],
    const device SequenceInfo* sequences [[buffer(7)]], const device int* sequence_of_row [[buffer(8)]],
    const device int* phases [[buffer(9)]], device bfloat* tails [[buffer(10)]], device bfloat* conv_out [[buffer(11)]],
    device float2* gates [[buffer(12)]], uint2 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint row = tg.y;
  const int head = int(tg.x) * kGroupHeads + int(sg);
  const int heads = 2 * p.key_heads + p.value_heads;
  if (head == heads) {
    for (int h = int(lane); h < p.value_heads; h += kLanes) {
      const uint at = row * uint(p.value_heads) + uint(h);
      gates[at] = gates_of(a[at], b[at], a_log[h], dt_bias[h]);
    }
  }
  if (head >= heads) return;

  const int sequence = sequence_of_row[row];
  const SequenceInfo seq = sequences[sequence];
  const int phase = phases[sequence];
  const int local = int(row) - seq.first_row;
  const int channel = head * kStateSize + int(lane) * 4;
  const device bfloat* old_tail = tails + tail_base(p, seq.slot, phase) + channel;
  const device bfloat* first = qkv + uint(seq.first_row) * uint(p.conv_width) + uint(channel);

  float4 x[kTaps];  // the rows local - 3 .. local
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    const int at = local - (kTaps - 1) + j;
    x[j] = at >= 0 ? load4(first + at * p.conv_width) : load4(old_tail + (at + kTaps - 1) * p.conv_width);
  }
  float4 y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 w = load4(conv + (channel + i) * kTaps);
    y[i] = silu(w.x * x[0][i] + w.y * x[1][i] + w.z * x[2][i] + w.w * x[3][i]);
  }
  if (head < 2 * p.key_heads) {
    y *= rsqrt(simd_sum(dot(y, y)) + 1e-6f);
    if (head < p.key_heads) y *= rsqrt(float(kStateSize));
  }
  store4(conv_out + row * uint(p.conv_width) + uint(channel), y);
  if (local == seq.rows - 1) {
    device bfloat* new_tail = tails + tail_base(p, seq.slot, 1 - phase) + channel;
#pragma unroll
    for (int j = 1; j < kTaps; ++j) store4(new_tail + (j - 1) * p.conv_width, x[j]);
  }
}

// gdn_scan: the recurrence over all rows of a sequence, state in registers from the first row to the last (prefill).
//   conv_out [R, C] bf16   gates [R, Hv] float2   outputs [R, Vw] f32
//   Launch    grid (128/4, value heads, sequences), threadgroup 128 = 4 simdgroups, one column each.
//   Moves     128 KiB of state a head once, whatever the number of rows; q and k rows are shared through the cache.
//   Numerics  state, gates and sums fp32; q, k and v bf16.
[[max_total_threads_per_threadgroup(kScanThreads)]] kernel void gdn_scan(
    constant GdnParams& p [[buffer(0)]], const device bfloat* conv_out [[buffer(1)]],
    const device float2* gates [[buffer(2)]], const device SequenceInfo* sequences [[buffer(3)]],
    device float* states [[buffer(4)]], device float* outputs [[buffer(5)]], uint3 tg [[threadgroup_position_in_grid]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const SequenceInfo seq = sequences[tg.z];
  const int head = int(tg.y);
  const int column = int(tg.x) * kScanColumns + int(sg);
  const int key_head = head / (p.value_heads / p.key_heads);
  const int key_width = p.key_heads * kStateSize;
  const int first = min(p.first_row, seq.rows);
  const int last = min(p.first_row + p.rows, seq.rows);
  if (first == last) return;

  const uint row0 = uint(seq.first_row + first);
  const device bfloat* q = conv_out + row0 * uint(p.conv_width) + uint(key_head * kStateSize) + uint(lane) * 4;
  const device bfloat* k = q + key_width;
  const device bfloat* v = conv_out + row0 * uint(p.conv_width) + uint(2 * key_width + head * kStateSize + column);
  const device float2* gate = gates + row0 * uint(p.value_heads) + uint(head);
  device float* out = outputs + row0 * uint(p.value_heads * kStateSize) + uint(head * kStateSize + column);

  device float4* at = (device float4*)(states + state_base(p, seq.slot, head) + uint(column * kStateSize)) + lane;
  float4 s = *at;
  for (int i = first; i < last; ++i) {
    const float o = delta_rule(s, load4(k), load4(q), float(*v), *gate);
    if (lane == 0) *out = o;
    q += p.conv_width;
    k += p.conv_width;
    v += p.conv_width;
    gate += p.value_heads;
    out += p.value_heads * kStateSize;
  }
  *at = s;
}

// gdn_gated_norm: mixed = rmsnorm(outputs) * silu(z), per row and value head (prefill).
//   outputs [R, Vw] f32   z [R, Vw] bf16   norm [128] f32   mixed [R, stride] bf16
//   Launch    grid (ceil(Hv/4), R), threadgroup 128 = 4 simdgroups, one head each.
[[max_total_threads_per_threadgroup(kHeadThreads)]] kernel void gdn_gated_norm(
    constant GdnParams& p [[buffer(0)]], const device float* outputs [[buffer(1)]],
    const device bfloat* z [[buffer(2)]], const device float* norm [[buffer(3)]], device bfloat* mixed [[buffer(4)]],
    uint2 tg [[threadgroup_position_in_grid]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int head = int(tg.x) * kGroupHeads + int(sg);
  if (head >= p.value_heads) return;
  const uint at = uint(head * kStateSize) + uint(lane) * 4;
  const uint in = tg.y * uint(p.value_heads * kStateSize) + at;
  const float4 o = load4(outputs + in);
  const float4 gate = load4(z + in);
  const float scale = rsqrt(simd_sum(dot(o, o)) / float(kStateSize) + p.eps);
  store4(mixed + tg.y * uint(p.mixed_stride) + at,
         o * scale * load4(norm + lane * 4) * float4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w)));
}
