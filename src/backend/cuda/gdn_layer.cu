// gdn_layer: a GDN layer of one token up to its output projection, in one kernel: RMSNorm, the input projections, conv +
// SiLU, l2 norms, decay and beta, state update and read-out, gated RMSNorm.
//   Launch    eight blocks a key head, all on the card at once; block 544: sixteen warps and the gate warp. A block has 32
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
constexpr int kGateWarp = kFixedWarps;
constexpr int kThreads = kFixedThreads + 32;
// As if the block had 1,024: at most 64 registers a thread, so that blocks of the neighbouring kernels fit beside it.
constexpr int kBoundThreads = 1024;
constexpr int kSpans = 3;  // the block's rows of q or k, of v and of z: two tiles each
constexpr int kSpanTiles = 2;
constexpr int kMostChunks = kFixedWarps / kSpanTiles;
constexpr int kQuarters = 4, kQuarterKeys = kGdnHeadDim / kQuarters;
constexpr int kKeys = 8;  // of the state a thread: 4 lanes x 8 keys x 4 warps of the same columns

struct LayerParams {
  GdnParams gdn;
  GdnInput in;
  uint32_t span_code_bytes, span_scale_bytes;
};

// Shared memory of a block besides the weights and the row.
struct BlockMemory {
  uint64_t weights[kSpans];  // mbarriers
  alignas(16) float qk[2 * kGdnHeadDim];
  alignas(16) float4 key_sums[kQuarters];   // k.k, q.q, k.q
  float2 column_sums[kQuarters][kColumns];  // S^T k, S^T q
  float squares[kFixedWarps];
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

// The gate warp: starts the copies, projects a and b of the key head's value heads, leaves decay and beta of this block's.
__device__ void run_gate_warp(const LayerParams& p, BlockMemory& e, std::byte* weights, const FixedRow& x,
                              const int (&first_tiles)[kSpans], GdnExchange& exchange, int rank, int key_head,
                              int head) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const PackedView& w = p.in.weights;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      std::byte* to = weights + i * (p.span_code_bytes + p.span_scale_bytes);
      barrier_expect(&e.weights[i], p.span_code_bytes + p.span_scale_bytes);
      bulk_copy_part(to, w.codes + static_cast<size_t>(first_tiles[i]) * w.codes_per_tile(), p.span_code_bytes,
                     &e.weights[i]);
      bulk_copy_part(to + p.span_code_bytes, w.scales + static_cast<size_t>(first_tiles[i]) * w.scales_per_tile(),
                     p.span_scale_bytes, &e.weights[i]);
    }
  }
  __syncwarp();
  // Rows 2 h and 2 h + 1 of a and of b are one fragment pair. A block takes one chunk of their inputs: lanes 0..15 have
  // a, the others b; four groups of four lanes.
  const int group = rank * kChunkGroups + lane / 4 % 4, q = lane % 4;
  const bool works = group < w.padded_groups;
  const size_t at =
      static_cast<size_t>((lane < 16 ? p.gdn.a_column : p.gdn.b_column) / kTileRows + key_head / 8) * w.padded_groups +
      static_cast<size_t>(works ? group : 0);
  const uint4 codes = load_stream(w.codes + at * 32 + key_head % 8 * 4 + q);
  const uint2 scale = load_stream(w.scales + at * 8 + key_head % 8);
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
  const float norm = fixed_norm(e.squares, w.groups * kGroup, p.gdn.eps);
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

__global__ void __launch_bounds__(kBoundThreads, 1) gdn_layer(LayerParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ BlockMemory e;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int rank = static_cast<int>(blockIdx.x) % kBlocks, key_head = static_cast<int>(blockIdx.x) / kBlocks;
  const int head = key_head * kHeadsPerKey + rank / kParts, part = rank % kParts;
  const int key_width = p.gdn.key_heads * kGdnHeadDim, channels = p.gdn.channels();
  const PackedView& w = p.in.weights;
  const int chunks = w.padded_groups / kChunkGroups, k = w.groups * kGroup;
  GdnExchange& exchange = p.gdn.exchange[key_head];

  launch_dependents();
  if (tid == kGateWarp * 32) {
    for (uint64_t& barrier : e.weights) barrier_init(&barrier, 1);
    fence_async_proxy();
  }
  __syncthreads();

  // First outputs of the block's spans: 32 of q (ranks 0..3) or k (4..7), of v, of z.
  const int first_columns[kSpans] = {(rank < kParts ? 0 : key_width) + key_head * kGdnHeadDim + part * kColumns,
                                     2 * key_width + head * kGdnHeadDim + part * kColumns,
                                     p.gdn.z_column + head * kGdnHeadDim + part * kColumns};
  const uint32_t span_bytes = p.span_code_bytes + p.span_scale_bytes;
  std::byte* x_memory = shared + kSpans * span_bytes;
  const FixedRow x(x_memory, w.padded_groups);
  auto* units = reinterpret_cast<float*>(x_memory + FixedRow::bytes(w.padded_groups));
  if (warp == kGateWarp) {
    const int first_tiles[kSpans] = {first_columns[0] / kTileRows, first_columns[1] / kTileRows,
                                     first_columns[2] / kTileRows};
    return run_gate_warp(p, e, shared, x, first_tiles, exchange, rank, key_head, head);
  }

  // What does not depend on the kernels in front. A warp has eight columns of the state and a quarter of its keys, a lane
  // one column and eight keys.
  float* memory = p.gdn.state + static_cast<size_t>(p.gdn.step.sequences[0].slot) * p.gdn.slot_floats;
  const int column = warp % 4 * 8 + lane % 8, quarter = warp / 4, first_key = quarter * kQuarterKeys + lane / 8 * kKeys;
  float* state = memory + (static_cast<size_t>(head) * kGdnHeadDim + static_cast<size_t>(first_key)) * kGdnHeadDim +
                 part * kColumns + column;
  float s[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) s[i] = __ldcs(state + i * kGdnHeadDim);
  const int at = fixed_input(0);
  FixedInputs norm_weights{};
  if (at < k)
    norm_weights = {*reinterpret_cast<const float2*>(p.in.norm + at),
                    *reinterpret_cast<const float2*>(p.in.norm + at + 8)};
  // Warps 0, 1, 2 finish the outputs of span 0, 1, 2, a lane an output.
  const int output = (warp == 0 ? first_columns[0] : warp == 1 ? first_columns[1] : first_columns[2]) + lane;
  float* tail = memory + p.gdn.state_floats() + output;
  if (warp < 2) {
    e.tails[warp][lane] = make_float4(tail[0], tail[channels], tail[2 * channels], p.gdn.norm[part * kColumns + lane]);
    e.taps[warp][lane] = *reinterpret_cast<const float4*>(p.gdn.conv + output * 4);
  }
  const uint32_t run = exchange.runs[rank] + 1;
  if (tid < 2 * kGdnHeadDim) peek(&exchange.qk[tid]);  // so that it is in L2
  if (tid < kParts) peek(&exchange.squares[rank / kParts * kParts + tid]);
  grid_dependency_wait();

  FixedInputs v{};
  if (at < k) v = load_fixed(p.in.residual, at);
  const float squares = sum_lanes(v.squares());
  if (lane == 0) e.squares[warp] = squares;
  v.low.x *= norm_weights.low.x, v.low.y *= norm_weights.low.y;
  v.high.x *= norm_weights.high.x, v.high.y *= norm_weights.high.y;
  store_fixed(x, 0, v, tid / 16 < w.padded_groups);
  __syncthreads();

  if (warp < chunks * kSpanTiles) {
    const int chunk = warp / kSpanTiles, half = warp % kSpanTiles;
    const FixedChunk input(x, chunk);
#pragma unroll
    for (int i = 0; i < kSpans; ++i) {
      barrier_wait(&e.weights[i], 0);
      const std::byte* span = shared + i * span_bytes;
      const int group = half * w.padded_groups + chunk * kChunkGroups;
      const float2 sums = multiply_fixed(reinterpret_cast<const uint4*>(span) + group * 32,
                                         reinterpret_cast<const uint2*>(span + p.span_code_bytes) + group * 8, input);
      store_fixed_unit(units + ((i * kSpanTiles + half) * chunks + chunk) * kTileRows, sums);
    }
  }
  if (warp < kSpans) {
    asm volatile("bar.sync 1, %0;" ::"n"(kFixedThreads) : "memory");
    const float norm = fixed_norm(e.squares, k, p.gdn.eps);
    const float out = norm * sum_fixed_units(units + (warp * kSpanTiles + lane / kTileRows) * chunks * kTileRows,
                                             chunks, lane % kTileRows);
    if (warp < 2) {
      const float4 old = e.tails[warp][lane], taps = e.taps[warp][lane];
      const float c = silu(taps.x * old.x + taps.y * old.y + taps.z * old.z + taps.w * out);
      if (warp == 0) {
        publish(&exchange.qk[rank * kColumns + lane], c, run);
      } else {
        e.values[lane] = c;
      }
      tail[0] = old.y;
      tail[channels] = old.z;
      tail[2 * channels] = out;
    } else {
      e.z_gates[lane] = silu(out);
    }
    p.gdn.projected[output] = out;
  } else {
    asm volatile("bar.arrive 1, %0;" ::"n"(kFixedThreads) : "memory");
  }

  if (tid < 2 * kGdnHeadDim) e.qk[tid] = receive(&exchange.qk[tid], run);
  asm volatile("bar.sync 2, %0;" ::"n"(kFixedThreads) : "memory");
  const float4* q4 = reinterpret_cast<const float4*>(e.qk + first_key);
  const float4* k4 = reinterpret_cast<const float4*>(e.qk + kGdnHeadDim + first_key);
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
  if (lane < 8) e.column_sums[quarter][column] = make_float2(memory_sum, out_sum);
  if (lane == 0 && warp % 4 == 0) e.key_sums[quarter] = make_float4(kk, qq, kq, 0);
  __syncthreads();

  kk = qq = kq = 0;
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const float4 sums = e.key_sums[i];
    kk += sums.x, qq += sums.y, kq += sums.z;
  }
  const float k_scale = rsqrtf(kk + 1e-6f), q_scale = rsqrtf(qq + 1e-6f) * 0.08838834764831845f;  // 1 / sqrt(128)
  const float decay = e.decay, beta = e.beta;
  // The change of column c along k before its l2 norm, and its read-out.
  const auto finish_column = [&](int c) {
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      sums.x += e.column_sums[i][c].x;
      sums.y += e.column_sums[i][c].y;
    }
    const float change = k_scale * beta * (e.values[c] - decay * k_scale * sums.x);
    return make_float2(change, q_scale * (decay * sums.y + kq * change));
  };
  float out = 0;
  if (warp == 0) {
    out = finish_column(lane).y;
    const float total = sum_lanes(out * out);
    if (lane == 0) publish(&exchange.squares[rank], total, run);
  }
  const float change = finish_column(column).x;
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const float4 kv = k4[i];
    const float ks[4] = {kv.x, kv.y, kv.z, kv.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) __stcs(state + (4 * i + j) * kGdnHeadDim, fmaf(ks[j], change, decay * s[4 * i + j]));
  }
  if (warp == 0) {
    const float total =
        sum_lanes<kParts>(lane < kParts ? receive(&exchange.squares[rank / kParts * kParts + lane], run) : 0);
    const float sum = __shfl_sync(0xffffffffu, total, 0);
    if (lane == 0) exchange.runs[rank] = run;
    const float y = out * rsqrtf(sum / kGdnHeadDim + p.gdn.eps) * e.tails[0][lane].w * e.z_gates[lane];
    p.gdn.mixed[head * kGdnHeadDim + part * kColumns + lane] = __float2half_rn(y);
  }
}

LayerParams make_params(const GdnParams& gdn, const GdnInput& in) {
  LayerParams p{gdn, in, 0, 0};
  p.span_code_bytes = static_cast<uint32_t>(kSpanTiles * in.weights.codes_per_tile() * sizeof(uint4));
  p.span_scale_bytes = static_cast<uint32_t>(kSpanTiles * in.weights.scales_per_tile() * sizeof(uint2));
  return p;
}
size_t shared_bytes(const LayerParams& p) {
  const auto groups = static_cast<size_t>(p.in.weights.padded_groups);
  return kSpans * (size_t{p.span_code_bytes} + p.span_scale_bytes) + FixedRow::bytes(p.in.weights.padded_groups) +
         sizeof(float) * kSpans * kSpanTiles * kTileRows * (groups / kChunkGroups);
}

}  // namespace

bool gdn_layer_fits(const DeviceInfo& device, const PackedView& weights, int key_heads, int value_heads) {
  if (!device.is_hopper() || weights.bits != 4 || value_heads != kHeadsPerKey * key_heads ||
      weights.padded_groups > kMostChunks * kChunkGroups)
    return false;
  GdnInput in;
  in.weights = weights;
  const size_t bytes = shared_bytes(make_params({}, in));
  // The blocks wait for each other, so all have to be on the card: one a multiprocessor, whatever else is there.
  return bytes + sizeof(BlockMemory) + 1024 <= static_cast<size_t>(device.shared_per_block) &&
         key_heads * kBlocks <= device.multiprocessors;
}

void gdn_layer_decode(const Launch& launch, const GdnParams& gdn, const GdnInput& in) {
  check(gdn.step.rows == 1, "the one-kernel GDN layer takes one row");
  const LayerParams p = make_params(gdn, in);
  launch_kernel(launch, gdn_layer, dim3(static_cast<unsigned>(gdn.key_heads * kBlocks)), kThreads, shared_bytes(p), 1,
                p);
}

}  // namespace calla::cuda
