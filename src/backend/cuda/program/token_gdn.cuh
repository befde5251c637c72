#pragma once
// The token kernel's GDN phase: projections of the block's part (GdnPart), q and k exchanged among the key head's eight
// blocks, the recurrence on the block's columns of the state.
#include "backend/cuda/program/token_block.cuh"

namespace calla::cuda::token {

struct GdnPlace : GdnPart {
  int tid, warp, lane;
  __device__ __forceinline__ GdnPlace() : tid(static_cast<int>(threadIdx.x)), warp(tid / 32), lane(tid % 32) {}
  // A thread has four columns of the state at two keys, a warp all of the block's columns at eight.
  __device__ __forceinline__ int first_of_columns() const { return lane % 8 * 4; }
  __device__ __forceinline__ int key(int i) const { return i * (kGdnHeadDim / 2) + warp * 4 + lane / 8; }
};
inline constexpr int kKeys = 2;

// a and b of the key head's value heads: rows 2 h and 2 h + 1 of each are one fragment pair, of which a block takes one
// chunk of the inputs: lanes 0..15 have a, the others b; four groups of four lanes.
struct GateWeights {
  uint4 codes;
  uint2 scale;
  float rate, dt_bias;

  __device__ __forceinline__ static size_t pair(const TokenProgram& program, const GdnPlace& at) {
    const int column = at.lane < 16 ? program.a_column : program.b_column;
    return static_cast<size_t>(column / kTileRows + at.key_head / 8) * kGroups +
           static_cast<size_t>(at.rank * kChunkGroups + at.lane / 4 % 4);
  }
  __device__ __forceinline__ void load(const TokenProgram& program, const TokenPhase& p, const GdnPlace& at) {
    codes = load_stream(p.weights.codes + pair(program, at) * 32 + at.key_head % 8 * 4 + at.lane % 4);
    scale = load_stream(p.weights.scales + pair(program, at) * 8 + at.key_head % 8);
    rate = p.decay_rate[at.head];
    dt_bias = p.dt_bias[at.head];
  }
  // sum w x over this lane's sixteen inputs of both rows.
  __device__ __forceinline__ float2 multiply(const FixedRow& x, int group, int q) const {
    const uint4 high = x.operands[group * 8 + q], low = x.operands[group * 8 + 4 + q];
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w}, lows[4] = {low.x, low.y, low.z, low.w};
    int first[2] = {}, second[2] = {}, sum[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int a = static_cast<int>(words[i] & 0x0f0f0f0fu), b = static_cast<int>(words[i] >> 4 & 0x0f0f0f0fu);
      const int h = static_cast<int>(highs[i]), l = static_cast<int>(lows[i]);
      first[0] = __dp4a(a, h, first[0]), first[1] = __dp4a(a, l, first[1]);
      second[0] = __dp4a(b, h, second[0]), second[1] = __dp4a(b, l, second[1]);
      sum[0] = __dp4a(0x01010101, h, sum[0]), sum[1] = __dp4a(0x01010101, l, sum[1]);
    }
    const float factor = x.factors[group], s = static_cast<float>(sum[0] * 256 + sum[1]);
    return make_float2(
        factor * (low_bf16(scale.x) * static_cast<float>(first[0] * 256 + first[1]) + high_bf16(scale.x) * s),
        factor * (low_bf16(scale.y) * static_cast<float>(second[0] * 256 + second[1]) + high_bf16(scale.y) * s));
  }
};

// One warp: decay and beta of the block's value head, from the parts of the key head's eight blocks.
__device__ __forceinline__ void exchange_gates(const Block& b, const GateWeights& w, const GdnPlace& at,
                                               uint32_t generation) {
  const int lane = at.lane;
  uint64_t(&parts)[kBlocksPerKeyHead][4] = b.program.words->gates[at.key_head];
  float2 pair = w.multiply(b.row(), at.rank * kChunkGroups + lane / 4 % 4, lane % 4);
  pair.x = sum_lanes<16>(pair.x);
  pair.y = sum_lanes<16>(pair.y);
  const float norm = fixed_norm<kWarps>(b.s.squares, kHidden, b.program.eps);
  const int source = lane % 4 < 2 ? 0 : 16;
  const float first = __shfl_sync(0xffffffffu, pair.x, source), second = __shfl_sync(0xffffffffu, pair.y, source);
  if (lane < 4)
    send(&parts[at.rank][lane], pack_word(__float_as_uint(norm * (lane % 2 == 0 ? first : second)), generation));

  float total = receive_float(&parts[lane / 4][lane % 4], generation);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
  const float gate_a = __shfl_sync(0xffffffffu, total, at.rank / 4);
  const float gate_b = __shfl_sync(0xffffffffu, total, 2 + at.rank / 4);
  if (lane != 0) return;
  const float biased = gate_a + w.dt_bias, softplus = biased > 20 ? biased : log1pf(expf(biased));
  b.s.decay = expf(-w.rate * softplus);
  b.s.beta = sigmoid(gate_b);
  if (at.rank % 4 == 0) {
    b.program.a.projected[b.program.a_column + at.head] = gate_a;
    b.program.a.projected[b.program.b_column + at.head] = gate_b;
  }
}

__device__ __forceinline__ void gdn_phase(const Block& b, const TokenPhase& p, RingPlace ring, uint32_t generation,
                                          bool last) {
  const GdnPlace at;
  BlockMemory& s = b.s;
  TokenWords& words = *b.program.words;

  stage_residual(b, load_norm(p.norm), generation - 1);
  // Asked for here, needed behind the products.
  float* const state = p.state + b.state_at + state_place(at.head, 0, at.part * kColumns + at.first_of_columns());
  float4 st[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) st[i] = __ldcs(reinterpret_cast<const float4*>(state + at.key(i) * kStateColumns));
  // Of the channel that a lane of warps 0 and 1 convolves.
  float* const tail = p.state + b.state_at + kStateFloats + at.first_column(at.warp & 1, b.program.z_column) + at.lane;
  float old[3] = {}, out_norm = 0;
  float4 taps = make_float4(0, 0, 0, 0);
  GateWeights gates;
  if (at.warp < 2) {
#pragma unroll
    for (int i = 0; i < 3; ++i) old[i] = tail[i * kChannels];
    taps = *reinterpret_cast<const float4*>(p.conv + (at.first_column(at.warp, b.program.z_column) + at.lane) * 4);
    out_norm = p.gdn_norm[at.part * kColumns + at.lane];
  } else if (at.warp == 3) {
    gates.load(b.program, p, at);
  }

  chunk_barrier(at.warp / 2);

  {  // the block's 96 outputs: a chunk a warp, three tiles
    const int chunk = at.warp / 2, first = at.warp % 2;
    multiply_tiles<kGdnTiles / 2>(b, ring.plus(first), 2, chunk, b.row(), chunk,
                                  s.units + (first * kChunks + chunk) * kTileRows, 2 * kChunks * kTileRows);
  }
  consumer_barrier();
  release(b, ring, kGdnTiles);

  // What follows from each output alone: warps 0, 1, 2 have q or k, v, z.
  if (at.warp < 3) {
    const float* tile = s.units + (at.warp * 2 + at.lane / kTileRows) * kChunks * kTileRows;
    const float out =
        fixed_norm<kWarps>(s.squares, kHidden, b.program.eps) * sum_fixed_units<kChunks>(tile, at.lane % kTileRows);
    if (at.warp < 2) {
      const float c = silu(taps.x * old[0] + taps.y * old[1] + taps.z * old[2] + taps.w * out);
      if (at.warp == 1) {
        s.values[at.lane] = c;
      } else {
        send(&words.qk[at.key_head][at.rank * kColumns + at.lane], pack_word(__float_as_uint(c), generation));
      }
      tail[0] = old[1];
      tail[kChannels] = old[2];
      tail[2 * kChannels] = out;
    } else {
      s.z_gates[at.lane] = silu(out);
    }
    b.program.a.projected[at.first_column(at.warp, b.program.z_column) + at.lane] = out;
  } else if (at.warp == 3) {
    exchange_gates(b, gates, at, generation);
  } else if (at.warp >= kWarps / 2) {
    const int i = at.tid - kWorkers / 2;
    s.qk[i] = receive_float(&words.qk[at.key_head][i], generation);
  }
  consumer_barrier();

  // The delta rule on the block's columns of the state.
  const float* const q = s.qk;
  const float* const k = s.qk + kGdnHeadDim;
  float4 memory_sum = make_float4(0, 0, 0, 0), out_sum = memory_sum;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    memory_sum = fma4(st[i], k[at.key(i)], memory_sum);
    out_sum = fma4(st[i], q[at.key(i)], out_sum);
  }
#pragma unroll
  for (int offset = 8; offset < 32; offset *= 2) {
    memory_sum = add_lane(memory_sum, offset);
    out_sum = add_lane(out_sum, offset);
  }
  if (at.lane < 8) {
    float4* to = &s.column_sums[at.warp][at.lane * 2];
    to[0] = make_float4(memory_sum.x, out_sum.x, memory_sum.y, out_sum.y);
    to[1] = make_float4(memory_sum.z, out_sum.z, memory_sum.w, out_sum.w);
  }
  if (at.warp >= kWarps - 3) {  // k.k, q.q, k.q
    const int which = at.warp - (kWarps - 3);
    const float4 x = reinterpret_cast<const float4*>(which == 0 ? k : q)[at.lane];
    const float4 y = reinterpret_cast<const float4*>(which == 1 ? q : k)[at.lane];
    const float sum = sum_lanes(x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w);
    if (at.lane == 0) s.key_sums[which] = sum;
  }
  consumer_barrier();

  if (at.warp == 0) {  // a lane a column
    const int block = static_cast<int>(blockIdx.x);
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float2 v = reinterpret_cast<const float2*>(s.column_sums[i])[at.lane];
      sums.x += v.x;
      sums.y += v.y;
    }
    const float k_scale = rsqrtf(s.key_sums[0] + 1e-6f);
    const float q_scale = rsqrtf(s.key_sums[1] + 1e-6f) * 0.08838834764831845f;  // 1 / sqrt(128)
    // The change of a column along k before its l2 norm, and its read-out.
    const float change = k_scale * s.beta * (s.values[at.lane] - s.decay * k_scale * sums.x);
    const float out = q_scale * (s.decay * sums.y + s.key_sums[2] * change);
    // The gated RMSNorm needs the squares of all 128 columns. The numbers leave as if these 32 were all, and whoever
    // receives them corrects that (scale_of_squares).
    const float squares = sum_lanes(out * out);
    const float y = out * rsqrtf(squares / kColumns + kLocalEps) * out_norm * s.z_gates[at.lane];
    send_eights(b, words.mixed, y, generation);
    if (at.lane == 0) send(&words.squares[block], pack_word(__float_as_uint(squares), generation));
    s.changes[at.lane] = change;
    if (last) {
      const float other = receive_float(&words.squares[block / 4 * 4 + at.lane % 4], generation);
      const float total = sum_lanes<4>(other);
      b.program.a.mixed[block * kColumns + at.lane] =
          __float2half_rn(y * scale_of_squares(squares, total, b.program.eps));
    }
  }
  // The state goes out last: the exchange would queue up behind it.
  consumer_barrier();
  const float4 change = *reinterpret_cast<const float4*>(s.changes + at.first_of_columns());
  const float decay = s.decay;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float4 kept = make_float4(decay * st[i].x, decay * st[i].y, decay * st[i].z, decay * st[i].w);
    __stcs(reinterpret_cast<float4*>(state + at.key(i) * kStateColumns), fma4(change, k[at.key(i)], kept));
  }
}

}  // namespace calla::cuda::token
