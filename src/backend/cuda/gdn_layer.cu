// gdn_layer: a GDN layer of one token up to its output projection, in one kernel: RMSNorm, the input projections, conv +
// SiLU, l2 norms, decay and beta, state update and read-out, gated RMSNorm.
//   Launch    eight blocks a key head, all on the card at once; block 288: eight warps and the gate warp. A block has 32
//             of the head's 256 q and k channels, and for one of its two value heads 32 columns of the state with their
//             rows of v and z. All its weights go to shared memory and its slice of the state to registers before it waits
//             for the kernel in front; the gate warp starts the copies, then projects a and b, whose inputs it shares
//             with the head's other blocks.
//   Exchange  between the blocks of a key head, through L2: each number travels in one 8-byte word with the count of the
//             kernel's runs, so a reader needs neither fence nor flag. q and k after the convolution (2 KiB), the parts of
//             a and b, the squares of the RMSNorm. (A cluster of eight would exchange faster, but 16 such clusters do not
//             fit every card: parts of the chip have fewer than 16 processors.)
//   Shared    9/16 x 96 K bytes of weights, 118 KB at the real shape in all.
//   Moves     the layer's input weights and the state, in and out, once: 14.2 + 4.2 MB at the real shape.
//   Numerics  the row as 16-bit fixed point (fixed_row.cuh), the rest as gdn_step: fp32.
#include "backend/cuda/fixed_row.cuh"
#include "backend/cuda/gdn.h"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda {
namespace {

constexpr int kHeadsPerKey = 2;
constexpr int kBlocks = kGdnExchangeBlocks, kParts = kBlocks / kHeadsPerKey;  // a key head, a value head
constexpr int kColumns = kGdnHeadDim / kParts;                                // 32 state columns a block
// Few warps with many registers: a warp keeps its chunk's operands for all its tiles and has the next units' codes on
// their way while it multiplies one.
constexpr int kWarps = 8, kWorkers = kWarps * 32;
constexpr int kGateWarp = kWarps;
constexpr int kThreads = kWorkers + 32;
// As if the block had 608: at most 104 registers a thread, so that blocks of the neighbouring kernels fit beside it.
constexpr int kBoundThreads = 608;
constexpr int kSpans = 3;  // the block's rows of q or k, of v and of z: two tiles each
constexpr int kSpanTiles = 2;
constexpr int kHalves = 2, kHalfKeys = kGdnHeadDim / kHalves;
constexpr int kKeys = 16;  // of the state a thread: 4 lanes x 16 keys x 2 warps of the same columns

struct LayerParams {
  GdnParams gdn;
  GdnInput in;
};

// Shared memory: the spans (each its tiles' codes, then their scales), the row, the units' sums.
template <int kChunks>
struct Layout {
  static constexpr int kGroups = kChunks * kChunkGroups;
  static constexpr uint32_t kUnitCodes = kChunkGroups * 512, kUnitScales = kChunkGroups * 64;
  static constexpr uint32_t kSpanCodes = kSpanTiles * kChunks * kUnitCodes;
  static constexpr uint32_t kSpanScales = kSpanTiles * kChunks * kUnitScales;
  static constexpr uint32_t kSpanBytes = kSpanCodes + kSpanScales;
  static constexpr size_t kRow = size_t{kSpans} * kSpanBytes;
  static constexpr size_t kUnits = kRow + FixedRow::bytes(kGroups);
  static constexpr size_t kBytes = kUnits + sizeof(float) * kSpans * kSpanTiles * kChunks * kTileRows;
};

// Shared memory of a block besides the weights and the row.
struct BlockMemory {
  uint64_t weights[kSpans];  // mbarriers
  alignas(16) float qk[2 * kGdnHeadDim];
  alignas(16) float4 key_sums[kHalves];   // k.k, q.q, k.q
  float2 column_sums[kHalves][kColumns];  // S^T k, S^T q
  float squares[kWarps];
  float values[kColumns], z_gates[kColumns];
  // Of the channels that warps 0 and 1 convolve, a lane's own, read early and kept here to save registers: the last three
  // inputs and a norm weight, the taps.
  alignas(16) float4 tails[2][kColumns];
  alignas(16) float4 taps[2][kColumns];
  float decay, beta;
};

// A number and the run it belongs to, written and read as one word.
__device__ __forceinline__ void publish(uint64_t* to, float value, uint32_t run) {
  const uint64_t word = static_cast<uint64_t>(run) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint64_t peek(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ float receive(const uint64_t* from, uint32_t run) {
  uint64_t word = peek(from);
  while (static_cast<uint32_t>(word >> 32) != run) word = peek(from);
  return __uint_as_float(static_cast<uint32_t>(word));
}

// sum w x over this lane's sixteen inputs of rows r (x) and r + 8 (y), without the tensor cores: the gate warp needs one
// pair of rows only. Every lane has a group and a quarter of it.
__device__ __forceinline__ float2 multiply_pair(uint4 codes, uint2 scale, const FixedRow& x, int group, int q) {
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

// Where a thread of the eight warps works. Worked out anew for each part of the kernel: kept, it would cost registers.
struct Place {
  int tid, warp, lane;
  int rank, key_head, head, part;
  __device__ __forceinline__ Place() : tid(static_cast<int>(threadIdx.x)) {
    int block = static_cast<int>(blockIdx.x);
    asm volatile("" : "+r"(tid), "+r"(block));  // not known to be what it was the last time
    warp = tid / 32, lane = tid % 32;
    rank = block % kBlocks, key_head = block / kBlocks;
    head = key_head * kHeadsPerKey + rank / kParts, part = rank % kParts;
  }
  // First outputs of the block's spans: 32 of q (ranks 0..3) or k (4..7), of v, of z.
  __device__ __forceinline__ int first_column(const GdnParams& p, int span) const {
    const int key_width = p.key_heads * kGdnHeadDim;
    if (span == 0) return (rank < kParts ? 0 : key_width) + key_head * kGdnHeadDim + part * kColumns;
    return (span == 1 ? 2 * key_width : p.z_column) + head * kGdnHeadDim + part * kColumns;
  }
  // A warp has eight columns of the state and half of its keys, a lane one column and eight keys.
  __device__ __forceinline__ int column() const { return warp % 4 * 8 + lane % 8; }
  __device__ __forceinline__ int half() const { return warp / 4; }
  __device__ __forceinline__ int first_key() const { return half() * kHalfKeys + lane / 8 * kKeys; }
  __device__ __forceinline__ float* state(const GdnParams& p, int slot) const {
    return p.state + static_cast<size_t>(slot) * p.slot_floats +
           (static_cast<size_t>(head) * kGdnHeadDim + static_cast<size_t>(first_key())) * kGdnHeadDim +
           part * kColumns + column();
  }
  // The convolution's tail of channel first_column(warp) + lane.
  __device__ __forceinline__ float* tail(const GdnParams& p, int slot) const {
    return p.state + static_cast<size_t>(slot) * p.slot_floats + p.state_floats() + first_column(p, warp) + lane;
  }
};

// The gate warp: starts the copies, projects a and b of the key head's value heads, leaves decay and beta of this block's.
template <int kChunks>
__device__ __forceinline__ void run_gate_warp(const LayerParams& p, BlockMemory& e, std::byte* weights,
                                              const FixedRow& x) {
  using L = Layout<kChunks>;
  const Place at;
  const int lane = at.lane, rank = at.rank, key_head = at.key_head, head = at.head;
  const PackedView& w = p.in.weights;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      const auto tile = static_cast<size_t>(at.first_column(p.gdn, i) / kTileRows);
      std::byte* to = weights + i * L::kSpanBytes;
      barrier_expect(&e.weights[i], L::kSpanBytes);
      bulk_copy_part(to, w.codes + tile * w.codes_per_tile(), L::kSpanCodes, &e.weights[i]);
      bulk_copy_part(to + L::kSpanCodes, w.scales + tile * w.scales_per_tile(), L::kSpanScales, &e.weights[i]);
    }
  }
  __syncwarp();
  GdnExchange& exchange = p.gdn.exchange[key_head];
  // Rows 2 h and 2 h + 1 of a and of b are one fragment pair. A block takes one chunk of their inputs: lanes 0..15 have
  // a, the others b; four groups of four lanes.
  const int group = rank * kChunkGroups + lane / 4 % 4, q = lane % 4;
  const bool works = group < w.padded_groups;
  const size_t pair_at =
      static_cast<size_t>((lane < 16 ? p.gdn.a_column : p.gdn.b_column) / kTileRows + key_head / 8) * w.padded_groups +
      static_cast<size_t>(works ? group : 0);
  const uint4 codes = load_stream(w.codes + pair_at * 32 + key_head % 8 * 4 + q);
  const uint2 scale = load_stream(w.scales + pair_at * 8 + key_head % 8);
  const float rate = p.gdn.decay_rate[head], dt_bias = p.gdn.dt_bias[head];
  // The word that this lane will wait for: read once now, so that it is in L2.
  const uint64_t* part = &exchange.gates[lane / 4][lane % 4];
  const uint32_t run = exchange.runs[rank] + 1;
  peek(part);
  grid_dependency_wait();
  __syncthreads();  // the row is staged

  float2 pair = works ? multiply_pair(codes, scale, x, group, q) : make_float2(0, 0);
  pair.x = sum_lanes<16>(pair.x);
  pair.y = sum_lanes<16>(pair.y);
  const float norm = fixed_norm<kWarps>(e.squares, w.groups * kGroup, p.gdn.eps);
  const int source = lane % 4 < 2 ? 0 : 16;
  const float first = __shfl_sync(0xffffffffu, pair.x, source), second = __shfl_sync(0xffffffffu, pair.y, source);
  if (lane < 4) publish(&exchange.gates[rank][lane], norm * (lane % 2 == 0 ? first : second), run);

  float total = receive(part, run);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
  const float a = __shfl_sync(0xffffffffu, total, rank / kParts);
  const float b = __shfl_sync(0xffffffffu, total, kHeadsPerKey + rank / kParts);
  if (lane == 0) {
    const float biased = a + dt_bias, softplus = biased > 20 ? biased : log1pf(expf(biased));
    e.decay = expf(-rate * softplus);
    e.beta = sigmoid(b);
    if (rank % kParts == 0) {
      p.gdn.projected[p.gdn.a_column + head] = a;
      p.gdn.projected[p.gdn.b_column + head] = b;
    }
  }
  __syncthreads();
}

// The row as fixed point, the sum of its squares.
template <int kChunks>
__device__ __forceinline__ void stage_input(const LayerParams& p, BlockMemory& e, const FixedRow& x) {
  constexpr int kRounds = (kChunks * kChunkGroups * kGroup + kFixedRoundInputs<kWarps> - 1) / kFixedRoundInputs<kWarps>;
  const Place at;
  const int inputs = p.in.weights.groups * kGroup;
  FixedInputs v[kRounds], norm[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int k = fixed_input<kWarps>(i);
    v[i] = norm[i] = {};
    if (k >= inputs) continue;
    v[i] = load_fixed(p.in.residual, k);
    norm[i] = {*reinterpret_cast<const float2*>(p.in.norm + k), *reinterpret_cast<const float2*>(p.in.norm + k + 8)};
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    squares += v[i].squares();
    v[i].low.x *= norm[i].low.x, v[i].low.y *= norm[i].low.y;
    v[i].high.x *= norm[i].high.x, v[i].high.y *= norm[i].high.y;
    store_fixed<kWarps>(x, i, v[i], i * (kFixedRoundInputs<kWarps> / kGroup) + at.tid / 16 < kChunks * kChunkGroups);
  }
  squares = sum_lanes(squares);
  if (at.lane == 0) e.squares[at.warp] = squares;
}

// The products of the block's 96 outputs, and what follows from each alone. Warps 0, 1, 2 finish span 0, 1, 2.
template <int kChunks>
__device__ __forceinline__ void project(const LayerParams& p, BlockMemory& e, const std::byte* weights,
                                        const FixedRow& x, float* units, int slot, uint32_t run) {
  using L = Layout<kChunks>;
  const Place at;
  const PackedView& w = p.in.weights;
  static_assert(kChunks <= kWarps);
  if (at.warp < kChunks) {  // a chunk a warp, six tiles
    constexpr int kTiles = kSpans * kSpanTiles;
    const auto load = [&](FixedUnit& unit, int i) {
      const std::byte* span = weights + i / kSpanTiles * L::kSpanBytes;
      const int in_span = i % kSpanTiles * kChunks + at.warp;
      unit.load(span + in_span * L::kUnitCodes, span + L::kSpanCodes + in_span * L::kUnitScales);
    };
    FixedUnit unit[2];
    load(unit[0], 0);
    load(unit[1], 1);
    const FixedChunk input(x, at.warp);
    int2 sums = multiply_fixed(unit[0], input);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint2 scale = unit[i % 2].scale;
      const int2 mine = sums;
      if (i + 2 < kTiles) load(unit[i % 2], i + 2);
      if (i + 1 < kTiles) sums = multiply_fixed(unit[(i + 1) % 2], input);
      store_fixed_unit(units + (i * kChunks + at.warp) * kTileRows, scale_fixed(mine, scale, input));
    }
  }
  if (at.warp >= kSpans) {
    asm volatile("bar.arrive 1, %0;" ::"n"(kWorkers) : "memory");
    return;
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory");
  const float* tile = units + (at.warp * kSpanTiles + at.lane / kTileRows) * kChunks * kTileRows;
  const float out =
      fixed_norm<kWarps>(e.squares, w.groups * kGroup, p.gdn.eps) * sum_fixed_units<kChunks>(tile, at.lane % kTileRows);
  if (at.warp < 2) {
    const float4 old = e.tails[at.warp][at.lane], taps = e.taps[at.warp][at.lane];
    const float c = silu(taps.x * old.x + taps.y * old.y + taps.z * old.z + taps.w * out);
    if (at.warp == 1) {
      e.values[at.lane] = c;
    } else {
      publish(&p.gdn.exchange[at.key_head].qk[at.rank * kColumns + at.lane], c, run);
    }
    float* tail = at.tail(p.gdn, slot);
    tail[0] = old.y;
    tail[p.gdn.channels()] = old.z;
    tail[2 * p.gdn.channels()] = out;
  } else {
    e.z_gates[at.lane] = silu(out);
  }
  p.gdn.projected[at.first_column(p.gdn, at.warp) + at.lane] = out;
}

// The delta rule on the block's columns of the state, the read-out and its gated RMSNorm.
__device__ __forceinline__ void recur(const LayerParams& p, BlockMemory& e, const float (&s)[kKeys], int slot,
                                      uint32_t run) {
  const Place at;
  GdnExchange& exchange = p.gdn.exchange[at.key_head];
  static_assert(kWorkers == 2 * kGdnHeadDim);
  e.qk[at.tid] = receive(&exchange.qk[at.tid], run);
  asm volatile("bar.sync 2, %0;" ::"n"(kWorkers) : "memory");
  const float4* q4 = reinterpret_cast<const float4*>(e.qk + at.first_key());
  const float4* k4 = q4 + kGdnHeadDim / 4;
  float memory_sum = 0, out_sum = 0, kk = 0, qq = 0, kq = 0;
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float4 qv = q4[i], kv = k4[i];
    const float qs[4] = {qv.x, qv.y, qv.z, qv.w}, ks[4] = {kv.x, kv.y, kv.z, kv.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      memory_sum = fmaf(s[4 * i + j], ks[j], memory_sum);
      out_sum = fmaf(s[4 * i + j], qs[j], out_sum);
      kk = fmaf(ks[j], ks[j], kk);
      qq = fmaf(qs[j], qs[j], qq);
      kq = fmaf(ks[j], qs[j], kq);
    }
  }
#pragma unroll
  for (int offset = 8; offset < 32; offset *= 2) {
    memory_sum += __shfl_xor_sync(0xffffffffu, memory_sum, offset);
    out_sum += __shfl_xor_sync(0xffffffffu, out_sum, offset);
    kk += __shfl_xor_sync(0xffffffffu, kk, offset);
    qq += __shfl_xor_sync(0xffffffffu, qq, offset);
    kq += __shfl_xor_sync(0xffffffffu, kq, offset);
  }
  if (at.lane < 8) e.column_sums[at.half()][at.column()] = make_float2(memory_sum, out_sum);
  if (at.lane == 0 && at.warp % 4 == 0) e.key_sums[at.half()] = make_float4(kk, qq, kq, 0);
  __syncthreads();  // and the gate warp's decay and beta

  kk = qq = kq = 0;
#pragma unroll
  for (int i = 0; i < kHalves; ++i) {
    const float4 sums = e.key_sums[i];
    kk += sums.x, qq += sums.y, kq += sums.z;
  }
  const float k_scale = rsqrtf(kk + 1e-6f), q_scale = rsqrtf(qq + 1e-6f) * 0.08838834764831845f;  // 1 / sqrt(128)
  const float decay = e.decay, beta = e.beta;
  // The change of column c along k before its l2 norm, and its read-out.
  const auto finish_column = [&](int c) {
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      sums.x += e.column_sums[i][c].x;
      sums.y += e.column_sums[i][c].y;
    }
    const float change = k_scale * beta * (e.values[c] - decay * k_scale * sums.x);
    return make_float2(change, q_scale * (decay * sums.y + kq * change));
  };
  if (at.warp == 0) {  // a lane a column
    const float out = finish_column(at.lane).y;
    float total = sum_lanes(out * out);
    if (at.lane == 0) publish(&exchange.squares[at.rank], total, run);
    const int first = at.rank / kParts * kParts;
    total = sum_lanes<kParts>(at.lane < kParts ? receive(&exchange.squares[first + at.lane], run) : 0);
    total = __shfl_sync(0xffffffffu, total, 0);
    const float y = out * rsqrtf(total / kGdnHeadDim + p.gdn.eps) * e.tails[0][at.lane].w * e.z_gates[at.lane];
    p.gdn.mixed[at.head * kGdnHeadDim + at.part * kColumns + at.lane] = __float2half_rn(y);
    if (at.lane == 0) exchange.runs[at.rank] = run;
  }
  const float change = finish_column(at.column()).x;
  // The state goes out last: the exchange would queue up behind it.
  asm volatile("bar.sync 2, %0;" ::"n"(kWorkers) : "memory");
  float* state = at.state(p.gdn, slot);
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float4 kv = k4[i];
    const float ks[4] = {kv.x, kv.y, kv.z, kv.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      __stcs(state + (4 * i + j) * kGdnHeadDim, fmaf(ks[j], change, decay * s[4 * i + j]));
    }
  }
}

template <int kChunks>
__global__ void __launch_bounds__(kBoundThreads, 1) gdn_layer(LayerParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ BlockMemory e;
  using L = Layout<kChunks>;
  const FixedRow x(shared + L::kRow, L::kGroups);
  auto* units = reinterpret_cast<float*>(shared + L::kUnits);

  launch_dependents();
  if (threadIdx.x == kGateWarp * 32) {
    for (uint64_t& barrier : e.weights) barrier_init(&barrier, 1);
    fence_async_proxy();
  }
  __syncthreads();
  if (threadIdx.x / 32 == kGateWarp) return run_gate_warp<kChunks>(p, e, shared, x);

  // What does not depend on the kernels in front.
  const int slot = p.gdn.step.sequences[0].slot;
  float s[kKeys];
  uint32_t run;
  {
    const Place at;
    const float* state = at.state(p.gdn, slot);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) s[i] = __ldcs(state + i * kGdnHeadDim);
    if (at.warp < 2) {
      const float* tail = at.tail(p.gdn, slot);
      const int channels = p.gdn.channels();
      e.tails[at.warp][at.lane] =
          make_float4(tail[0], tail[channels], tail[2 * channels], p.gdn.norm[at.part * kColumns + at.lane]);
      e.taps[at.warp][at.lane] =
          *reinterpret_cast<const float4*>(p.gdn.conv + (at.first_column(p.gdn, at.warp) + at.lane) * 4);
    }
    const GdnExchange& exchange = p.gdn.exchange[at.key_head];
    run = exchange.runs[at.rank] + 1;
    peek(&exchange.qk[at.tid]);  // so that it is in L2
    if (at.tid < kParts) peek(&exchange.squares[at.rank / kParts * kParts + at.tid]);
  }
  // Here and not at their use, where each wait would hold up the loads from shared memory.
#pragma unroll
  for (uint64_t& barrier : e.weights) barrier_wait(&barrier, 0);
  grid_dependency_wait();
  stage_input<kChunks>(p, e, x);
  __syncthreads();
  project<kChunks>(p, e, shared, x, units, slot, run);
  recur(p, e, s, slot, run);
}

}  // namespace

bool gdn_layer_fits(const DeviceInfo& device, const PackedView& weights, int key_heads, int value_heads) {
  const int chunks = weights.padded_groups / kChunkGroups;
  // The blocks wait for each other, so all have to be on the card: one a multiprocessor, whatever else is there.
  return device.is_hopper() && weights.bits == 4 && value_heads == kHeadsPerKey * key_heads &&
         (chunks == 1 || chunks == 8) && key_heads * kBlocks <= device.multiprocessors &&
         Layout<8>::kBytes + sizeof(BlockMemory) + 1024 <= static_cast<size_t>(device.shared_per_block);
}

void gdn_layer_decode(const Launch& launch, const GdnParams& gdn, const GdnInput& in) {
  check(gdn.step.rows == 1, "the one-kernel GDN layer takes one row");
  const auto run = [&](auto kernel, size_t bytes) {
    launch_kernel(launch, kernel, dim3(static_cast<unsigned>(gdn.key_heads * kBlocks)), kThreads, bytes, 1,
                  LayerParams{gdn, in});
  };
  if (in.weights.padded_groups == kChunkGroups) return run(gdn_layer<1>, Layout<1>::kBytes);
  run(gdn_layer<8>, Layout<8>::kBytes);
}

}  // namespace calla::cuda
