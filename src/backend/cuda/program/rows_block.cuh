#pragma once
// What a block of the rows kernel is made of: its shared memory, the ring of weights, the consumer warps' common steps.
//
// Products are m16n8k16 in fp16, a row a column; weights as in gemv.cuh. The rows lie in shared memory as they are, padded
// so that ldmatrix meets different banks. A residual row travels times the next norm's weights (and 1 / kRowScale, so that
// fp16 holds 1e6); its RMSNorm's factor belongs to the whole row and is applied to the outputs.
//
// All consumer warps pass all slots in order, whether they use them or not: a slot is free when all have passed it.
#include "backend/cuda/fixed_row.cuh"
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/program/rows_exchange.cuh"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda::rows {

using namespace program;

inline constexpr int kThreads = kWorkers + 128;  // and a warpgroup of which two warps work: the producer and the storer
// Registers a thread of the consumers and of the others; launched with 96 each.
inline constexpr int kConsumerRegisters = 112, kOtherRegisters = 32;
inline constexpr int kSlots = 8;
// Slots on their way at a time: as many as keep memory busy while the experts' weights come; fewer while the blocks
// exchange activations, which would queue up behind them.
inline constexpr int kInFlight = 2, kInFlightExperts = 4;
inline constexpr int kChunkInputs = kChunkGroups * kGroup;
inline constexpr int kDownItems = kGroups / kDownGroups;  // of a slot
inline constexpr float kRowScale = 16;

// Rows of `inputs` fp16 numbers.
__host__ __device__ constexpr uint32_t row_bytes(int inputs) { return static_cast<uint32_t>(inputs) * 2 + 16; }
inline constexpr uint32_t kXBytes = kMost * row_bytes(kHidden);
// A unit's sums: [row][16 outputs], padded so that a warp's stores meet different banks.
inline constexpr int kUnitStride = 20, kUnitFloats = kMost * kUnitStride;

// What a phase has in shared memory, beside the ring: each phase its own, so a barrier lies between them.
struct GdnArea {
  std::byte x[kXBytes];
  float units[kGdnTiles][kChunks][kUnitFloats];
  float qk[kMost][2 * kGdnHeadDim];
  float4 columns[kWarps][kColumns / 2];  // S^T k, then S^T q, of four columns
  float values[kMost][kColumns], z_gates[kMost][kColumns];
  float decay[kMost], beta[kMost];
};
struct ProjectArea {
  std::byte x[kXBytes];
  float units[token::kMostProjectTiles][kChunks][kUnitFloats];
};
struct OutArea {
  std::byte x[kMost * row_bytes(kMixed)];
  float units[kWarps][kUnitFloats];
};
inline constexpr int kUpBatch = 4;  // tiles whose sums meet at one barrier
struct UpArea {
  union {
    std::byte x[kXBytes];
    std::byte fixed[kMost][FixedRow::bytes(kGroups)];  // the same when the router and the shared expert have used it
  };
  union {
    struct {
      float router[kWarps][4][kMost];  // sums of a warp's inputs: two logits, the shared expert's gate, nothing
      float logits[kMost][token::kExperts + 8];
      float shared_units[kChunks][kUnitFloats];
    };
    float units[2][kUpBatch][kChunks][kMost][kTileRows];
  };
  alignas(16) __half hidden[kWarps][kUpBatch][8];  // a tile's hidden units of one row
  int tiles[2][kUpBatch];

  __device__ __forceinline__ FixedRow row(int i) { return {fixed[i], kGroups}; }
};
// A row of hidden units. When half of them have been used, their product's 16 sums are in their place.
struct HiddenRow {
  union {
    std::byte units[token::kExpertWidth * 2];
    float sums[kDownChunks][kChunkInputs / 2];
  };
  float pad[4];  // so that eight rows start in different banks
};
struct DownArea {
  HiddenRow h[kMost * kChoices];
};
union Area {
  GdnArea gdn;
  ProjectArea project;
  OutArea out;
  UpArea up;
  DownArea down;
};

// The chosen experts as a list of work, each once (expert_items.cuh has the general form).
inline constexpr int kMostItems = kMost * kExpertsPerToken + 1;
struct Items {
  int16_t expert[kMostItems];  // -1: the shared one, the first item
  uint8_t count[kMostItems];   // of the rows that chose it
  uint8_t of[token::kExperts];
  uint8_t entries[kMostItems][kMost];  // row * kChoices + choice
  int total;
};

using RingPlace = Place<kSlots>;

struct BlockMemory {
  alignas(128) Area area;
  uint64_t full[kSlots], empty[kSlots];
  uint64_t listed;          // the experts, for the producer
  uint64_t calm;            // the logits are sent: no large exchange for a while
  uint64_t updated[kMost];  // a row's part of the state, in its slot
  uint64_t stored;          // the storer has passed all rows of a GDN phase
  int state_slot[kMost];    // or -1: it is not written
  alignas(16) float residual[kMost][kTileRows];
  alignas(16) __half outgoing[kMost][kTileRows];
  float norm[kTileRows];  // the next phase's, of the block's part of the residual row
  float squares[kWarps];  // of a residual row, two warps each
  size_t state_at[kMost], log_at[kMost];
  uint32_t rows_of[token::kExperts / 4];  // a byte an expert: bit r: row r chose it
  int16_t ids[kMost][kExpertsPerToken];
  float weights[kMost][kChoices];
  Items items;
  // What goes on from phase to phase, as of a phase's start. In registers it would be put aside.
  uint32_t tags;
  uint32_t first_gdn_tag;  // at the launch's start; the tag of its n-th GDN phase differs from it if n is odd
  RingPlace place;         // of the consumers
  uint32_t first_tile;     // where the phase starts to count its up tiles
  int tile_of[kSlots];     // which up tile a slot has
};
inline constexpr size_t kSharedBytes = size_t{kSlots} * kSlotBytes + sizeof(BlockMemory);
static_assert(kSharedBytes <= 232448, "what a block may take");

struct Block {
  const TokenProgram& program;
  int first_row, rows;  // of the step: the program's
  RowsWords& words;
  std::byte* ring;
  BlockMemory& s;
  int tid, warp, lane;

  __device__ __forceinline__ Block(const TokenProgram& program, int first_row, int rows, RowsWords* words,
                                   std::byte* ring)
      : program(program),
        first_row(first_row),
        rows(rows),
        words(*words),
        ring(ring),
        s(*reinterpret_cast<BlockMemory*>(ring + kSlots * kSlotBytes)),
        tid(static_cast<int>(threadIdx.x)) {
    // Each phase works out its addresses anew: what the compiler keeps from phase to phase does not fit the registers, and
    // what it puts aside is gone from L2 before it is needed again.
    asm volatile("" : "+r"(tid));
    warp = __shfl_sync(0xffffffffu, tid / 32, 0);  // known to be the same in all lanes
    lane = tid % 32;
  }
  // Where row `row` of the program lies in a slot of so many elements a row.
  __device__ __forceinline__ size_t at(int row, int width) const {
    return static_cast<size_t>(first_row + row) * static_cast<size_t>(width);
  }
  __device__ __forceinline__ std::byte* slot(int i) const { return ring + static_cast<uint32_t>(i) * kSlotBytes; }
};

// The barrier of two warps that have a chunk or a row together.
__device__ __forceinline__ void pair_barrier(int warp) {
  asm volatile("bar.sync %0, 64;" ::"r"(warp / 2 + 2) : "memory");
}

__device__ __forceinline__ void wait_full(const Block& b, RingPlace at) { barrier_wait(&b.s.full[at.slot], at.parity); }

// A consumer warp's way past `count` slots; `use(i, slot)`.
template <class Use>
__device__ __forceinline__ void pass_slots(const Block& b, RingPlace& at, int count, const Use& use) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    wait_full(b, at);
    use(i, b.slot(at.slot));
    __syncwarp();
    if (b.lane == 0) barrier_arrive(&b.s.empty[at.slot]);
    at.advance();
  }
}

// ---- products ------------------------------------------------------------------------------------------------------
// Where a lane's row of ldmatrix starts: lanes of the same eight have one step's half, each a row.
__device__ __forceinline__ uint32_t operand_address(const std::byte* row, int lane) {
  return shared_address(row) + static_cast<uint32_t>(lane / 8) * 16;
}
// A group's columns as B operands: registers 2 j and 2 j + 1 of step j.
__device__ __forceinline__ void load_group(uint32_t (&b)[8], uint32_t address, int group) {
  uint32_t low[4], high[4];
  ldmatrix_x4(low, address + static_cast<uint32_t>(group) * (kGroup * 2));
  ldmatrix_x4(high, address + static_cast<uint32_t>(group) * (kGroup * 2) + 64);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = low[i], b[4 + i] = high[i];
}
// Sums of a group's inputs, of columns 2 q and 2 q + 1.
__device__ __forceinline__ float2 sum_group(const uint32_t (&b)[8]) {
  const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
  float c[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_f16(c, ones, b[2 * j], b[2 * j + 1]);
  return make_float2(c[0], c[1]);
}
// acc += a group of a tile times its columns, in the layout of the C operand. `low` and `high`: scale and bias of the
// lane's fragment rows r and r + 8.
template <int kBits>
__device__ __forceinline__ void add_group(float (&acc)[4], const uint4 (&codes)[kBits / 4], uint2 scale,
                                          const uint32_t (&b)[8], float2 sum) {
  constexpr float kHighFactor = kBits == 4 ? 0.0625f : 1.0f;
  float c[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t a[4];
    if constexpr (kBits == 4) {
      expand_step(j == 0 ? codes[0].x : j == 1 ? codes[0].y : j == 2 ? codes[0].z : codes[0].w, a);
    } else {
      const uint4 v = codes[j / 2];
      j % 2 == 0 ? expand_step(v.x, v.y, a) : expand_step(v.z, v.w, a);
    }
    mma_f16(c, a, b[2 * j], b[2 * j + 1]);
  }
  const float low = low_bf16(scale.x), low_bias = fmaf(-1024.0f, low, high_bf16(scale.x));
  const float high = kHighFactor * low_bf16(scale.y), high_bias = fmaf(-1024.0f, high, high_bf16(scale.y));
  acc[0] = fmaf(low, c[0], fmaf(low_bias, sum.x, acc[0]));
  acc[1] = fmaf(low, c[1], fmaf(low_bias, sum.y, acc[1]));
  acc[2] = fmaf(high, c[2], fmaf(high_bias, sum.x, acc[2]));
  acc[3] = fmaf(high, c[3], fmaf(high_bias, sum.y, acc[3]));
}
__device__ __forceinline__ uint4 codes_of(const std::byte* codes, int group, int lane) {
  return reinterpret_cast<const uint4*>(codes)[group * 32 + lane];
}
__device__ __forceinline__ uint2 scale_of(const std::byte* scales, int group, int r) {
  return reinterpret_cast<const uint2*>(scales)[group * 8 + r];
}

// A warp's chunk of eight rows.
struct ChunkColumns {
  uint32_t b[kChunkGroups][8];
  float2 sum[kChunkGroups];

  // `row` is that of column lane % 8.
  __device__ __forceinline__ void load(const std::byte* row, int chunk, int lane) {
    const uint32_t address = operand_address(row, lane);
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      load_group(b[g], address, chunk * kChunkGroups + g);
      sum[g] = sum_group(b[g]);
    }
  }
};
// Chunk `chunk` of the tile in a slot times the columns; the unit's sums go to `to`.
__device__ __forceinline__ void multiply_unit(float* to, const std::byte* slot, int chunk, const ChunkColumns& x,
                                              int lane) {
  float acc[4] = {};
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const uint4 codes[1] = {codes_of(slot, chunk * kChunkGroups + g, lane)};
    add_group<4>(acc, codes, scale_of(slot + kSlotCodes, chunk * kChunkGroups + g, lane / 4), x.b[g], x.sum[g]);
  }
  const int r = lane / 4, q = lane % 4;
  float* pair = to + 2 * q * kUnitStride + 2 * r;
  *reinterpret_cast<float2*>(pair) = make_float2(acc[0], acc[2]);
  *reinterpret_cast<float2*>(pair + kUnitStride) = make_float2(acc[1], acc[3]);
}
template <int kCount>
__device__ __forceinline__ float sum_units(const float (*units)[kUnitFloats], int row, int output) {
  float total = 0;
#pragma unroll
  for (int c = 0; c < kCount; ++c) total += units[c][row * kUnitStride + output];
  return total;
}

// A load that the compiler does not put off until its value is used.
__device__ __forceinline__ float load_early(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_early(const float4* from) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// ---- the residual rows ---------------------------------------------------------------------------------------------
// Stages the residual rows in `x`: warps 2 c and 2 c + 1 chunk c; and adds up their squares (s.squares, after a barrier).
__device__ __forceinline__ void stage_residual(const Block& b, std::byte* x, uint32_t tag) {
  const int warp = b.warp, lane = b.lane, piece = warp / 2 * 32 + lane;
  constexpr int kRounds = kMost / 2;
  WideWord w[kRounds];
  float v[2];
  const uint32_t* from = &b.words.squares[warp / 2 < b.rows ? warp / 2 : 0][warp % 2 * 64 + lane];
  receive<2 * (kHidden / 8)>(
      w, &b.words.residual[warp % 2][piece], (b.rows + 1 - warp % 2) / 2, v, [&](int i) { return from + i * 32; }, tag);
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    *reinterpret_cast<uint4*>(x + static_cast<uint32_t>(i * 2 + warp % 2) * row_bytes(kHidden) + piece * 16) =
        make_uint4(w[i].part[0], w[i].part[1], w[i].part[2], w[i].part[3]);
  const float total = sum_lanes(v[0] + v[1]);
  if (lane == 0) b.s.squares[warp] = total;
}
// What the outputs of a row's product are to be multiplied by.
__device__ __forceinline__ float row_factor(const Block& b, int row) {
  return kRowScale * rsqrtf((b.s.squares[2 * row] + b.s.squares[2 * row + 1]) / kHidden + b.program.eps);
}

// Warps 0..3 have a block's part of the residual rows: a thread an output.
struct ResidualPlace {
  int row, output;
  __device__ __forceinline__ explicit ResidualPlace(int tid) : row(tid / kTileRows), output(tid % kTileRows) {}
  __device__ __forceinline__ int column() const { return static_cast<int>(blockIdx.x) * kTileRows + output; }
};
// The new value of a residual element, to its slot, and to all blocks unless no phase follows (s.norm: its norm).
__device__ __forceinline__ void send_residual(const Block& b, const ResidualPlace& at, float value, bool last,
                                              uint32_t tag) {
  const int lane = b.lane, block = static_cast<int>(blockIdx.x);
  b.s.residual[at.row][at.output] = value;
  if (at.row < b.rows) b.program.a.residual[b.at(at.row, kHidden) + at.column()] = value;
  if (last) return;
  b.s.outgoing[at.row][at.output] = __float2half_rn(value * b.s.norm[at.output] * (1 / kRowScale));
  const float squares = sum_lanes<16>(value * value);
  __syncwarp();
  const int row = at.row / 2 * 2 + lane / 2;  // of lanes 0..3
  if (lane < 4 && row < b.rows)
    send_tagged(&b.words.residual[row][block * 2 + lane % 2],
                reinterpret_cast<const uint4*>(b.s.outgoing[row])[lane % 2], tag);
  if (lane % 16 == 0 && at.row < b.rows) send_tagged(&b.words.squares[at.row][block], squares, tag);
}

}  // namespace calla::cuda::rows
