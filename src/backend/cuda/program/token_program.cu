// token_program: a run of stages of one row as one kernel that stays on the card: GDN layers, output projections, experts,
// an attention layer's input projections, in the order of the program.
//   Launch    128 blocks of 16 consumer warps and a producer warp, one a multiprocessor; all run at once, because they wait
//             for each other (the host asks how many fit).
//   Weights   come through a ring in shared memory (token_block.cuh), ahead of their phase: while the blocks exchange
//             activations, which takes longer than the products, memory works on. A chain of kernels cannot do that: its
//             next kernel's blocks have no place before this one's leave.
//   Exchange  what every block needs of all others goes through L2 in words that tell themselves whether they have arrived
//             (token_exchange.cuh): six times a layer. Every exchange is with all blocks but that of q and k, so when a
//             block writes a word anew, everyone has read the one before.
//   Shared    11 slots of 18 KiB, 26 KiB besides.
//   Moves     the phases' weights once (the shared expert's gate and up twice), the GDN states in and out; 39 KB of words a
//             layer and block, from L2.
//   Numerics  products of the row as 16-bit fixed point (fixed_row.cuh), the rest in fp32; sums in a fixed order.
#include "backend/cuda/program/token_experts.cuh"
#include "backend/cuda/program/token_gdn.cuh"
#include "backend/cuda/program/token_linear.cuh"

namespace calla::cuda {
namespace token {
namespace {

__device__ __forceinline__ int slots_of(const TokenPhase& p) {
  switch (p.kind) {
    case TokenPhaseKind::kGdn:
      return kGdnTiles;
    case TokenPhaseKind::kProject:
      return TileShare(p.tiles).count;
    case TokenPhaseKind::kOut:
      return kOutSlots;
    case TokenPhaseKind::kExperts:
      return 1 + kUpTiles + kDownSlots;
  }
  return 0;
}

// The producer warp.
class Producer {
 public:
  __device__ Producer(const Block& b) : b_(b), lane_(static_cast<int>(threadIdx.x % 32)) {}

  __device__ void run(const TokenPhase& p, int expert_phase, uint32_t generation) {
    prefetch(p);
    const int block = static_cast<int>(blockIdx.x);
    switch (p.kind) {
      case TokenPhaseKind::kGdn: {
        const GdnPlace at;
#pragma unroll 1
        for (int i = 0; i < kGdnTiles; ++i)
          tile(p.weights, at.first_column(i / 2, b_.program.z_column) / kTileRows + i % 2);
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
        return experts(p, expert_phase, generation);
    }
  }

 private:
  // Brings what the consumers will load into registers into L2, before it is their turn.
  __device__ void prefetch(const TokenPhase& p) const {
    const int block = static_cast<int>(blockIdx.x);
    constexpr int kNormLines = kHidden * 4 / 128;
    if (lane_ == 0) line(reinterpret_cast<const std::byte*>(p.norm) + block % kNormLines * 128);
    if (p.kind == TokenPhaseKind::kGdn) {
      const GdnPlace at;
      if (lane_ < 8) {
        const int column = at.first_column(lane_ / 4, b_.program.z_column) + lane_ % 4 * 8;
        line(p.conv + column * 4);
      } else if (lane_ == 8) {
        line(p.gdn_norm + at.part * kColumns);
      }
      if (lane_ % 4 == 0) {
        const size_t pair = GateWeights::pair(b_.program, at);
        line(p.weights.codes + pair * 32 + at.key_head % 8 * 4);
        line(p.weights.scales + pair * 8);
      }
    } else if (p.kind == TokenPhaseKind::kExperts) {
#pragma unroll 1
      for (int i = lane_; i < kGroups * 2; i += 32) {
        line(reinterpret_cast<const uint2*>(p.router.codes) +
             RouterWeights::code_place(block / 8, block % 8, i / 2, i % 2 * 2, 0));
        if (block % 8 == i % 8)
          line(reinterpret_cast<const uint2*>(p.router.codes) +
               RouterWeights::code_place(kSharedGateTile, 0, i / 2, i % 2 * 2, 0));
      }
      line(p.router.scales + (block / 8 * kGroups + lane_) * 8 + block % 8);
    }
  }
  __device__ static void line(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

  // The next slot, free to be filled.
  __device__ RingPlace take() {
    const RingPlace at = at_;
    if (filled_ >= kSlots) barrier_wait(&b_.s.empty[at.slot], at.parity ^ 1);
    if (filled_ >= kInFlight) {
      wait_full(b_, landed_);
      landed_ = landed_.plus(1);
    }
    ++filled_;
    at_ = at_.plus(1);
    return at;
  }
  // A tile of 32 groups, counted in such tiles.
  __device__ __forceinline__ void tile(const TokenMatrix& w, int index) {
    const RingPlace at = take();
    if (lane_ == 0) {
      uint64_t* full = &b_.s.full[at.slot];
      std::byte* to = b_.slot(at.slot);
      const size_t group = static_cast<size_t>(index) * kGroups;
      barrier_expect(full, kSlotBytes);
      bulk_copy_part(to, w.codes + group * 32, kSlotCodes, full, read_once_);
      bulk_copy_part(to + kSlotCodes, w.scales + group * 8, kSlotScales, full, read_once_);
    }
    __syncwarp();
  }
  __device__ void experts(const TokenPhase& p, int expert_phase, uint32_t generation) {
    const int block = static_cast<int>(blockIdx.x);
    BlockMemory& s = b_.s;
    tile(p.shared_up, block / 2);
    if (expert_phase > 0) barrier_wait(&s.shared_empty, static_cast<uint32_t>(expert_phase - 1) & 1);
    if (lane_ == 0) {
      const size_t group = static_cast<size_t>(block) * kDownGroups;
      barrier_expect(&s.shared_full, sizeof s.shared_down);
      bulk_copy_part(s.shared_down, p.shared_down.codes + group * 32, kDownGroups * kGroupCodes, &s.shared_full,
                     read_once_);
      bulk_copy_part(s.shared_down + kDownGroups * kGroupCodes, p.shared_down.scales + group * 8,
                     kDownGroups * kGroupScales, &s.shared_full, read_once_);
    }
    __syncwarp();

    const int mine = receive_choice(b_, generation);
    const int up_id = __shfl_sync(0xffffffffu, mine, block / kBlocksPerExpert);
#pragma unroll 1
    for (int i = 0; i < kUpTiles; ++i) tile(p.weights, up_id * kExpertTiles + block % kBlocksPerExpert * kUpTiles + i);
    const float weight = expert_weight(lane_ < kExpertsPerToken ? s.logits[mine] : -INFINITY);
    if (lane_ < kExpertsPerToken) s.weights[lane_] = weight;  // before the arrivals on `full`
    constexpr int kPart = kExpertsPerToken / kDownSlots;
#pragma unroll 1
    for (int i = 0; i < kDownSlots; ++i) {
      const RingPlace at = take();
      uint64_t* full = &s.full[at.slot];
      std::byte* to = b_.slot(at.slot);
      __syncwarp();
      if (lane_ == 0) barrier_expect(full, kSlotBytes);
      __syncwarp();
      const int id = __shfl_sync(0xffffffffu, mine, i * kPart + lane_ % kPart);
      if (lane_ < kPart) {
        const size_t group = (static_cast<size_t>(id) * kBlocks + static_cast<size_t>(block)) * kDownGroups;
        bulk_copy_part(to + static_cast<uint32_t>(lane_) * (kDownGroups * kGroupCodes), p.down.codes + group * 32,
                       kDownGroups * kGroupCodes, full, read_once_);
        bulk_copy_part(to + kSlotCodes + static_cast<uint32_t>(lane_) * (kDownGroups * kGroupScales),
                       p.down.scales + group * 8, kDownGroups * kGroupScales, full, read_once_);
      }
      __syncwarp();
    }
    if (block == 0 && lane_ < kExpertsPerToken) {
      b_.program.a.expert_ids[lane_] = mine;
      b_.program.a.expert_weights[lane_] = weight;
    }
  }

  const Block& b_;
  int lane_;
  int filled_ = 0;
  uint64_t read_once_ = read_once_policy();  // weights stream past L2
  RingPlace at_;
  RingPlace landed_;  // the oldest slot that may still be on its way
};

// What the first phase receives as the others do: the block's part of the rows that lie in their slots.
__device__ __forceinline__ void send_slots(const Block& b, uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (tid < kTileRows) send_residual(b, __ldcg(b.program.a.residual + block * kTileRows + tid), generation);
  if (b.program.phases[0].kind != TokenPhaseKind::kOut || tid >= 32) return;
  __syncwarp();
  const auto* mixed = reinterpret_cast<const unsigned short*>(b.program.a.mixed) + block * kColumns;
  send_eights(b, b.program.words->mixed, __half2float(__ushort_as_half(__ldcg(mixed + tid))), generation);
  if (tid == 0) send(&b.program.words->squares[block], pack_word(__float_as_uint(-1.0f), generation));
}

__global__ void __launch_bounds__(kThreads, 1) token_program_kernel(const __grid_constant__ TokenProgram program) {
  extern __shared__ __align__(128) std::byte ring[];
  const size_t state_at = static_cast<size_t>(program.sequence->slot) * program.slot_floats;
  const Block b{program, ring, *reinterpret_cast<BlockMemory*>(ring + kSlots * kSlotBytes), state_at};
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&b.s.full[i], 1);
      barrier_init(&b.s.empty[i], 1);
    }
    barrier_init(&b.s.shared_full, 1);
    barrier_init(&b.s.shared_empty, 1);
    fence_async_proxy();
  }
  __syncthreads();
  const bool produces = threadIdx.x >= kWorkers;
  uint32_t generation = 0;
  if (produces) {
    // Up to the choice of experts, weights depend on nothing; the first generation is read when it is needed.
    Producer producer(b);
    int expert_phases = 0;
    bool waited = false;
    for (int i = 0; i < program.count; ++i) {
      const TokenPhase& p = program.phases[i];
      const bool chooses = p.kind == TokenPhaseKind::kExperts;
      if (chooses && !waited) {
        grid_dependency_wait();
        generation = __ldcg(&program.words->generation);
        waited = true;
      }
      producer.run(p, expert_phases, generation + static_cast<uint32_t>(i) + 1);
      expert_phases += chooses;
    }
    return;
  }

  grid_dependency_wait();
  generation = __ldcg(&program.words->generation);
  send_slots(b, generation);
  RingPlace at;
  uint32_t expert_phases = 0;
#pragma unroll 1
  for (int i = 0; i < program.count; ++i) {
    const TokenPhase& p = program.phases[i];
    ++generation;
    switch (p.kind) {
      case TokenPhaseKind::kGdn:
        gdn_phase(b, p, at, generation, i + 1 == program.count);
        break;
      case TokenPhaseKind::kProject:
        project_phase(b, p, at, generation);
        break;
      case TokenPhaseKind::kOut:
        out_phase(b, at, generation);
        break;
      case TokenPhaseKind::kExperts:
        experts_phase(b, p, at, expert_phases++ & 1, generation);
        break;
    }
    at = at.plus(slots_of(p));
  }
  // Every block has sent something of this launch, so it has read the generation.
  if (blockIdx.x == 0 && threadIdx.x == 0) program.words->generation = generation + 1;
}

}  // namespace
}  // namespace token

bool token_program_runs(const DeviceInfo& device) {
  return device.is_hopper() &&
         runs_at_once(device, token::token_program_kernel, token::kBlocks, token::kThreads, token::kSharedBytes);
}

bool token_program_fits(const LayerOnDevice& l) {
  using namespace token;
  const auto packed = [](const PackedView& v, int bits, int inputs) {
    return v.bits == bits && v.groups == inputs / kGroup && v.padded_groups == v.groups;
  };
  const bool mixer =
      l.in.packed && packed(l.in.view, 4, kHidden) && l.out.packed && packed(l.out.view, 4, kMixed) &&
      l.out.view.tiles == kBlocks &&
      (l.conv != nullptr ? l.in.rows.size() == 4 && l.in.rows[0] == (2 * kKeyHeads + kValueHeads) * kGdnHeadDim &&
                               l.in.rows[1] == kValueHeads * kGdnHeadDim && l.in.rows[2] == kValueHeads
                         : l.in.view.tiles <= kBlocks * kMostProjectTiles && l.in.width == l.in.view.tiles * kTileRows);
  return mixer && l.router.packed && packed(l.router.view, 8, kHidden) && l.router.columns[1] == kExperts &&
         l.experts.packed && l.experts.count == kExperts && l.experts.width == kExpertWidth &&
         packed(l.experts.up, 4, kHidden) && packed(l.experts.down, 4, kExpertWidth) && l.shared.packed &&
         l.shared.width == kExpertWidth && packed(l.shared.up, 4, kHidden) && packed(l.shared.down, 4, kExpertWidth);
}

void run_token_program(const Launch& launch, const TokenProgram& program) {
  check(program.count > 0 && program.count <= kMostTokenPhases, "a program of a fitting length");
  launch_kernel(launch, token::token_program_kernel, dim3(token::kBlocks), token::kThreads, token::kSharedBytes, 1,
                program);
}

}  // namespace calla::cuda
