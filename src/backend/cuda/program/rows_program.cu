// rows_program: a run of stages of two to eight rows, one of each sequence, as one kernel that stays on the card: the
// phases of the token program (token_program.h), each expert's weights read once for the rows that chose it.
//   Launch    128 blocks of 16 consumer warps, a producer and a storer warp, one a multiprocessor; all run at once,
//             because they wait for each other (the host asks how many fit).
//   Weights   and the GDN states come through a ring in shared memory (rows_block.cuh), ahead of their phase.
//   Exchange  through L2 in words that tell themselves whether they have arrived (rows_exchange.cuh): six times a layer.
//             Before a word is written again, its sender has received something from every block that was sent after
//             that block had read the old contents; and every reader reads each of its words in every turn. So one bit
//             is enough to tell.
//   Shared    8 slots of 18 KiB, 80 KiB besides.
//   Moves     the phases' weights once, the chosen experts' once, the shared expert's gate and up twice, the GDN states
//             in, and out with every fourth token (state_log.h); 29 KB of words a row, layer and block, from L2.
//   Numerics  products in fp16 with fp32 sums, those of the up projections of the row as 16-bit fixed point, the rest in
//             fp32; sums in a fixed order. A row's place does not matter; of the other rows only how many chose the same
//             expert does, by which way its down projection's fp32 sums are added up; and of the tokens in front, how many
//             are in the state's log, by which way the state's fp32 sums are.
#include "backend/cuda/program/rows_experts.cuh"
#include "backend/cuda/program/rows_gdn.cuh"
#include "backend/cuda/program/rows_linear.cuh"

namespace calla::cuda {
namespace rows {
namespace {

// The producer warp.
class Producer {
 public:
  __device__ Producer(const Block& b) : b_(b), lane_(b.lane) {
    if (lane_ < b.rows) {
      const StepSequence& sequence = b.program.sequence[b.first_row + lane_];
      state_at_ = static_cast<size_t>(sequence.slot) * b.program.slot_floats;
      log_at_ = static_cast<size_t>(sequence.log) * b.program.log_parts + blockIdx.x;
    }
  }

  __device__ void run(int index) {
    const TokenPhase& p = b_.program.phases[index];
    const int block = static_cast<int>(blockIdx.x);
    switch (p.kind) {
      case TokenPhaseKind::kGdn: {
        const GdnPart at;
#pragma unroll 1
        for (int i = 0; i < kGdnTiles; ++i)
          tile(p.weights, at.first_column(i / 2, b_.program.z_column) / kTileRows + i % 2);
#pragma unroll 1
        for (int row = 0; row < b_.rows; ++row)
          state(p.state + __shfl_sync(0xffffffffu, state_at_, row) + at.state(),
                p.log + __shfl_sync(0xffffffffu, log_at_, row));
        return;
      }
      case TokenPhaseKind::kProject: {
        const TileShare share(p.tiles);
#pragma unroll 1
        for (int i = 0; i < share.count; ++i) tile(p.weights, share.first + i);
        return;
      }
      case TokenPhaseKind::kOut:
#pragma unroll 1
        for (int i = 0; i < kOutSlots; ++i) tile(p.weights, block * kOutSlots + i);
        return;
      case TokenPhaseKind::kExperts:
        return experts(p);
    }
  }

 private:
  // The next slot, free to be filled.
  __device__ __forceinline__ RingPlace take() {
    const RingPlace at = at_;
    if (filled_ >= kSlots) barrier_wait(&b_.s.empty[at.slot], at.parity ^ 1);
#pragma unroll 1
    for (; filled_ - landed_count_ >= in_flight_; ++landed_count_) {
      wait_full(b_, landed_);
      landed_.advance();
    }
    ++filled_;
    at_.advance();
    return at;
  }
  // A tile of 32 groups, counted in such tiles; `mark` is left for the consumers.
  __device__ __forceinline__ void tile(const TokenMatrix& w, int index, int mark = kNoTile) {
    const RingPlace at = take();
    if (lane_ == 0) {
      b_.s.tile_of[at.slot] = mark;
      uint64_t* full = &b_.s.full[at.slot];
      std::byte* to = b_.slot(at.slot);
      const size_t group = static_cast<size_t>(index) * kGroups;
      barrier_expect(full, kSlotBytes);
      bulk_copy_part(to, w.codes + group * 32, kSlotCodes, full, read_once_);
      bulk_copy_part(to + kSlotCodes, w.scales + group * 8, kSlotScales, full, read_once_);
    }
    __syncwarp();
  }
  // The block's part of a row's state, and its log.
  __device__ __forceinline__ void state(const float* from, const StateLog* log) {
    const RingPlace at = take();
    if (lane_ == 0) {
      const bool logs = b_.program.keeps_logs;
      uint64_t* full = &b_.s.full[at.slot];
      barrier_expect(full, kStateBytes + (logs ? static_cast<uint32_t>(sizeof(StateLog)) : 0));
      bulk_copy_part(b_.slot(at.slot), from, kStateBytes, full, read_once_);
      if (logs)
        bulk_copy_part(b_.slot(at.slot) + kStateBytes, log, static_cast<uint32_t>(sizeof(StateLog)), full, read_once_);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void up_tiles(const TokenPhase& p, const Items& items) {
    const UpTiles tiles(items.total);
    const uint32_t first = b_.s.first_tile;
    uint32_t counted = 0;
    const auto ask = [&] {
      if (lane_ == 0) counted = atomicAdd(&b_.words.next_tile, 1u);
    };
    const auto fill = [&](int index) {
      tile(p.weights, items.expert[1 + index / kUpTiles] * kUpTiles + index % kUpTiles, index);
    };
    ask();
#pragma unroll 1
    for (int index = static_cast<int>(blockIdx.x); index < min(tiles.total, UpTiles::kGiven * kBlocks);
         index += kBlocks)
      fill(index);
#pragma unroll 1
    while (true) {
      const auto place = static_cast<int>(__shfl_sync(0xffffffffu, counted, 0) - first);
      if (place >= tiles.shared_out) break;
      ask();
      fill(UpTiles::kGiven * kBlocks + place);
    }
    const RingPlace at = take();
    if (lane_ == 0) {
      b_.s.tile_of[at.slot] = kNoTile;
      barrier_arrive(&b_.s.full[at.slot]);
    }
    __syncwarp();
  }
  __device__ void experts(const TokenPhase& p) {
    const int block = static_cast<int>(blockIdx.x);
    tile(p.shared_up, shared_up_tile());
    barrier_wait(&b_.s.listed, listed_parity_);
    listed_parity_ ^= 1;
    const Items& items = b_.s.items;
    in_flight_ = kInFlightExperts;
    up_tiles(p, items);
    const int total = items.total;
#pragma unroll 1
    for (int first = 0; first < total; first += kDownItems) {
      const RingPlace at = take();
      uint64_t* full = &b_.s.full[at.slot];
      std::byte* to = b_.slot(at.slot);
      const int count = min(kDownItems, total - first);
      if (lane_ == 0) barrier_expect(full, static_cast<uint32_t>(count) * kDownGroups * (kGroupCodes + kGroupScales));
      __syncwarp();
      if (lane_ < count) {
        const int expert = items.expert[first + lane_];
        const TokenMatrix& w = expert < 0 ? p.shared_down : p.down;
        const size_t group = (static_cast<size_t>(max(expert, 0)) * kBlocks + static_cast<size_t>(block)) * kDownGroups;
        bulk_copy_part(to + static_cast<uint32_t>(lane_) * (kDownGroups * kGroupCodes), w.codes + group * 32,
                       kDownGroups * kGroupCodes, full, read_once_);
        bulk_copy_part(to + kSlotCodes + static_cast<uint32_t>(lane_) * (kDownGroups * kGroupScales),
                       w.scales + group * 8, kDownGroups * kGroupScales, full, read_once_);
      }
      __syncwarp();
    }
    in_flight_ = kInFlight;
  }

  const Block& b_;
  int lane_;
  size_t state_at_ = 0, log_at_ = 0;  // of row `lane`
  int filled_ = 0, landed_count_ = 0, in_flight_ = kInFlight;
  uint32_t listed_parity_ = 0;
  // Weights stream past L2, which keeps what is read again: the words, the code, and new states until it is their time to
  // be written to memory.
  uint64_t read_once_ = read_once_policy();
  RingPlace at_;
  RingPlace landed_;  // the oldest slot that may still be on its way
};

// The storer, one thread: sends the rows' states back, if they are written, from their slots, which it passes for the two
// warps that have used them. All blocks' states would hold up the two exchanges that follow, so only those go at once whose
// slots are needed for the next weights; the others wait until the experts are being chosen.
__device__ __forceinline__ void store_states(const TokenProgram& program, int rows, std::byte* ring, BlockMemory& s) {
  // Slots that are needed until then: of the output projection and of the shared expert.
  constexpr int kNeeded = kOutSlots + 1;
  const int at_once = max(0, rows + kNeeded - kSlots);
  uint32_t gdn_phases = 0, expert_phases = 0;
#pragma unroll 1
  for (int i = 0; i < program.count; ++i) {
    const TokenPhase& p = program.phases[i];
    expert_phases += p.kind == TokenPhaseKind::kExperts;
    if (p.kind != TokenPhaseKind::kGdn) continue;
    const bool experts_follow = i + 2 < program.count;
    const size_t part = GdnPart().state();
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      barrier_wait(&s.updated[row], gdn_phases & 1);
      const int slot = s.state_slot[row];
      if (slot < 0) continue;
      if (row >= at_once && experts_follow) barrier_wait(&s.calm, expert_phases & 1);
      bulk_store(p.state + s.state_at[row] + part, ring + static_cast<uint32_t>(slot) * kSlotBytes, kStateBytes);
      bulk_store_wait_read();
      barrier_arrive(&s.empty[slot]);
      barrier_arrive(&s.empty[slot]);
    }
    barrier_arrive(&s.stored);
    ++gdn_phases;
  }
  bulk_store_wait();
}

// Leaves the norm of phase `index` for whoever sends it the residual row, in shared memory: a register would be put aside
// for most of a phase. A barrier must lie between this and the sending, and between that and the next norm.
__device__ __forceinline__ void bring_norm(const Block& b, int index) {
  if (index < b.program.count && b.tid < kTileRows && b.program.phases[index].norm != nullptr)
    b.s.norm[b.tid] = b.program.phases[index].norm[static_cast<int>(blockIdx.x) * kTileRows + b.tid];
}

// The block's part of the residual rows from their slots; to all blocks, if the first phase receives it. (kOut reads
// `mixed` from its slot by itself.)
__device__ __forceinline__ void begin(const Block& b, RowsTags& tags) {
  const bool silent = b.program.phases[0].kind == TokenPhaseKind::kOut;
  if (!silent) tags.turn(WordKind::kResidual);
  if (b.warp >= kMost * kTileRows / 32) return;
  const ResidualPlace at(b.tid);
  const float v = at.row < b.rows ? __ldcg(b.program.a.residual + b.at(at.row, kHidden) + at.column()) : 0.0f;
  send_residual(b, at, v, silent, tags.of(WordKind::kResidual));
}

__global__ void __launch_bounds__(kThreads, 1)
    rows_program_kernel(const __grid_constant__ TokenProgram program, int first_row, int rows, RowsWords* words) {
  extern __shared__ __align__(128) std::byte ring[];
  BlockMemory& s = *reinterpret_cast<BlockMemory*>(ring + kSlots * kSlotBytes);
  launch_dependents();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kWarps);
    }
    barrier_init(&s.listed, 1);
    barrier_init(&s.calm, 1);
    barrier_init(&s.stored, 1);
#pragma unroll 1
    for (uint64_t& updated : s.updated) barrier_init(&updated, 2);
    fence_async_proxy();
  }
  if (static_cast<int>(threadIdx.x) < rows) {
    const StepSequence& sequence = program.sequence[first_row + static_cast<int>(threadIdx.x)];
    s.state_at[threadIdx.x] = static_cast<size_t>(sequence.slot) * program.slot_floats;
    s.log_at[threadIdx.x] = static_cast<size_t>(sequence.log) * program.log_parts;
  }
  __syncthreads();
  if (threadIdx.x >= kWorkers) {
    give_registers<kOtherRegisters>();
    if (threadIdx.x == kWorkers + 32) store_states(program, rows, ring, s);
    if (threadIdx.x >= kWorkers + 32) return;
    // Weights, states and logs depend on nothing, up to the choice of experts, which the consumers announce.
    const Block b(program, first_row, rows, words, ring);
    Producer producer(b);
#pragma unroll 1
    for (int i = 0; i < program.count; ++i) producer.run(i);
    return;
  }

  take_registers<kConsumerRegisters>();
  grid_dependency_wait();
  if (threadIdx.x == 0) s.first_tile = __ldcg(&words->first_tile);
  {
    RowsTags tags(__ldcg(&words->tags));
    if (threadIdx.x == 0) s.first_gdn_tag = tags.of(WordKind::kGdn);
    const Block b(program, first_row, rows, words, ring);
    bring_norm(b, 0);
    consumer_barrier();
    begin(b, tags);
    if (b.tid == 0) s.tags = tags.bits(), s.place = RingPlace();
    consumer_barrier();  // the next norm takes this one's place
  }
#pragma unroll 1
  for (int i = 0; i < program.count; ++i) {
    RowsTags tags(s.tags);
    RingPlace at = s.place;
    const Block b(program, first_row, rows, words, ring);
    const TokenPhase& p = program.phases[i];
    const bool last = i + 1 == program.count;
    bring_norm(b, i + 1);
    switch (p.kind) {
      case TokenPhaseKind::kGdn:
        gdn_phase(b, p, at, last, tags);
        break;
      case TokenPhaseKind::kProject:
        project_phase(b, p, at, tags);
        break;
      case TokenPhaseKind::kOut:
        out_phase(b, at, i == 0, last, tags);
        break;
      case TokenPhaseKind::kExperts:
        experts_phase(b, p, at, last, tags);
        break;
    }
    if (b.tid == 0) s.tags = tags.bits(), s.place = at;
    consumer_barrier();  // the next phase uses the same memory
  }
  // Every block has sent something of this launch, so it has read them.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    words->tags = s.tags;
    words->first_tile = s.first_tile;
  }
}

}  // namespace
}  // namespace rows

bool rows_program_runs(const DeviceInfo& device) {
  return device.is_hopper() &&
         runs_at_once(device, rows::rows_program_kernel, token::kBlocks, rows::kThreads, rows::kSharedBytes);
}

void run_rows_program(const Launch& launch, const TokenProgram& program, int first_row, int rows, RowsWords* words) {
  check(program.count > 0 && program.count <= kMostTokenPhases, "a program of a fitting length");
  check(rows >= 2 && rows <= rows::kMost, "rows of a program");
  launch_kernel(launch, rows::rows_program_kernel, dim3(token::kBlocks), rows::kThreads, rows::kSharedBytes, 1, program,
                first_row, rows, words);
}

}  // namespace calla::cuda
