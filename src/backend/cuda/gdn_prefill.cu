// The Gated DeltaNet over many rows: three kernels.
// gdn_prepare: conv + SiLU, l2 norm of q and k, k . q, decay and beta.
//   Launch    grid (rows / 16, 128-channel groups / 8, sequences), block 256 = 8 warps; a warp takes one group of
//             channels (a head of q, k or v) through 16 rows with the convolution's window in registers.
//   Moves     reads and writes 4 channels bytes a row.
// gdn_scan: the recurrence, with the state in registers from the first row to the last.
//   Launch    grid (value_heads x 4, sequences), block 128 = 4 warps, 8 state columns a warp; four lanes share a column
//             (32 keys each). Rows arrive 16 at a time in shared memory (cp.async, two buffers).
//   Bound     by instruction issue: about 140 warp instructions a row, one warp on each of 512 schedulers.
//   Numerics  fp32. The state is kept as S / G with G the product of the decays since the last rescaling, which saves a
//             multiplication of the whole state a row; G is folded back whenever it falls below 1e-12.
// gdn_gate: RMSNorm of a head's output, times silu(z). A warp a row and head.
#include "backend/cuda/gdn.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kRowsPerWarp = 16;

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__global__ void __launch_bounds__(256) gdn_prepare(GdnParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const StepSequence sequence = p.step.sequences[blockIdx.z];
  const int first = static_cast<int>(blockIdx.x) * kRowsPerWarp;
  const int group = static_cast<int>(blockIdx.y * 8 + threadIdx.x / 32);
  const int channels = p.channels();
  if (first >= sequence.rows || group * kGdnHeadDim >= channels) return;
  const int last = min(first + kRowsPerWarp, sequence.rows);
  const int channel = group * kGdnHeadDim + lane * 4;
  const float* tail = p.state + static_cast<size_t>(sequence.slot) * p.slot_floats + p.state_floats();
  const float* input = p.projected + static_cast<size_t>(sequence.first_row) * p.stride + channel;
  float taps[4][4];  // [channel][tap]
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 t = load4(p.conv + (channel + i) * 4);
    taps[i][0] = t.x, taps[i][1] = t.y, taps[i][2] = t.z, taps[i][3] = t.w;
  }
  const auto row_at = [&](int row) {  // row -3 .. -1: the tail
    return row < 0 ? load4(tail + (row + 3) * channels + channel) : load4(input + static_cast<size_t>(row) * p.stride);
  };
  float4 window[4];
#pragma unroll
  for (int i = 0; i < 3; ++i) window[i + 1] = row_at(first - 3 + i);
  const bool is_query = group < p.key_heads, is_key = !is_query && group < 2 * p.key_heads;
  for (int row = first; row < last; ++row) {
    window[0] = window[1], window[1] = window[2], window[2] = window[3];
    window[3] = row_at(row);
    float c[4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      c[0] = fmaf(taps[0][t], window[t].x, c[0]);
      c[1] = fmaf(taps[1][t], window[t].y, c[1]);
      c[2] = fmaf(taps[2][t], window[t].z, c[2]);
      c[3] = fmaf(taps[3][t], window[t].w, c[3]);
    }
#pragma unroll
    for (float& v : c) v = silu(v);
    if (is_query || is_key) {
      const float square = sum_lanes(c[0] * c[0] + c[1] * c[1] + c[2] * c[2] + c[3] * c[3]);
      const float scale = rsqrtf(square + 1e-6f) * (is_query ? 0.08838834764831845f : 1.0f);  // 1 / sqrt(128)
#pragma unroll
      for (float& v : c) v *= scale;
    }
    *reinterpret_cast<float4*>(p.convolved + static_cast<size_t>(sequence.first_row + row) * channels + channel) =
        make_float4(c[0], c[1], c[2], c[3]);
  }
}

// decay and beta of every row and value head; k . q of every row and key head.
__global__ void __launch_bounds__(256) gdn_gates(GdnParams p) {
  const int row = static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
  const float* projected = p.projected + row * p.stride;
  for (int head = tid; head < p.value_heads; head += 256) {
    const float a = projected[p.a_column + head] + p.dt_bias[head];
    const float softplus = a > 20 ? a : log1pf(expf(a));
    p.decay[static_cast<size_t>(row) * p.value_heads + head] = expf(-p.decay_rate[head] * softplus);
    p.beta[static_cast<size_t>(row) * p.value_heads + head] = sigmoid(projected[p.b_column + head]);
  }
  const float* c = p.convolved + static_cast<size_t>(row) * p.channels();
  for (int head = tid / 32; head < p.key_heads; head += 8) {
    const float4 q = load4(c + head * kGdnHeadDim + tid % 32 * 4);
    const float4 k = load4(c + (p.key_heads + head) * kGdnHeadDim + tid % 32 * 4);
    const float dot = sum_lanes(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w);
    if (tid % 32 == 0) p.key_dot_query[static_cast<size_t>(row) * p.key_heads + head] = dot;
  }
}

constexpr int kScanWarps = 4, kScanThreads = kScanWarps * 32;
constexpr int kScanColumns = 8 * kScanWarps;  // of a block
constexpr int kParts = kGdnHeadDim / kScanColumns;
constexpr int kScanRows = 16;  // staged at a time
constexpr float kSmallestScale = 1e-12f;

struct ScanStage {
  float q[kScanRows][kGdnHeadDim];
  float k[kScanRows][kGdnHeadDim];
  float v[kScanRows][kScanColumns];
  float decay[kScanRows], beta[kScanRows], dot[kScanRows];
};

__global__ void __launch_bounds__(kScanThreads) gdn_scan(GdnParams p) {
  __shared__ ScanStage stages[2];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts;
  const int key_head = head / (p.value_heads / p.key_heads), channels = p.channels();
  const StepSequence sequence = p.step.sequences[blockIdx.y];
  const int key_width = p.key_heads * kGdnHeadDim;
  const int value_channel = 2 * key_width + head * kGdnHeadDim + part * kScanColumns;
  const size_t first_row = static_cast<size_t>(sequence.first_row);

  const auto stage_rows = [&](ScanStage& to, int first) {
    const int rows = min(kScanRows, sequence.rows - first);
    for (int i = tid; i < rows * 32; i += kScanThreads) {
      const int r = i / 32, c = i % 32 * 4;
      const float* from = p.convolved + (first_row + first + r) * channels;
      cp_async16(shared_address(&to.q[r][c]), from + key_head * kGdnHeadDim + c);
      cp_async16(shared_address(&to.k[r][c]), from + key_width + key_head * kGdnHeadDim + c);
      if (c < kScanColumns) cp_async16(shared_address(&to.v[r][c]), from + value_channel + c);
    }
    cp_async_commit();
    if (tid < rows) {
      const size_t row = first_row + first + tid;
      to.decay[tid] = p.decay[row * p.value_heads + head];
      to.beta[tid] = p.beta[row * p.value_heads + head];
      to.dot[tid] = p.key_dot_query[row * p.key_heads + key_head];
    }
  };

  // Lane = 4 c + s holds column c of the warp at keys 16 i + 4 s + e: a warp's load of k is one 64-byte run.
  const int column = warp * 8 + lane / 4, slice = lane % 4;
  float* memory = p.state + static_cast<size_t>(sequence.slot) * p.slot_floats;
  float* state = memory + static_cast<size_t>(head) * kGdnHeadDim * kGdnHeadDim + slice * 4 * kGdnHeadDim +
                 part * kScanColumns + column;
  stage_rows(stages[0], 0);
  float s[8][4];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[i][e] = state[(16 * i + e) * kGdnHeadDim];
  float scale = 1;  // the true state is s * scale

  const int chunks = (sequence.rows + kScanRows - 1) / kScanRows;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      stage_rows(stages[(chunk + 1) % 2], (chunk + 1) * kScanRows);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const ScanStage& in = stages[chunk % 2];
    const int rows = min(kScanRows, sequence.rows - chunk * kScanRows);
    float* out = p.convolved + (first_row + chunk * kScanRows) * channels + value_channel + column;
    for (int r = 0; r < rows; ++r) {
      const float decay = in.decay[r], beta = in.beta[r], dot = in.dot[r], v = in.v[r][column];
      if (scale * decay < kSmallestScale) {
        const float fold = scale * decay;
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][e] *= fold;
        scale = 1;
      } else {
        scale *= decay;
      }
      float k[8][4], memory_sum[4] = {}, out_sum[4] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 kv = load4(&in.k[r][16 * i + 4 * slice]), qv = load4(&in.q[r][16 * i + 4 * slice]);
        k[i][0] = kv.x, k[i][1] = kv.y, k[i][2] = kv.z, k[i][3] = kv.w;
        const float q[4] = {qv.x, qv.y, qv.z, qv.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          memory_sum[e] = fmaf(s[i][e], k[i][e], memory_sum[e]);
          out_sum[e] = fmaf(s[i][e], q[e], out_sum[e]);
        }
      }
      const float memory_dot = sum_lanes<4>((memory_sum[0] + memory_sum[1]) + (memory_sum[2] + memory_sum[3]));
      const float out_dot = sum_lanes<4>((out_sum[0] + out_sum[1]) + (out_sum[2] + out_sum[3]));
      const float delta = beta * (v - scale * memory_dot);
      const float step = __fdividef(delta, scale);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][e] = fmaf(k[i][e], step, s[i][e]);
      if (slice == 0) out[static_cast<size_t>(r) * channels] = fmaf(scale, out_dot, dot * delta);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) state[(16 * i + e) * kGdnHeadDim] = s[i][e] * scale;

  // The convolution's tail: the last three inputs, some of them from the old tail in a short step.
  float* tail = memory + p.state_floats();
  for (int channel = static_cast<int>(blockIdx.x) * kScanThreads + tid; channel < channels;
       channel += static_cast<int>(gridDim.x) * kScanThreads) {
    float last[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int row = sequence.rows - 3 + i;
      last[i] = row < 0 ? tail[(row + 3) * channels + channel] : p.projected[(first_row + row) * p.stride + channel];
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) tail[i * channels + channel] = last[i];
  }
}

__global__ void __launch_bounds__(256) gdn_gate(GdnParams p) {
  const int head = static_cast<int>(blockIdx.y * 8 + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const size_t row = blockIdx.x;
  if (head >= p.value_heads) return;
  const int at = head * kGdnHeadDim + lane * 4;
  const float4 o = load4(p.convolved + row * p.channels() + 2 * p.key_heads * kGdnHeadDim + at);
  const float4 z = load4(p.projected + row * p.stride + p.z_column + at), norm = load4(p.norm + lane * 4);
  const float scale = rsqrtf(sum_lanes(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w) / kGdnHeadDim + p.eps);
  *reinterpret_cast<uint2*>(p.mixed + row * p.mixed_stride + at) =
      make_uint2(pack_half2(o.x * scale * norm.x * silu(z.x), o.y * scale * norm.y * silu(z.y)),
                 pack_half2(o.z * scale * norm.z * silu(z.z), o.w * scale * norm.w * silu(z.w)));
}

unsigned blocks(int n, int per_block) { return static_cast<unsigned>((n + per_block - 1) / per_block); }

}  // namespace

void gdn_prefill(const Launch& launch, const GdnParams& p) {
  const auto rows = static_cast<unsigned>(p.step.rows), sequences = static_cast<unsigned>(p.step.sequence_count);
  const int groups = 2 * p.key_heads + p.value_heads;
  gdn_prepare<<<dim3(blocks(p.step.rows, kRowsPerWarp), blocks(groups, 8), sequences), 256, 0, launch.stream>>>(p);
  check_launch("gdn_prepare");
  gdn_gates<<<rows, 256, 0, launch.stream>>>(p);
  check_launch("gdn_gates");
  gdn_scan<<<dim3(static_cast<unsigned>(p.value_heads * kParts), sequences), kScanThreads, 0, launch.stream>>>(p);
  check_launch("gdn_scan");
  gdn_gate<<<dim3(rows, blocks(p.value_heads, 8)), 256, 0, launch.stream>>>(p);
  check_launch("gdn_gate");
}

}  // namespace calla::cuda
