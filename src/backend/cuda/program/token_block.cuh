#pragma once
// What a block of the token kernel is made of: its shared memory, the ring of weights, the consumer warps' common steps.
//
// Weights come through a ring of slots, each a tile of 16 outputs and 2048 inputs (or as many bytes of something else), in
// the order of the phases. The producer warp fills a slot as soon as it is free, however many phases ahead: only the
// chosen experts' weights have to wait for something.
#include "backend/cuda/program/token_exchange.cuh"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda::token {

using namespace program;

inline constexpr int kThreads = kWorkers + 32;  // and the producer warp
inline constexpr int kSlots = 11;
// Slots on their way at a time: enough to keep memory busy. With more, what the blocks tell each other queues up behind
// weights that nobody needs yet.
inline constexpr int kInFlight = 2;
inline constexpr uint32_t kUnitCodes = kChunkGroups * kGroupCodes, kUnitScales = kChunkGroups * kGroupScales;
inline constexpr int kUpTiles = 4, kDownSlots = 2;  // of a block

struct BlockMemory {
  alignas(16) std::byte shared_down[kDownGroups * (kGroupCodes + kGroupScales)];
  alignas(16) std::byte row[FixedRow::bytes(kUnits / kGroup)];
  alignas(16) std::byte shared_row[FixedRow::bytes(kDownGroups)];  // the shared expert's hidden units
  alignas(16) float units[kGdnTiles * kChunks * kTileRows];        // the units' sums
  // Of the down projections: apart, since warps that have what they need write them while warp 0 still reads the others.
  alignas(16) float down_units[kWarps * kTileRows];
  uint64_t full[kSlots], empty[kSlots];
  uint64_t shared_full, shared_empty;
  alignas(16) float residual[kTileRows];  // the block's part of the row; warp 0 alone
  alignas(16) float outgoing[32];         // what warp 0 sends
  float squares[kWarps];
  float4 parts[kWarps];  // of a warp's inputs: squares, two logits, the shared expert's gate
  // GDN
  alignas(16) float qk[2 * kGdnHeadDim];
  float key_sums[3];                                     // k.k, q.q, k.q
  alignas(16) float4 column_sums[kWarps][kColumns / 2];  // S^T k and S^T q of two columns
  float values[kColumns], z_gates[kColumns];
  alignas(16) float changes[kColumns];
  float decay, beta;
  // Experts
  float logits[kExperts];
  float weights[kExpertsPerToken];
  float shared_units[kChunks * kTileRows], shared_down_units[kDownChunks * kTileRows];  // units' sums
};
inline constexpr size_t kSharedBytes = size_t{kSlots} * kSlotBytes + sizeof(BlockMemory);
static_assert(kSharedBytes <= 232448, "what a block may take");

using RingPlace = Place<kSlots>;

struct Block {
  const TokenProgram& program;
  std::byte* ring;
  BlockMemory& s;
  size_t state_at;  // of the sequence, in a layer's states

  __device__ __forceinline__ std::byte* slot(int i) const { return ring + static_cast<uint32_t>(i) * kSlotBytes; }
  __device__ __forceinline__ FixedRow row() const { return {s.row, kUnits / kGroup}; }
};

// Two neighbouring warps stage a chunk of a row of 2048 inputs, a warp one of 4096: who multiplies a chunk waits for no more.
__device__ __forceinline__ void chunk_barrier(int chunk) {
  asm volatile("bar.sync %0, 64;" ::"r"(chunk + 4) : "memory");
}

// After the barrier behind the last use of `count` slots; one thread does it, of the last warp, which has no other work.
__device__ __forceinline__ void release(const Block& b, RingPlace at, int count) {
  if (threadIdx.x != kWorkers - 32) return;
  for (int i = 0; i < count; ++i) barrier_arrive(&b.s.empty[at.plus(i).slot]);
}

__device__ __forceinline__ void wait_full(const Block& b, RingPlace at) { barrier_wait(&b.s.full[at.slot], at.parity); }

__device__ __forceinline__ void load_unit(FixedUnit& unit, const std::byte* slot, int i) {
  unit.load(slot + static_cast<uint32_t>(i) * kUnitCodes, slot + kSlotCodes + static_cast<uint32_t>(i) * kUnitScales);
}
__device__ __forceinline__ float2 multiply(const FixedUnit& unit, const FixedChunk& input) {
  return scale_fixed(multiply_fixed(unit, input), unit.scale, input);
}
// `kCount` units of a warp, `step` slots apart, times its chunk of the row.
template <int kCount>
__device__ __forceinline__ void multiply_tiles(const Block& b, RingPlace at, int step, int unit, const FixedRow& row,
                                               int chunk, float* sums, int sums_step) {
  const FixedChunk input(row, chunk);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    wait_full(b, at);
    FixedUnit w;
    load_unit(w, b.slot(at.slot), unit);
    store_fixed_unit(sums + i * sums_step, multiply(w, input));
    at = at.plus(step);
  }
}

__device__ __forceinline__ FixedInputs load_norm(const float* norm) {
  const int k = fixed_input();
  return {*reinterpret_cast<const float2*>(norm + k), *reinterpret_cast<const float2*>(norm + k + 8)};
}
__device__ __forceinline__ FixedInputs scaled(const FixedInputs& v, float factor) {
  return {make_float2(v.low.x * factor, v.low.y * factor), make_float2(v.high.x * factor, v.high.y * factor)};
}
__device__ __forceinline__ FixedInputs product(const FixedInputs& a, const FixedInputs& b) {
  return {make_float2(a.low.x * b.low.x, a.low.y * b.low.y), make_float2(a.high.x * b.high.x, a.high.y * b.high.y)};
}

// The residual row times the norm's weights as the next product's input; its squares. Needs a barrier.
__device__ __forceinline__ void stage_residual(const Block& b, const FixedInputs& norm, uint32_t generation) {
  const FixedInputs v = receive_residual(*b.program.words, generation);
  store_four(b.row(), static_cast<int>(threadIdx.x), product(v, norm));
  const float squares = sum_lanes(v.squares());
  if (threadIdx.x % 32 == 0) b.s.squares[threadIdx.x / 32] = squares;
}

// The block's part of the residual row after a phase, of lanes 0..15 of warp 0, to its slot and to all blocks.
__device__ __forceinline__ void send_residual(const Block& b, float value, uint32_t generation) {
  const int lane = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  b.s.residual[lane] = value;
  __syncwarp(0xffffu);
  if (lane < 4) {
    const auto* pairs = reinterpret_cast<const float2*>(b.s.residual);
    send(b.program.words->residual + block * 4 + lane, pack_residual({pairs[lane], pairs[lane + 4]}, generation));
  }
  b.program.a.residual[block * kTileRows + lane] = value;
}
// Thirty-two numbers of a row, a lane of warp 0 each, to all blocks.
__device__ __forceinline__ void send_eights(const Block& b, WideWord* to, float value, uint32_t generation) {
  const int lane = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  b.s.outgoing[lane] = value;
  __syncwarp();
  if (lane < 4) {
    const auto* pairs = reinterpret_cast<const float2*>(b.s.outgoing);
    const EightInputs v{{{pairs[lane], pairs[lane + 4]}, {pairs[lane + 8], pairs[lane + 12]}}};
    send(to + block * 4 + lane, pack_eight(v, generation));
  }
}

}  // namespace calla::cuda::token
