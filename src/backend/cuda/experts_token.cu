// experts_of_token: residual += sum_i weight_i down_i(h_i) + shared_gate down_shared(h_shared) for one row, from the RMSNorm
// on: router, choice of experts, gate and up projections with SwiGLU, down projections.
//   Launch    128 blocks of 16 consumer warps and a producer warp (stream.cuh), one a multiprocessor; all run at once,
//             because they wait for each other (the host asks how many fit).
//   Exchange  what every block needs of all others (logits, then hidden units) goes through L2 in 64-bit words of payload
//             and the launch's generation, so that a word tells itself whether it has arrived: no fence, no barrier.
//   Router    a block computes two logits, in the pass that adds up the RMSNorm's squares: the weights of a thread's four
//             inputs wait in its registers. Every block chooses the experts.
//   Up        a block takes four tiles of one expert, and half a tile of the shared expert, whose weights came early.
//   Down      a block takes one tile of 16 outputs of all nine experts; the weights were asked for when the experts were
//             chosen, behind those of the up projection.
//   Moves     9 x 9/16 x 3 x K width bytes of weights, and the router once.
//   Numerics  sums in a fixed order.
#include "backend/cuda/experts_token.h"
#include "backend/cuda/stream.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda {
namespace {

constexpr int kHidden = 2048, kWidth = 512, kExperts = 256;
constexpr int kBlocks = kHidden / kTileRows;              // one tile of outputs each
constexpr int kChunks = kHidden / kGroup / kChunkGroups;  // of the router and the up projection: 8
constexpr int kBlocksPerExpert = kBlocks / kExpertsPerToken;
constexpr int kUpTiles = kWidth / 8 / kBlocksPerExpert;  // of a block: 4
constexpr int kDownParts = 2;                            // the tile of four experts each
constexpr int kPieces = kUpTiles + kDownParts;
constexpr int kPartExperts = kExpertsPerToken / kDownParts;
constexpr int kGroups = kHidden / kGroup, kDownGroups = kWidth / kGroup;
constexpr uint32_t kGroupCodes = 512, kGroupScales = 64;  // bytes a group of a 4-bit tile
// An up tile and a part of the down projection have the same size, and are laid out alike: codes, then scales.
constexpr uint32_t kSlotBytes = kGroups * (kGroupCodes + kGroupScales), kSlotCodes = kGroups * kGroupCodes;
static_assert(kPartExperts * kDownGroups == kGroups);
constexpr int kSharedGroups = (kExpertsPerToken + 1) * kDownGroups;  // of the staged hidden units
constexpr int kUnitLines = kExchangedUnits / 4;                      // two words, 16 bytes
constexpr int kLogitLines = kExperts / 2;
static_assert(kLogitLines == kBlocks && kExchangedUnits == (kExpertsPerToken + 1) * kWidth);
constexpr int kSharedUnits = kWidth / kBlocks;  // of a block: 4
static_assert(kBlocks == 128 && kUpTiles == 4 && kChunks == 8 && kSharedUnits == 4 && kStreamWarps == 16);

struct TokenParams {
  PackedView router, up, down, shared_up, shared_down;
  const float* norm;
  float eps;
  Activations a;
  TokenExchange exchange;
};

// Shared memory beside the ring.
struct Fixed {
  union {
    struct {
      uint4 shared_up[kGroups * 16];        // the 16 lanes of each group that hold the block's units
      uint2 shared_up_scales[kGroups * 4];  // likewise
      std::byte x[kGroups * 128];
    };
    std::byte hidden[kSharedGroups * 128];  // when those have been used
  };
  std::byte shared_down[kDownGroups * (kGroupCodes + kGroupScales)];
  uint4 zeros[kZeroPieces];
  float up_sums[(kUpTiles + 1) * kChunks * kTileRows];  // the last tile is the shared expert's
  float down_sums[kStreamWarps * kTileRows];
  float logits[kExperts];
  float weights[kExpertsPerToken];
  float gate;
  float4 parts[kStreamWarps];  // sums over a warp's inputs: squares, two logits, the shared expert's gate
  // A barrier for each of the block's pieces, not for each slot: a warp that skips pieces could not tell a slot's phases
  // apart, because one may be waited for when the one before it has not ended.
  uint64_t full[kPieces], empty[kPieces];
  uint64_t shared_full;
};

constexpr int kSlots = 4;  // of the ring
constexpr size_t kUsedBytes = kSlots * kSlotBytes + sizeof(Fixed);
// More than half of a multiprocessor's shared memory, so that no two blocks share one: with 98,304 bytes they did, which
// cost 5 % of a token.
constexpr size_t kSharedBytes = 115840;
static_assert(kUsedBytes <= kSharedBytes && kSlots >= kDownParts);

__device__ __forceinline__ void copy_groups(const PackedView& w, size_t first_group, uint32_t groups, std::byte* to,
                                            std::byte* to_scales, uint64_t* barrier) {
  const auto code_words = static_cast<size_t>(w.bits) * 8;  // uint4s a group
  bulk_copy_part(to, w.codes + first_group * code_words, groups * static_cast<uint32_t>(code_words) * 16, barrier);
  bulk_copy_part(to_scales, w.scales + first_group * 8, groups * kGroupScales, barrier);
}

// One row as B operands (StagedInput), without the sums of the groups: a product with ones gives them where they are
// needed, and staging a row needs no exchange between lanes.
//
// The two words are inputs [4 c, 4 c + 4).
__device__ __forceinline__ void stage_words(std::byte* to, int c, uint32_t low, uint32_t high) {
  const auto u = static_cast<unsigned>(c);
  const unsigned group = u / 16, step = u % 16 / 4, upper = u % 4 / 2, q = u % 2 * 2;
  auto* words = reinterpret_cast<uint32_t*>(to) + (group * 2 + step / 2) * 16 + (step % 2) * 2 + upper;
  words[q * 4] = low;
  words[(q + 1) * 4] = high;
}

// The groups of a chunk, a column each as in OneRowInput; of one group only, the first column.
template <int kCount>
struct RowInput {
  const uint4* from[kCount];
  __device__ __forceinline__ void load(const std::byte* row, const uint4* zeros, int first_group) {
    const unsigned lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
#pragma unroll
    for (int g = 0; g < kCount; ++g)
      from[g] = r == 2 * g ? reinterpret_cast<const uint4*>(row) + (first_group + g) * 8 + q : zeros;
  }
};

// Groups of a 4-bit tile of which `kLanes` lanes are stored; with 16, rows 4..7 of the result repeat rows 0..3.
template <int kCount, int kLanes>
__device__ __forceinline__ UnitSums<1> multiply_row(const uint4* codes, const uint2* scales,
                                                    const RowInput<kCount>& x) {
  const int lane = static_cast<int>(threadIdx.x % 32), r = lane / 4, q = lane % 4;
  const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  float even[4] = {}, odd[4] = {}, even_x[4] = {}, odd_x[4] = {};
#pragma unroll
  for (int g = 0; g < kCount; ++g) {
    const uint4 w = codes[g * kLanes + lane % kLanes], low = x.from[g][0], high = x.from[g][4];
    uint32_t a[4];
    expand_step(w.x, a), mma_f16(even, a, low.x, low.y), mma_f16(even_x, ones, low.x, low.y);
    expand_step(w.y, a), mma_f16(odd, a, low.z, low.w), mma_f16(odd_x, ones, low.z, low.w);
    expand_step(w.z, a), mma_f16(even, a, high.x, high.y), mma_f16(even_x, ones, high.x, high.y);
    expand_step(w.w, a), mma_f16(odd, a, high.z, high.w), mma_f16(odd_x, ones, high.z, high.w);
  }
  // Lane q has the column of group q.
  const uint2 scale = scales[(kCount == 1 ? 0 : q) * (kLanes / 4) + r % (kLanes / 4)];
  const float sum = even_x[0] + odd_x[0];
  const float low_scale = low_bf16(scale.x), high_scale = 0.0625f * low_bf16(scale.y);
  float low = low_scale * (even[0] + odd[0]) + fmaf(-1024.0f, low_scale, high_bf16(scale.x)) * sum;
  float high = high_scale * (even[2] + odd[2]) + fmaf(-1024.0f, high_scale, high_bf16(scale.y)) * sum;
  if constexpr (kCount > 1) {
    low += __shfl_xor_sync(0xffffffffu, low, 1);
    high += __shfl_xor_sync(0xffffffffu, high, 1);
    low += __shfl_xor_sync(0xffffffffu, low, 2);
    high += __shfl_xor_sync(0xffffffffu, high, 2);
  }
  UnitSums<1> out;
  out.low[0] = low;
  out.high[0] = high;
  return out;
}

__device__ __forceinline__ void store_word(uint2* to, uint32_t payload, uint32_t generation) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(payload), "r"(generation) : "memory");
}
// Two words; each is read whole, as 64 bits.
__device__ __forceinline__ uint4 load_line(const uint2* from) {
  uint64_t a, b;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
  return make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
                    static_cast<uint32_t>(b >> 32));
}
// Lines first, first + stride ... below `end` as soon as they are of this generation.
template <int kRounds>
__device__ __forceinline__ void receive_lines(uint4 (&line)[kRounds], const uint2* words, int first, int stride,
                                              int end, uint32_t generation) {
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (first + i * stride < end) line[i] = load_line(words + 2 * (first + i * stride));
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (first + i * stride < end)
      while (line[i].y != generation || line[i].w != generation) line[i] = load_line(words + 2 * (first + i * stride));
  __syncwarp();
}

// A thread's four inputs of rows 2 r and 2 r + 1 of an 8-bit tile (layout.h).
struct RouterWeights {
  uint32_t codes[2];
  uint2 scales;

  __device__ __forceinline__ void load(const PackedView& w, int tile, int r) {
    const int tid = static_cast<int>(threadIdx.x), group = tile * kGroups + tid / 16;
    const int step = tid % 16 / 4, upper = tid % 4 / 2, q = tid % 2 * 2;
    const auto* words = reinterpret_cast<const uint32_t*>(w.codes + (group * 2 + step / 2) * 32 + r * 4 + q);
    codes[0] = words[step % 2 * 2 + upper];
    codes[1] = words[4 + step % 2 * 2 + upper];
    scales = w.scales[group * 8 + r];
  }
  // sum of w x for x[0..3] over row 2 r (0) or 2 r + 1 (1).
  __device__ __forceinline__ float dot(int row, float4 x) const {
    const uint32_t scale = row == 0 ? scales.x : scales.y;
    const auto code = [&](int i) { return static_cast<float>(codes[i / 2] >> (16 * row + 8 * (i % 2)) & 255); };
    const float sum = code(0) * x.x + code(1) * x.y + code(2) * x.z + code(3) * x.w;
    return low_bf16(scale) * sum + high_bf16(scale) * ((x.x + x.y) + (x.z + x.w));
  }
};

__device__ __forceinline__ void produce(const TokenParams& p, std::byte* ring, Fixed& s) {
  const int lane = static_cast<int>(threadIdx.x % 32), block = static_cast<int>(blockIdx.x);
  if (lane == 0) {
    barrier_expect(&s.shared_full, sizeof s.shared_down);
    copy_groups(p.shared_down, static_cast<size_t>(block) * kDownGroups, kDownGroups, s.shared_down,
                s.shared_down + kDownGroups * kGroupCodes, &s.shared_full);
  }
  __syncwarp();
  grid_dependency_wait();
  launch_dependents();
  const uint32_t generation = __ldcg(p.exchange.generation);
  constexpr int kRounds = kLogitLines / 32;
  uint4 line[kRounds];
  receive_lines(line, p.exchange.logits, lane, 32, kLogitLines, generation);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    *reinterpret_cast<float2*>(s.logits + 2 * (lane + 32 * i)) =
        make_float2(__uint_as_float(line[i].x), __uint_as_float(line[i].z));
  __syncwarp();
  const int mine = choose_ids([&](int id) { return s.logits[id]; }, kExperts);
  const int up_id = __shfl_sync(0xffffffffu, mine, block / kBlocksPerExpert);
  const size_t up_tile = (static_cast<size_t>(up_id) * kWidth / 8 + block % kBlocksPerExpert * kUpTiles) * kGroups;
  float weight = 0;
#pragma unroll
  for (int u = 0; u < kPieces; ++u) {
    std::byte* to = ring + u % kSlots * kSlotBytes;
    uint64_t* full = &s.full[u];
    if (u == kUpTiles) weight = expert_weight(lane < kExpertsPerToken ? s.logits[mine] : -INFINITY);
    if (u >= kSlots) barrier_wait(&s.empty[u - kSlots], 0);
    if (u < kUpTiles) {
      if (lane == 0) {
        barrier_expect(full, kSlotBytes);
        copy_groups(p.up, up_tile + static_cast<size_t>(u) * kGroups, kGroups, to, to + kSlotCodes, full);
      }
    } else {
      if (u == kUpTiles && lane < kExpertsPerToken) s.weights[lane] = weight;  // before the arrival on `full`
      __syncwarp();
      if (lane == 0) barrier_expect(full, kSlotBytes);
      __syncwarp();
      const int choice = (u - kUpTiles) * kPartExperts + lane % kPartExperts;
      const int id = __shfl_sync(0xffffffffu, mine, choice);
      if (lane < kPartExperts)
        copy_groups(p.down, (static_cast<size_t>(id) * kBlocks + block) * kDownGroups, kDownGroups,
                    to + lane * (kDownGroups * kGroupCodes), to + kSlotCodes + lane * (kDownGroups * kGroupScales),
                    full);
    }
  }
  if (block != 0) return;
  if (lane < kExpertsPerToken) {
    p.a.expert_ids[lane] = mine;
    p.a.expert_weights[lane] = weight;
  }
}

// The block's hidden units to all blocks.
__device__ __forceinline__ void send_hidden(const TokenParams& p, const Fixed& s, uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (tid >= 64) return;
  const bool is_shared = tid >= 32;  // a warp for the four tiles, one for the shared expert's half tile
  const int i = tid % 32, tile = is_shared ? kUpTiles : i / 8, r = is_shared ? i % kSharedUnits : i % 8;
  const float* sums = s.up_sums + tile * kChunks * kTileRows;
  const float gate = total_of<1>(sums, kChunks, 2 * r), up = total_of<1>(sums, kChunks, 2 * r + 1);
  const float h = silu(gate) * up * kHiddenScale, next = __shfl_down_sync(0xffffffffu, h, 1);
  if (is_shared && i >= kSharedUnits) return;
  const int unit = is_shared ? kExpertsPerToken * kWidth + block * kSharedUnits + i : block * (kUpTiles * 8) + i;
  if (i % 2 == 0) store_word(p.exchange.units + unit / 2, pack_half2(h, next), generation);
  if (tid == 0)  // no fence: the words themselves tell whether they have arrived
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p.exchange.flags + block), "r"(generation) : "memory");
  p.a.hidden[unit] = __float2half_rn(h);
}

// Waits until all blocks have sent, as far as their flags tell. One warp looks at half a kilobyte: all warps polling the
// units themselves would take more of L2 than the weights that slower blocks still wait for.
__device__ __forceinline__ void wait_for_flags(const uint32_t* flags, uint32_t generation) {
  const uint32_t* mine = flags + threadIdx.x % 32 * 4;
  static_assert(kBlocks == 32 * 4);
  bool ready;
  do {
    uint32_t a, b, c, d;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(mine)
                 : "memory");
    ready = a == generation && b == generation && c == generation && d == generation;
  } while (!__all_sync(0xffffffffu, ready));
}

// All blocks' hidden units, staged as the input of the down projections.
__device__ __forceinline__ void receive_hidden(const TokenParams& p, std::byte* to, uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x);
  constexpr int kRounds = (kUnitLines + kStreamConsumers - 1) / kStreamConsumers;
  static_assert(kUnitLines % 32 == 0);
  uint4 line[kRounds];
  receive_lines(line, p.exchange.units, tid, kStreamConsumers, kUnitLines, generation);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (tid + i * kStreamConsumers < kUnitLines) stage_words(to, tid + i * kStreamConsumers, line[i].x, line[i].z);
}

__global__ void __launch_bounds__(kStreamThreads, 2) experts_of_token(TokenParams p) {
  extern __shared__ __align__(128) std::byte ring[];
  Fixed& s = *reinterpret_cast<Fixed*>(ring + kSlots * kSlotBytes);
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int block = static_cast<int>(blockIdx.x);
  if (tid == 0) {
    for (int i = 0; i < kPieces; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kChunks);
    }
    barrier_init(&s.shared_full, 1);
    fence_async_proxy();
  }
  __syncthreads();
  if (warp == kStreamWarps) return produce(p, ring, s);

  {  // this block's half tile of the shared expert
    const int half = block % 2, group = tid / 16, piece = tid % 16;
    const size_t from = static_cast<size_t>(block / 2) * kGroups;
    cp_async16(shared_address(&s.shared_up[tid]), p.shared_up.codes + (from + group) * 32 + half * 16 + piece);
    if (piece < 2)
      cp_async16(shared_address(&s.shared_up_scales[group * 4 + piece * 2]),
                 p.shared_up.scales + (from + group) * 8 + half * 4 + piece * 2);
    cp_async_commit();
  }
  RouterWeights router, gate;
  router.load(p.router, block / 8, block % 8);
  gate.load(p.router, kExperts / kTileRows, 0);
  const float4 norm = reinterpret_cast<const float4*>(p.norm)[tid];
  if (tid < kZeroPieces) s.zeros[tid] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();

  const uint32_t generation = __ldcg(p.exchange.generation);
  float* residual = p.a.residual + block * kTileRows;
  const float old = tid < kTileRows ? __ldcg(residual + tid) : 0.0f;
  float4 v = load_row4(p.a.residual + 4 * tid);
  float4 sums;
  sums.x = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  v = make_float4(v.x * norm.x, v.y * norm.y, v.z * norm.z, v.w * norm.w);
  sums.y = router.dot(0, v);
  sums.z = router.dot(1, v);
  sums.w = gate.dot(0, v);
  sums = make_float4(sum_lanes(sums.x), sum_lanes(sums.y), sum_lanes(sums.z), sum_lanes(sums.w));
  if (lane == 0) s.parts[warp] = sums;
  consumer_barrier();
  sums = s.parts[lane % kStreamWarps];
  const float scale = rsqrtf(sum_lanes<kStreamWarps>(sums.x) / kHidden + p.eps);
  if (warp == 0) {
    const float first = scale * sum_lanes<kStreamWarps>(sums.y), second = scale * sum_lanes<kStreamWarps>(sums.z);
    if (lane < 2)
      store_word(p.exchange.logits + 2 * block + lane, __float_as_uint(lane == 0 ? first : second), generation);
    const float shared_gate = sigmoid(scale * sum_lanes<kStreamWarps>(sums.w));
    if (lane == 0) s.gate = shared_gate;
    if (lane == 0 && block == 0) p.a.shared_gate[0] = shared_gate;
  }
  v = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
  const uint2 words = make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w));
  stage_words(s.x, tid, words.x, words.y);
  if (block == 0) *reinterpret_cast<uint2*>(p.a.moe_input + 4 * tid) = words;
  cp_async_wait<0>();
  consumer_barrier();

  const int chunk = warp % kChunks;  // of every product up to the exchange
  RowInput<kChunkGroups> input;
  input.load(s.x, s.zeros, chunk * kChunkGroups);
  // While the chosen experts' weights come: the shared expert.
  if (warp >= kStreamWarps - kChunks)
    store_unit<1>(s.up_sums + (kUpTiles * kChunks + chunk) * kTileRows,
                  multiply_row<kChunkGroups, 16>(s.shared_up + chunk * (kChunkGroups * 16),
                                                 s.shared_up_scales + chunk * (kChunkGroups * 4), input));
#pragma unroll
  for (int step = 0; step < kUpTiles / 2; ++step) {
    const int u = 2 * step + warp / kChunks, slot = u % kSlots;
    barrier_wait(&s.full[u], 0);
    const auto* codes = reinterpret_cast<const uint4*>(ring + slot * kSlotBytes);
    const auto* scales = reinterpret_cast<const uint2*>(ring + slot * kSlotBytes + kSlotCodes);
    const UnitSums<1> sums =
        multiply_row<kChunkGroups, 32>(codes + chunk * (kChunkGroups * 32), scales + chunk * (kChunkGroups * 8), input);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.empty[u]);
    store_unit<1>(s.up_sums + (u * kChunks + chunk) * kTileRows, sums);
  }
  consumer_barrier();
  send_hidden(p, s, generation);
  if (warp == 0) wait_for_flags(p.exchange.flags, generation);
  consumer_barrier();
  receive_hidden(p, s.hidden, generation);
  consumer_barrier();
  // Every block has sent, hence read the generation.
  if (block == 0 && tid == 0) *p.exchange.generation = generation + 1;

  // Warp 2 i + j: half j of expert i's tile.
  const int choice = warp / 2, u = kUpTiles + choice / kPartExperts, slot = u % kSlots;
  input.load(s.hidden, s.zeros, warp * kChunkGroups);
  UnitSums<1> shared_sums;
  if (warp < kDownGroups) {
    barrier_wait(&s.shared_full, 0);
    RowInput<1> one;
    one.load(s.hidden, s.zeros, kExpertsPerToken * kDownGroups + warp);
    shared_sums =
        multiply_row<1, 32>(reinterpret_cast<const uint4*>(s.shared_down) + warp * 32,
                            reinterpret_cast<const uint2*>(s.shared_down + kDownGroups * kGroupCodes) + warp * 8, one);
  }
  barrier_wait(&s.full[u], 0);
  const int group = choice % kPartExperts * kDownGroups + warp % 2 * kChunkGroups;
  UnitSums<1> down_sums = multiply_row<kChunkGroups, 32>(
      reinterpret_cast<const uint4*>(ring + slot * kSlotBytes) + group * 32,
      reinterpret_cast<const uint2*>(ring + slot * kSlotBytes + kSlotCodes) + group * 8, input);
  const float weight = s.weights[choice], shared_weight = s.gate;
  down_sums.low[0] = weight * down_sums.low[0] + shared_weight * shared_sums.low[0];
  down_sums.high[0] = weight * down_sums.high[0] + shared_weight * shared_sums.high[0];
  store_unit<1>(s.down_sums + warp * kTileRows, down_sums);
  consumer_barrier();
  if (tid < kTileRows) residual[tid] = old + total_of<1>(s.down_sums, kStreamWarps, tid) / kHiddenScale;
}

}  // namespace

bool experts_token_runs(const DeviceInfo& device) {
  if (!device.is_hopper()) return false;
  const auto* kernel = reinterpret_cast<const void*>(experts_of_token);
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSharedBytes)),
             "shared memory of a kernel");
  int blocks = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kStreamThreads, kSharedBytes),
             "blocks of a kernel");
  return blocks * device.multiprocessors >= kBlocks;
}

bool experts_token_fits(const LayerOnDevice& l) {
  return l.router.packed && l.experts.packed && l.router.view.bits == 8 && l.experts.up.bits == 4 &&
         l.experts.count == kExperts && l.experts.width == kWidth && l.shared.width == kWidth &&
         l.router.k == kHidden && l.router.columns[1] == kExperts && l.experts.down.tiles == kBlocks;
}

void experts_token(const Launch& launch, const ExpertsToken& e) {
  TokenParams p{};
  p.router = e.layer->router.view;
  p.up = e.layer->experts.up;
  p.down = e.layer->experts.down;
  p.shared_up = e.layer->shared.up;
  p.shared_down = e.layer->shared.down;
  p.norm = e.layer->post_norm;
  p.eps = e.eps;
  p.a = e.slots;
  p.exchange = e.exchange;
  launch_kernel(launch, experts_of_token, dim3(kBlocks), kStreamThreads, kSharedBytes, 1, p);
}

}  // namespace calla::cuda
