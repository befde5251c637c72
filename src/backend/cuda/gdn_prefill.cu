// The Gated DeltaNet over many rows: three kernels.
// gdn_prepare: conv + SiLU, l2 norm of q and k, and the scalars that couple the rows of a block of four.
//   Launch    grid (rows / 16, units / 8, sequences), block 256 = 8 warps; a warp takes a key head's q and k, or a value
//             head's v, through 16 rows with the convolution's window in registers.
//   Moves     reads and writes 4 channels bytes a row.
// gdn_scan: the recurrence, with the state in registers from the first row to the last.
//   Launch    grid (value_heads x 4, sequences), block 128 = 4 warps, 8 state columns a warp; a lane holds 8 keys of 4
//             columns. Rows arrive 16 at a time in shared memory (cp.async, two buffers).
//   Blocks    four rows at a time: all eight products with the state (S^T k_t, S^T q_t) are taken of the state before the
//             block, so the sums over lanes are exchanged once a block instead of once a row; the rows' influence on each
//             other is a 4 x 4 triangular system with scalars from gdn_prepare.
//   Bound     by instruction issue: about 150 warp instructions a row, one warp on each of 512 schedulers.
//   Numerics  fp32; decays only ever multiply (no quotient of products), so strong decay cannot overflow.
// gdn_gate: RMSNorm of a head's output, times silu(z). A warp a row and head.
#include "backend/cuda/gdn.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kRowsPerWarp = 16;

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Four channels' convolution, moving down the rows of a sequence.
class Convolution {
 public:
  __device__ Convolution(const GdnParams& p, const StepSequence& sequence, int channel, int first)
      : p_(p), sequence_(sequence), channel_(channel) {
#pragma unroll
    for (int i = 0; i < 4; ++i) taps_[i] = load4(p.conv + (channel + i) * 4);
#pragma unroll
    for (int i = 0; i < 3; ++i) window_[i + 1] = input(first - 3 + i);
  }
  // silu(conv) of the next row.
  __device__ float4 next(int row) {
    window_[0] = window_[1], window_[1] = window_[2], window_[2] = window_[3];
    window_[3] = input(row);
    const auto channel = [&](float4 taps, float a, float b, float c, float d) {
      return silu(taps.x * a + taps.y * b + taps.z * c + taps.w * d);
    };
    return make_float4(channel(taps_[0], window_[0].x, window_[1].x, window_[2].x, window_[3].x),
                       channel(taps_[1], window_[0].y, window_[1].y, window_[2].y, window_[3].y),
                       channel(taps_[2], window_[0].z, window_[1].z, window_[2].z, window_[3].z),
                       channel(taps_[3], window_[0].w, window_[1].w, window_[2].w, window_[3].w));
  }
  __device__ void store(int row, float4 v) const {
    *reinterpret_cast<float4*>(p_.convolved + static_cast<size_t>(sequence_.first_row + row) * p_.channels() +
                               channel_) = v;
  }

 private:
  __device__ float4 input(int row) const {  // rows -3 .. -1: the tail of the state
    if (row >= 0) return load4(p_.projected + static_cast<size_t>(sequence_.first_row + row) * p_.stride + channel_);
    return load4(p_.state + static_cast<size_t>(sequence_.slot) * p_.slot_floats + p_.state_floats() +
                 (row + 3) * p_.channels() + channel_);
  }

  const GdnParams& p_;
  const StepSequence& sequence_;
  const int channel_;
  float4 taps_[4], window_[4];
};

__device__ __forceinline__ float4 normalised(float4 v, float scale) {
  const float f = rsqrtf(sum_lanes(dot4(v, v)) + 1e-6f) * scale;
  return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

// Lane t < 4 writes row t's scalars of one value head.
__device__ void write_scalars(const GdnParams& p, const StepSequence& sequence, int first, int head,
                              const float (&kk)[4][4], const float (&qk)[4][4], float* to) {
  const int t = static_cast<int>(threadIdx.x % 32) % kBlockRows;
  float decay = 1, beta = 0;
  if (first + t < sequence.rows) {
    const float* projected = p.projected + static_cast<size_t>(sequence.first_row + first + t) * p.stride;
    const float a = projected[p.a_column + head] + p.dt_bias[head];
    const float softplus = a > 20 ? a : log1pf(expf(a));
    decay = expf(-p.decay_rate[head] * softplus);
    beta = sigmoid(projected[p.b_column + head]);
  }
  float g[kBlockRows];
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) g[i] = __shfl_sync(0xffffffffu, decay, i);
  float product = 1, rest = 1, ratio[kBlockRows], mine_kk[kBlockRows] = {}, mine_qk[kBlockRows] = {};
#pragma unroll
  for (int i = 0; i < kBlockRows; ++i) {
    product *= i <= t ? g[i] : 1;
    rest *= i > t ? g[i] : 1;
    ratio[i] = 1;
#pragma unroll
    for (int j = 0; j < kBlockRows; ++j) ratio[i] *= j > i && j <= t ? g[j] : 1;
  }
#pragma unroll
  for (int row = 0; row < kBlockRows; ++row)
#pragma unroll
    for (int j = 0; j <= row; ++j) {
      if (row != t) continue;
      if (j < row) mine_kk[j] = beta * ratio[j] * kk[row][j];
      mine_qk[j] = ratio[j] * qk[row][j];
    }
  if (threadIdx.x % 32 >= kBlockRows) return;
  auto* out = reinterpret_cast<float4*>(to + static_cast<size_t>(head) * kBlockScalars) + t * 3;
  out[0] = make_float4(product, beta, rest, 0);
  out[1] = make_float4(mine_kk[0], mine_kk[1], mine_kk[2], 0);
  out[2] = make_float4(mine_qk[0], mine_qk[1], mine_qk[2], mine_qk[3]);
}

__global__ void __launch_bounds__(256) gdn_prepare(GdnParams p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const StepSequence sequence = p.step.sequences[blockIdx.z];
  const int first = static_cast<int>(blockIdx.x) * kRowsPerWarp;
  const int unit = static_cast<int>(blockIdx.y * 8 + threadIdx.x / 32);
  if (first >= sequence.rows || unit >= p.key_heads + p.value_heads) return;
  const int last = min(first + kRowsPerWarp, sequence.rows);
  if (unit >= p.key_heads) {
    Convolution v(p, sequence, (p.key_heads + unit) * kGdnHeadDim + lane * 4, first);
    for (int row = first; row < last; ++row) v.store(row, v.next(row));
    return;
  }
  Convolution q(p, sequence, unit * kGdnHeadDim + lane * 4, first);
  Convolution k(p, sequence, (p.key_heads + unit) * kGdnHeadDim + lane * 4, first);
  const int heads_per_key = p.value_heads / p.key_heads;
  for (int block = first; block < last; block += kBlockRows) {
    float4 qs[kBlockRows], ks[kBlockRows];
#pragma unroll
    for (int t = 0; t < kBlockRows; ++t) {
      qs[t] = ks[t] = make_float4(0, 0, 0, 0);
      if (block + t < last) {
        qs[t] = normalised(q.next(block + t), 0.08838834764831845f);  // 1 / sqrt(128)
        ks[t] = normalised(k.next(block + t), 1.0f);
        q.store(block + t, qs[t]);
        k.store(block + t, ks[t]);
      }
    }
    float kk[4][4], qk[4][4];
#pragma unroll
    for (int t = 0; t < kBlockRows; ++t)
#pragma unroll
      for (int j = 0; j <= t; ++j) {
        if (j < t) kk[t][j] = sum_lanes(dot4(ks[t], ks[j]));
        qk[t][j] = sum_lanes(dot4(qs[t], ks[j]));
      }
    const size_t index = static_cast<size_t>(sequence.first_row / kBlockRows + static_cast<int>(blockIdx.z)) +
                         static_cast<size_t>(block / kBlockRows);
    for (int i = 0; i < heads_per_key; ++i)
      write_scalars(p, sequence, block, unit * heads_per_key + i, kk, qk,
                    p.block_scalars + index * p.value_heads * kBlockScalars);
  }
}

constexpr int kScanWarps = 4, kScanThreads = kScanWarps * 32;
constexpr int kScanColumns = 8 * kScanWarps;  // of a block
constexpr int kParts = kGdnHeadDim / kScanColumns;
constexpr int kStageBlocks = 4, kStageRows = kStageBlocks * kBlockRows;  // staged at a time

struct ScanStage {
  float q[kStageRows][kGdnHeadDim];
  float k[kStageRows][kGdnHeadDim];
  float v[kStageRows][kScanColumns];
  float scalars[kStageBlocks][kBlockScalars];
};

// One round of a reduce-scatter: adds the partner's half of the values to this lane's half and keeps that.
template <int kHalf>
__device__ __forceinline__ void exchange(float* values, bool upper, int distance) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = values[i], high = values[i + kHalf];
    const float other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    values[i] = (upper ? high : low) + other;
  }
}

__global__ void __launch_bounds__(kScanThreads) gdn_scan(GdnParams p) {
  __shared__ ScanStage stages[2];
  __shared__ float4 steps[kScanWarps][2][kBlockRows];  // rows' updates of a warp's columns, four columns a float4
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts;
  const int key_head = head / (p.value_heads / p.key_heads), channels = p.channels();
  const StepSequence sequence = p.step.sequences[blockIdx.y];
  const int key_width = p.key_heads * kGdnHeadDim;
  const int value_channel = 2 * key_width + head * kGdnHeadDim + part * kScanColumns;
  const auto first_row = static_cast<size_t>(sequence.first_row);
  const float* scalars =
      p.block_scalars +
      (static_cast<size_t>(sequence.first_row / kBlockRows + static_cast<int>(blockIdx.y)) * p.value_heads + head) *
          kBlockScalars;

  // Rows past the end are staged as zeros: with k = 0 and decay 1 they change nothing.
  const auto stage_rows = [&](ScanStage& to, int first) {
    for (int i = tid; i < kStageRows * 32; i += kScanThreads) {
      const int r = i / 32, c = i % 32 * 4;
      const bool valid = first + r < sequence.rows;
      const float* from = p.convolved + (first_row + (valid ? first + r : 0)) * channels;
      cp_async16(shared_address(&to.q[r][c]), from + key_head * kGdnHeadDim + c, valid);
      cp_async16(shared_address(&to.k[r][c]), from + key_width + key_head * kGdnHeadDim + c, valid);
      if (c < kScanColumns) cp_async16(shared_address(&to.v[r][c]), from + value_channel + c, valid);
    }
    if (tid < kStageBlocks * kBlockScalars / 4) {
      const int block = tid / (kBlockScalars / 4), piece = tid % (kBlockScalars / 4) * 4;
      const bool valid = first + block * kBlockRows < sequence.rows;
      cp_async16(
          shared_address(&to.scalars[block][piece]),
          scalars + static_cast<size_t>(valid ? first / kBlockRows + block : 0) * p.value_heads * kBlockScalars + piece,
          valid);
    }
    cp_async_commit();
  };

  // Lane = 16 g + s holds columns 4 g .. 4 g + 3 of the warp at keys 4 s + e and 64 + 4 s + e. After the exchange it
  // holds the totals of row t = s / 4 and column 4 g + s % 4.
  const int group = lane / 16, s = lane % 16, t = s / 4, c = s % 4;
  float* memory = p.state + static_cast<size_t>(sequence.slot) * p.slot_floats;
  float* state = memory + state_place(head, s * 4, part * kScanColumns + warp * 8 + group * 4);
  stage_rows(stages[0], 0);
  float4 columns[8];  // [key] of four columns
#pragma unroll
  for (int i = 0; i < 8; ++i) columns[i] = load4(state + (i / 4 * 64 + i % 4) * kStateColumns);

  const int chunks = (sequence.rows + kStageRows - 1) / kStageRows;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      stage_rows(stages[(chunk + 1) % 2], (chunk + 1) * kStageRows);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const ScanStage& in = stages[chunk % 2];
    const int blocks = min(kStageBlocks, (sequence.rows - chunk * kStageRows + kBlockRows - 1) / kBlockRows);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      float k[kBlockRows][8], sums[32];  // sums[row][S^T k, S^T q][column]
#pragma unroll
      for (int row = 0; row < kBlockRows; ++row) {
        const int r = block * kBlockRows + row;
        const float4 k0 = load4(&in.k[r][4 * s]), k1 = load4(&in.k[r][64 + 4 * s]);
        const float4 q0 = load4(&in.q[r][4 * s]), q1 = load4(&in.q[r][64 + 4 * s]);
        const float q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
        k[row][0] = k0.x, k[row][1] = k0.y, k[row][2] = k0.z, k[row][3] = k0.w;
        k[row][4] = k1.x, k[row][5] = k1.y, k[row][6] = k1.z, k[row][7] = k1.w;
        float* to = sums + row * 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float column[4] = {columns[i].x, columns[i].y, columns[i].z, columns[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            to[j] = i == 0 ? column[j] * k[row][i] : fmaf(column[j], k[row][i], to[j]);
            to[4 + j] = i == 0 ? column[j] * q[i] : fmaf(column[j], q[i], to[4 + j]);
          }
        }
      }
      exchange<16>(sums, s & 8, 8);  // rows 2, 3 | 0, 1
      exchange<8>(sums, s & 4, 4);   // of those, the odd | even row
      // Now [S^T k, S^T q][column]: columns by the last two bits.
      float pair[4] = {sums[0], sums[1], sums[2], sums[3]}, query_pair[4] = {sums[4], sums[5], sums[6], sums[7]};
      exchange<2>(pair, s & 2, 2);
      exchange<2>(query_pair, s & 2, 2);
      exchange<1>(pair, s & 1, 1);
      exchange<1>(query_pair, s & 1, 1);

      const float4 own = load4(&in.scalars[block][t * 12]);  // G_t, beta_t, G_3 / G_t
      const float4 keys = load4(&in.scalars[block][t * 12 + 4]), queries = load4(&in.scalars[block][t * 12 + 8]);
      const float decay = in.scalars[block][3 * 12];  // of the whole block
      const float value = in.v[block * kBlockRows + t][warp * 8 + group * 4 + c];
      float delta = own.y * (value - own.x * pair[0]);
      float out = own.x * query_pair[0];
      const float key_weights[3] = {keys.x, keys.y, keys.z}, query_weights[3] = {queries.x, queries.y, queries.z};
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        // Row j's delta is final here; later rows take their share (the weights of earlier rows are 0).
        const float final_delta = __shfl_sync(0xffffffffu, delta, group * 16 + j * 4 + c);
        delta -= key_weights[j] * final_delta;
        if (t != j) out += query_weights[j] * final_delta;
      }
      const float own_weight = t == 0 ? queries.x : t == 1 ? queries.y : t == 2 ? queries.z : queries.w;
      out += own_weight * delta;
      reinterpret_cast<float*>(&steps[warp][group][t])[c] = delta * own.z;
      const int row = chunk * kStageRows + block * kBlockRows + t;
      if (row < sequence.rows)
        p.convolved[(first_row + row) * channels + value_channel + warp * 8 + group * 4 + c] = out;
      __syncwarp();
      float4 step[kBlockRows];
#pragma unroll
      for (int j = 0; j < kBlockRows; ++j) step[j] = steps[warp][group][j];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        columns[i].x *= decay, columns[i].y *= decay, columns[i].z *= decay, columns[i].w *= decay;
#pragma unroll
        for (int j = 0; j < kBlockRows; ++j) {
          columns[i].x = fmaf(k[j][i], step[j].x, columns[i].x);
          columns[i].y = fmaf(k[j][i], step[j].y, columns[i].y);
          columns[i].z = fmaf(k[j][i], step[j].z, columns[i].z);
          columns[i].w = fmaf(k[j][i], step[j].w, columns[i].w);
        }
      }
      __syncwarp();
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<float4*>(state + (i / 4 * 64 + i % 4) * kStateColumns) = columns[i];

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
  const float scale = rsqrtf(sum_lanes(dot4(o, o)) / kGdnHeadDim + p.eps);
  *reinterpret_cast<uint2*>(p.mixed + row * p.mixed_stride + at) =
      make_uint2(pack_half2(o.x * scale * norm.x * silu(z.x), o.y * scale * norm.y * silu(z.y)),
                 pack_half2(o.z * scale * norm.z * silu(z.z), o.w * scale * norm.w * silu(z.w)));
}

unsigned blocks(int n, int per_block) { return static_cast<unsigned>((n + per_block - 1) / per_block); }

}  // namespace

void gdn_prefill(const Launch& launch, const GdnParams& p) {
  const auto rows = static_cast<unsigned>(p.step.rows), sequences = static_cast<unsigned>(p.step.sequence_count);
  const int units = p.key_heads + p.value_heads;
  gdn_prepare<<<dim3(blocks(p.step.rows, kRowsPerWarp), blocks(units, 8), sequences), 256, 0, launch.stream>>>(p);
  check_launch("gdn_prepare");
  gdn_scan<<<dim3(static_cast<unsigned>(p.value_heads * kParts), sequences), kScanThreads, 0, launch.stream>>>(p);
  check_launch("gdn_scan");
  gdn_gate<<<dim3(rows, blocks(p.value_heads, 8)), 256, 0, launch.stream>>>(p);
  check_launch("gdn_gate");
}

}  // namespace calla::cuda
