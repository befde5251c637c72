#pragma once
// The token kernel's expert phase: RMSNorm, router, choice, gate and up projections with SwiGLU, down projections.
//   Router  a block computes two logits, in the pass that adds up the squares. Every block's producer warp chooses.
//   Up      a block takes four tiles of one chosen expert (16 blocks each) and a tile of the shared expert, of which two
//           neighbours send half each.
//   Down    a block takes the tile of its 16 outputs of all nine experts.
#include "backend/cuda/program/token_block.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda::token {

inline constexpr int kBlocksPerExpert = kBlocks / kExpertsPerToken;
inline constexpr int kExpertTiles = kExpertWidth / 8, kSharedUnits = kExpertWidth / kBlocks;
static_assert(kExpertTiles == kUpTiles * kBlocksPerExpert && kBlocks * kTileRows == kHidden);

// A thread's four inputs (FixedInputs) of rows 2 r and 2 r + 1 of an 8-bit tile (layout.h).
struct RouterWeights {
  uint2 codes;
  uint2 scales;

  // Where they lie: the codes' pair of words, in 8 bytes.
  __device__ __forceinline__ static size_t code_place(int tile, int r, int group, int step, int q) {
    return (((static_cast<size_t>(tile) * kGroups + static_cast<size_t>(group)) * 2 + static_cast<size_t>(step / 2)) *
                32 +
            static_cast<size_t>(r * 4 + q)) *
               2 +
           static_cast<size_t>(step % 2);
  }
  __device__ __forceinline__ void load(const TokenMatrix& w, int tile, int r) {
    const int tid = static_cast<int>(threadIdx.x), group = tid / 16;
    codes = reinterpret_cast<const uint2*>(w.codes)[code_place(tile, r, group, tid / 4 % 4, tid % 4)];
    scales = w.scales[(tile * kGroups + group) * 8 + r];
  }
  // sum of w x over row 2 r (0) or 2 r + 1 (1).
  __device__ __forceinline__ float dot(int row, const FixedInputs& x) const {
    const uint32_t scale = row == 0 ? scales.x : scales.y;
    const auto code = [&](uint32_t word, int i) { return static_cast<float>(word >> (16 * row + 8 * i) & 255); };
    const float sum = code(codes.x, 0) * x.low.x + code(codes.x, 1) * x.low.y + code(codes.y, 0) * x.high.x +
                      code(codes.y, 1) * x.high.y;
    return low_bf16(scale) * sum + high_bf16(scale) * ((x.low.x + x.low.y) + (x.high.x + x.high.y));
  }
};

// gate * up of unit r of a tile, from its units' sums.
__device__ __forceinline__ float hidden_unit(const float* sums, int r, float scale) {
  const float gate = scale * sum_fixed_units<kChunks>(sums, 2 * r);
  const float up = scale * sum_fixed_units<kChunks>(sums, 2 * r + 1);
  return silu(gate) * up * kHiddenScale;
}

// The shared expert, by the upper half of the warps while the chosen experts' weights come: its tile, the exchange of its
// hidden units, and the product of the block's 16 outputs, whose sums lie in shared_down_units afterwards.
__device__ __forceinline__ void shared_expert(const Block& b, RingPlace ring, float scale, uint32_t shared_parity,
                                              uint32_t generation) {
  constexpr int kHalf = kWarps / 2;
  const auto half_barrier = [] { asm volatile("bar.sync 2, %0;" ::"n"(kHalf * 32) : "memory"); };
  const int tid = static_cast<int>(threadIdx.x) - kHalf * 32, warp = tid / 32, lane = tid % 32;
  const int block = static_cast<int>(blockIdx.x);
  BlockMemory& s = b.s;
  uint64_t* const words = b.program.words->shared_units;
  multiply_tiles<1>(b, ring, 0, warp, b.row(), warp, s.shared_units + warp * kTileRows, 0);
  half_barrier();
  if (warp == 0) {  // two neighbours have the same tile of eight units, and send four each
    const float h = hidden_unit(s.shared_units, block % 2 * kSharedUnits + lane % kSharedUnits, scale);
    const float next = __shfl_down_sync(0xffffffffu, h, 1);
    const int unit = block * kSharedUnits + lane;
    if (lane < kSharedUnits && lane % 2 == 0)
      send(&words[pair_place(unit / 2)], pack_word(pack_half2(h, next), generation));
    if (lane < kSharedUnits) b.program.a.hidden[kUnits + unit] = __float2half_rn(h);
  }
  const FixedRow row(s.shared_row, kDownGroups);
  if (warp >= kHalf / 2) {  // four inputs a thread
    const int t = tid - kHalf / 2 * 32;
    const uint64_t* from = words + t * 2;
    TwoWords w = peek_two(from);
    finish_receiving(w, from, generation);
    store_four(row, t, {unpack_half2(static_cast<uint32_t>(w.a)), unpack_half2(static_cast<uint32_t>(w.b))});
  }
  half_barrier();
  if (warp >= kDownChunks) return;
  barrier_wait(&s.shared_full, shared_parity);
  FixedUnit unit;
  unit.load(s.shared_down + static_cast<uint32_t>(warp) * kUnitCodes,
            s.shared_down + kDownGroups * kGroupCodes + static_cast<uint32_t>(warp) * kUnitScales);
  store_fixed_unit(s.shared_down_units + warp * kTileRows, multiply(unit, FixedChunk(row, warp)));
}

__device__ __forceinline__ void experts_phase(const Block& b, const TokenPhase& p, RingPlace ring,
                                              uint32_t shared_parity, uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int block = static_cast<int>(blockIdx.x);
  BlockMemory& s = b.s;
  TokenWords& words = *b.program.words;

  RouterWeights router, gate;
  router.load(p.router, block / 8, block % 8);
  gate.load(p.router, kSharedGateTile, 0);
  const FixedInputs norm = load_norm(p.norm);
  const FixedInputs v = receive_residual(words, generation - 1), x = product(v, norm);
  float4 sums = make_float4(v.squares(), router.dot(0, x), router.dot(1, x), gate.dot(0, x));
  sums = make_float4(sum_lanes(sums.x), sum_lanes(sums.y), sum_lanes(sums.z), sum_lanes(sums.w));
  if (lane == 0) s.parts[warp] = sums;
  store_four(b.row(), tid, x);
  consumer_barrier();
  sums = s.parts[lane % kWarps];
  const float scale = rsqrtf(sum_lanes<kWarps>(sums.x) / kHidden + b.program.eps);
  const float shared_gate = sigmoid(scale * sum_lanes<kWarps>(sums.w));
  if (warp == 0) {
    const float first = scale * sum_lanes<kWarps>(sums.y), second = scale * sum_lanes<kWarps>(sums.z);
    if (lane < 2)
      send(&words.logits[2 * block + lane], pack_word(__float_as_uint(lane == 0 ? first : second), generation));
  }
  if (block == 0) {
    if (tid == 0) b.program.a.shared_gate[0] = shared_gate;
    const FixedInputs normed = scaled(x, scale);
    __half* to = b.program.a.moe_input + fixed_input();
    *reinterpret_cast<uint32_t*>(to) = pack_half2(normed.low.x, normed.low.y);
    *reinterpret_cast<uint32_t*>(to + 8) = pack_half2(normed.high.x, normed.high.y);
  }

  const int chunk = warp % kChunks, first = warp / kChunks;
  if (first == 1) shared_expert(b, ring, scale, shared_parity, generation);
  multiply_tiles<kUpTiles / 2>(b, ring.plus(1 + first), 2, chunk, b.row(), chunk,
                               s.units + (first * kChunks + chunk) * kTileRows, 2 * kChunks * kTileRows);
  consumer_barrier();
  release(b, ring, 1 + kUpTiles);
  if (warp == 0) {
    const float h = hidden_unit(s.units + lane / 8 * kChunks * kTileRows, lane % 8, scale);
    send_eights(b, words.units, h, generation);
    b.program.a.hidden[block * (kUpTiles * 8) + lane] = __float2half_rn(h);
  }
  WideWord w = peek(words.units + tid);
  finish_receiving(w, words.units + tid, generation);
  store_eight(b.row(), unpack_eight(w), unpacked_factor(w));
  __syncwarp();  // the warp has staged its own chunk

  // Warp 2 i + j: half j of expert i's tile.
  multiply_tiles<1>(b, ring.plus(1 + kUpTiles + warp / kChunks), 0, warp % kChunks, b.row(), warp,
                    s.down_units + warp * kTileRows, 0);
  consumer_barrier();
  release(b, ring.plus(1 + kUpTiles), kDownSlots);
  if (tid == kWorkers - 32) barrier_arrive(&s.shared_empty);
  if (tid < kTileRows) {
    float total = 0, shared = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total = fmaf(s.weights[i / kDownChunks], s.down_units[i * kTileRows + tid], total);
#pragma unroll
    for (int i = 0; i < kDownChunks; ++i) shared += s.shared_down_units[i * kTileRows + tid];
    send_residual(b, s.residual[tid] + fmaf(shared_gate, shared, total) / kHiddenScale, generation);
  }
}

// The producer warp's choice: receives the logits, leaves them in shared memory. Lane i < 8 returns the i-th expert.
__device__ __forceinline__ int receive_choice(const Block& b, uint32_t generation) {
  constexpr int kRounds = kExperts / 64;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t* from = b.program.words->logits;
  TwoWords w[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) w[i] = peek_two(from + (i * 32 + lane) * 2);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    finish_receiving(w[i], from + (i * 32 + lane) * 2, generation);
    *reinterpret_cast<float2*>(b.s.logits + (i * 32 + lane) * 2) =
        make_float2(__uint_as_float(static_cast<uint32_t>(w[i].a)), __uint_as_float(static_cast<uint32_t>(w[i].b)));
  }
  __syncwarp();
  return choose_ids([&](int id) { return b.s.logits[id]; }, kExperts);
}

}  // namespace calla::cuda::token
