// The experts' two decode kernels with weights streamed through shared memory (stream.cuh); one row a grid row.
// swiglu_up_stream: h[i][u] = silu(gate_i x [u]) * (up_i x [u]) for the eight chosen experts and the shared one.
//   Launch    a block a multiprocessor; blocks share out the tiles of the shared expert, then of the chosen ones. The
//             producer warp starts the shared expert's tiles at once, waits for the router, chooses the experts itself
//             (0.3 us; a kernel of its own would cost a launch in the chain) and starts theirs.
//   Moves     9 x 9/16 K width bytes of weights a row. Bandwidth-bound.
// down_sum_stream: residual[n] += sum_i weight_i down_i h_i [n] + shared_gate down_shared h_shared [n].
//   Launch    a block for each 16 outputs; its warps share out the nine experts' chunks.
//   Overlap   the choice depends on the router only, which has ended before swiglu_up_stream lets this kernel start: so
//             the producer warp chooses and loads the weights while that kernel still runs.
//   Moves     9 x 9/16 width hidden bytes of weights a row. Bandwidth-bound.
#include <algorithm>
#include <numeric>

#include "backend/cuda/experts_decode.h"
#include "backend/cuda/stream.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda {
namespace {

constexpr int kAll = kExpertsPerToken + 1;
constexpr int kMostBatchTiles = 8;  // whose sums meet at one barrier
// More than half of a multiprocessor's shared memory: blocks that start early, while others still hold most processors,
// spread out instead of doubling up.
constexpr size_t kWholeProcessor = 118000;

struct StreamExperts {
  PackedView up, down, shared_up, shared_down;
  Activations a;
  int experts;
  int expert_width, shared_width;
  int router_width, shared_column;
  int hidden;
  int slots, batch;
  uint32_t slot_bytes, x_bytes;

  __device__ const float* router_logits(int row) const {
    return a.router_logits + static_cast<size_t>(row) * router_width;
  }
  __device__ size_t hidden_at(int row, int slot) const {
    return static_cast<size_t>(row) * (kExpertsPerToken * expert_width + shared_width) +
           static_cast<size_t>(slot) * expert_width;
  }
};

// The row's experts, one a lane: chosen from the router's logits, or as route() left them.
__device__ __forceinline__ ChosenExpert row_experts(const StreamExperts& p, int row, bool choose) {
  if (choose) return choose_experts(p.router_logits(row), p.experts);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= kExpertsPerToken) return {0, 0};
  return {p.a.expert_ids[row * kExpertsPerToken + lane], p.a.expert_weights[row * kExpertsPerToken + lane]};
}

__device__ __forceinline__ void copy_tile(const PackedView& w, int tile, std::byte* to, uint64_t* barrier) {
  const auto code_bytes = static_cast<uint32_t>(w.codes_per_tile() * sizeof(uint4));
  const auto scale_bytes = static_cast<uint32_t>(w.scales_per_tile() * sizeof(uint2));
  barrier_expect(barrier, code_bytes + scale_bytes);
  bulk_copy_part(to, w.codes + static_cast<size_t>(tile) * w.codes_per_tile(), code_bytes, barrier);
  bulk_copy_part(to + code_bytes, w.scales + static_cast<size_t>(tile) * w.scales_per_tile(), scale_bytes, barrier);
}

// The producer warp of swiglu_up_stream: tiles [first, first + count) of the row's order.
__device__ void produce_up(const StreamExperts& p, bool choose, int row, int first, int count, std::byte* slots,
                           TileRing& ring) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  ChosenExpert mine{0, 0};
  bool chosen = false;
  const auto wait_and_choose = [&] {
    if (chosen) return;
    grid_dependency_wait();
    mine = row_experts(p, row, choose);
    chosen = true;
  };
  uint32_t parity = 1;  // of a slot's last use: none yet
  for (int i = 0, slot = 0; i < count; ++i) {
    const int routed = first + i - p.shared_up.tiles;
    if (routed >= 0) wait_and_choose();
    const int id = __shfl_sync(0xffffffffu, mine.id, routed >= 0 ? routed / p.up.tiles : 0);
    if (lane == 0) {
      if (i >= p.slots) barrier_wait(&ring.empty[slot], parity);
      std::byte* to = slots + slot * p.slot_bytes;
      if (routed < 0) {
        copy_tile(p.shared_up, first + i, to, &ring.full[slot]);
      } else {
        copy_tile(p.up.entry(id), routed % p.up.tiles, to, &ring.full[slot]);
      }
    }
    __syncwarp();
    if (++slot == p.slots) slot = 0, parity ^= 1;
  }
  if (!choose || blockIdx.x != 0) return;
  wait_and_choose();  // one block leaves the choice for later readers
  if (lane < kExpertsPerToken) {
    p.a.expert_ids[row * kExpertsPerToken + lane] = mine.id;
    p.a.expert_weights[row * kExpertsPerToken + lane] = mine.weight;
  }
  if (lane == 0) p.a.shared_gate[row] = sigmoid(__ldcg(p.router_logits(row) + p.shared_column));
}

// kBlocks a multiprocessor: two for several rows, so that one row's loads run under another's products; one for one row,
// so that blocks which start early spread out evenly.
template <int kBlocks>
__global__ void __launch_bounds__(kStreamThreads, kBlocks) swiglu_up_stream(StreamExperts p, bool choose) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ TileRing ring;
  __shared__ uint4 zeros[kZeroPieces];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, row = static_cast<int>(blockIdx.y);
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  // Tiles in order: the shared expert's, then those of the first, second ... choice.
  const int all = p.shared_up.tiles + kExpertsPerToken * p.up.tiles;
  const int first = all * block / blocks, count = all * (block + 1) / blocks - first;
  const int chunks = p.up.padded_groups / kChunkGroups;
  if (tid == 0) ring.init(chunks);
  __syncthreads();
  if (warp == kStreamWarps) return produce_up(p, choose, row, first, count, shared, ring);

  std::byte* x_memory = shared + p.slots * p.slot_bytes;
  const StagedInput<1> x(x_memory, p.up.padded_groups);
  float* mine = reinterpret_cast<float*>(x_memory + p.x_bytes);
  float* other = mine + p.batch * chunks * kTileRows;
  UnitWalk at(chunks, p.slots);
  if (tid < kZeroPieces) zeros[tid] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();
  launch_dependents();  // not earlier: down_sum_stream relies on the router's end
  RowStager<false>(p.hidden, nullptr)
      .stage(x, 0, p.a.moe_input + static_cast<size_t>(row) * p.hidden, 0.0f, nullptr, nullptr);
  consumer_barrier();

  UnitInput<1> input;
  int loaded = -1;
  for (int batch_first = 0; batch_first < count; batch_first += p.batch) {
    const int end = min(batch_first + p.batch, count);
    for (; at.tile() < end; at.next()) {
      if (at.chunk() != loaded) {
        loaded = at.chunk();
        input.load(x, zeros, loaded);
      }
      barrier_wait(&ring.full[at.slot()], at.parity());
      const auto* codes = reinterpret_cast<const uint4*>(shared + at.slot() * p.slot_bytes);
      const auto* scales = reinterpret_cast<const uint2*>(codes + p.up.codes_per_tile());
      const UnitSums<1> sums = multiply_unit<4, 1>(codes + at.chunk() * (kChunkGroups * 32),
                                                   scales + at.chunk() * (kChunkGroups * 8), input);
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.empty[at.slot()]);
      store_unit<1>(mine + ((at.tile() - batch_first) * chunks + at.chunk()) * kTileRows, sums);
    }
    consumer_barrier();
    if (tid < (end - batch_first) * 8) {
      const float* tile_sums = mine + tid / 8 * chunks * kTileRows;
      const float gate = total_of<1>(tile_sums, chunks, tid % 8 * 2);
      const float up = total_of<1>(tile_sums, chunks, tid % 8 * 2 + 1);
      const int tile = first + batch_first + tid / 8, routed = tile - p.shared_up.tiles;
      const bool is_shared = routed < 0;
      const int unit = (is_shared ? tile : routed % p.up.tiles) * 8 + tid % 8;
      if (unit < (is_shared ? p.shared_width : p.expert_width))
        p.a.hidden[p.hidden_at(row, is_shared ? kExpertsPerToken : routed / p.up.tiles) + unit] =
            __float2half_rn(silu(gate) * up * kHiddenScale);
    }
    float* swap = mine;
    mine = other;
    other = swap;
  }
}

__global__ void __launch_bounds__(kStreamThreads, 2) down_sum_stream(StreamExperts p, bool choose) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ TileRing ring;
  __shared__ uint4 zeros[kZeroPieces];
  __shared__ float weights[kAll];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int tile = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  // Slot 0 is the shared expert, slot 1 + i the i-th choice; all have the same width, hence as many chunks.
  const int chunks = p.down.padded_groups / kChunkGroups, all_chunks = kAll * chunks;
  launch_dependents();
  if (tid == 0) ring.init(1);
  __syncthreads();

  if (warp == kStreamWarps) {
    // A slot's weight is written before its barrier's arrival.
    if (!choose) grid_dependency_wait();
    if (lane == 0) {
      weights[0] = choose ? sigmoid(__ldcg(p.router_logits(row) + p.shared_column)) : p.a.shared_gate[row];
      copy_tile(p.shared_down, tile, shared, &ring.full[0]);
    }
    const ChosenExpert mine = row_experts(p, row, choose);
    if (lane < kExpertsPerToken) {
      weights[1 + lane] = mine.weight;
      copy_tile(p.down.entry(mine.id), tile, shared + (1 + lane) * p.slot_bytes, &ring.full[1 + lane]);
    }
    return;
  }

  std::byte* x_memory = shared + kAll * p.slot_bytes;
  const StagedInput<1> x(x_memory, all_chunks * kChunkGroups);
  auto* partials = reinterpret_cast<float*>(x_memory + p.x_bytes);
  UnitWalk at(chunks, kAll);
  if (tid < kZeroPieces) zeros[tid] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();
  float* residual = p.a.residual + static_cast<size_t>(row) * p.hidden + tile * kTileRows;
  const float old = tid < kTileRows ? __ldcg(residual + tid) : 0.0f;
  // The row's hidden units: routed experts first, the shared one last, as they lie; here the shared one is slot 0. Pieces
  // of four, 64 a chunk, zeros where a width only pads a chunk. All loads first: one latency, not one a round.
  const int slot_pieces = chunks * 64;
  const auto load_piece = [&](int c) {
    const int slot = c / slot_pieces, unit = (c - slot * slot_pieces) * 4;
    if (slot >= kAll || unit >= p.expert_width) return make_uint2(0, 0);
    const __half* from = p.a.hidden + p.hidden_at(row, slot == 0 ? kExpertsPerToken : slot - 1) + unit;
    return __ldcg(reinterpret_cast<const uint2*>(from));
  };
  constexpr int kRounds = 3;
  uint2 pieces[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) pieces[i] = load_piece(tid + i * kStreamConsumers);
  const auto store_piece = [&](int c, uint2 v) {
    const float2 low = unpack_half2(v.x), high = unpack_half2(v.y);
    store4(x, c, 0, make_float4(low.x, low.y, high.x, high.y), c < all_chunks * 64);
  };
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (i * kStreamConsumers < all_chunks * 64) store_piece(tid + i * kStreamConsumers, pieces[i]);
  for (int c = tid + kRounds * kStreamConsumers; c - tid < all_chunks * 64; c += kStreamConsumers)
    store_piece(c, load_piece(c));
  consumer_barrier();

  UnitSums<1> sums;
  for (; at.tile() < kAll; at.next()) {
    UnitInput<1> input;
    input.load(x, zeros, at.tile() * chunks + at.chunk());
    barrier_wait(&ring.full[at.slot()], 0);
    const auto* codes = reinterpret_cast<const uint4*>(shared + at.slot() * p.slot_bytes);
    const auto* scales = reinterpret_cast<const uint2*>(codes + p.down.codes_per_tile());
    const UnitSums<1> mine =
        multiply_unit<4, 1>(codes + at.chunk() * (kChunkGroups * 32), scales + at.chunk() * (kChunkGroups * 8), input);
    sums.low[0] = fmaf(weights[at.slot()], mine.low[0], sums.low[0]);
    sums.high[0] = fmaf(weights[at.slot()], mine.high[0], sums.high[0]);
  }
  store_unit<1>(partials + warp * kTileRows, sums);
  consumer_barrier();
  if (tid < kTileRows) residual[tid] = old + total_of<1>(partials, kStreamWarps, tid) / kHiddenScale;
}

size_t tile_bytes(const PackedView& w) {
  return (w.codes_per_tile() * sizeof(uint4) + w.scales_per_tile() * sizeof(uint2) + 127) / 128 * 128;
}
size_t input_bytes(int groups) { return (StagedInput<1>::bytes(groups) + 127) / 128 * 128; }

size_t down_input_bytes(const StreamExperts& p) { return input_bytes(kAll * p.down.padded_groups); }
size_t down_bytes(const StreamExperts& p) {
  return kAll * static_cast<size_t>(p.slot_bytes) + down_input_bytes(p) + sizeof(float) * kStreamWarps * kTileRows;
}
size_t up_fixed_bytes(const StreamExperts& p) {
  return input_bytes(p.up.padded_groups) +
         2 * sizeof(float) * kMostBatchTiles * kTileRows * static_cast<size_t>(p.up.padded_groups / kChunkGroups);
}

int up_blocks(const DeviceInfo& device, const ExpertsDecode& e) {
  return std::min(e.shared->up.tiles + kExpertsPerToken * e.experts->up.tiles, device.multiprocessors);
}

StreamExperts up_params(const DeviceInfo& device, const ExpertsDecode& e, int blocks) {
  StreamExperts p = experts_params<StreamExperts>(e);
  const int share = (p.shared_up.tiles + kExpertsPerToken * p.up.tiles + blocks - 1) / blocks;
  const size_t room = static_cast<size_t>(device.shared_per_block) - 1024 - up_fixed_bytes(p);
  p.x_bytes = static_cast<uint32_t>(input_bytes(p.up.padded_groups));
  p.slot_bytes = static_cast<uint32_t>(tile_bytes(p.up));
  p.batch = std::min(share, kMostBatchTiles);
  p.slots = std::min({share, static_cast<int>(room / p.slot_bytes), kMaxSlots});
  if (p.slots < share) {
    // The same warps must take turns in a slot, else one may wait for a phase before the one in front of it has begun and
    // take that for its own.
    const int turns = kStreamWarps / std::gcd(kStreamWarps, p.up.padded_groups / kChunkGroups);
    p.slots = p.slots / turns * turns;
  }
  return p;
}

StreamExperts down_params(const ExpertsDecode& e) {
  StreamExperts p = experts_params<StreamExperts>(e);
  p.slot_bytes = static_cast<uint32_t>(tile_bytes(p.down));
  p.x_bytes = static_cast<uint32_t>(down_input_bytes(p));
  return p;
}

}  // namespace

bool experts_stream_fit(const DeviceInfo& device, const ExpertsDecode& e) {
  const auto room = static_cast<size_t>(device.shared_per_block) - 1024;
  const bool one_width = e.shared->width == e.experts->width;
  return device.is_hopper() && one_width && down_bytes(down_params(e)) <= room &&
         up_fixed_bytes(experts_params<StreamExperts>(e)) + 2 * tile_bytes(e.experts->up) <= room &&
         up_params(device, e, up_blocks(device, e)).slots > 0;
}

void experts_up_stream(const Launch& launch, const ExpertsDecode& e) {
  const int blocks = up_blocks(launch.device, e);
  const StreamExperts p = up_params(launch.device, e, blocks);
  launch_kernel(launch, e.rows == 1 ? swiglu_up_stream<1> : swiglu_up_stream<2>,
                dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(e.rows)), kStreamThreads,
                static_cast<size_t>(p.slots) * p.slot_bytes + up_fixed_bytes(p), 1, p, e.choose);
}

void experts_down_stream(const Launch& launch, const ExpertsDecode& e) {
  const StreamExperts p = down_params(e);
  launch_kernel(launch, down_sum_stream, dim3(static_cast<unsigned>(p.down.tiles), static_cast<unsigned>(e.rows)),
                kStreamThreads, e.rows == 1 ? std::max(down_bytes(p), kWholeProcessor) : down_bytes(p), 1, p, e.choose);
}

}  // namespace calla::cuda
