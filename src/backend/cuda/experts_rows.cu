// The experts of 7..32 rows (decode), each expert's weights read once for the rows that chose it (expert_items.cuh).
// swiglu_up_rows: h[row][i][u] = silu(gate_i x [u]) * (up_i x [u]) for the chosen experts and the shared one.
//   Launch    a block of 16 warps a multiprocessor; blocks share out the tiles of the list of experts, warps the tiles of
//             a block. A warp takes all of K for its tile, so nothing meets; its weights come through its own ring of
//             chunks (cp.async), which runs on across tiles.
//   Shared    the rows of x (2 K bytes each), the rings, the list.
//   Moves     9/16 K width bytes a distinct expert. Bandwidth-bound.
// down_sum_rows: residual[row][n] += sum_i weight_i down_i h_i [n] + shared_gate down_shared h_shared [n].
//   Launch    a block for each 16 outputs and sixteen rows; its warps share out the list of experts.
//   Shared    h of the block's rows, the rings, a sum for each product, the list.
//   Overlap   the choice depends on the router only, which has ended before swiglu_up_rows lets this kernel start: so it
//             chooses and asks for weights while that kernel still runs.
//   Moves     9/16 width hidden bytes a distinct expert of sixteen rows. Bandwidth-bound.
// Numerics: a row's result depends neither on its place nor on the other rows.
#include <algorithm>

#include "backend/cuda/columns.cuh"
#include "backend/cuda/expert_items.cuh"

namespace calla::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32;
constexpr int kChunkCodes = kChunkGroups * 512, kChunkScales = kChunkGroups * 64;  // bytes of a 4-bit tile
constexpr int kChunkBytes = kChunkCodes + kChunkScales;
constexpr int kDownRows = 16;   // of a block of down_sum_rows
constexpr int kAtOnceRows = 8;  // for which it has all chunks of h at once; for more, one after the other

struct RowsParams {
  PackedView up, down, shared_up, shared_down;
  Activations a;
  int rows, experts;
  int expert_width, shared_width;
  int router_width, shared_column;
  int hidden;
  bool choose;

  // Only rows [first, first + most) of these.
  __device__ void take_rows(int first, int most) {
    a.residual += static_cast<size_t>(first) * hidden;
    a.hidden += hidden_at(first, 0);
    a.router_logits += static_cast<size_t>(first) * router_width;
    a.expert_ids += first * kExpertsPerToken;
    a.expert_weights += first * kExpertsPerToken;
    a.shared_gate += first;
    rows = min(rows - first, most);
  }
  __device__ size_t hidden_at(int row, int choice) const {
    return static_cast<size_t>(row) * (kExpertsPerToken * expert_width + shared_width) +
           static_cast<size_t>(choice) * expert_width;
  }
};

__device__ __forceinline__ const uint4* codes_of(const std::byte* chunk) {
  return reinterpret_cast<const uint4*>(chunk);
}
__device__ __forceinline__ const uint2* scales_of(const std::byte* chunk) {
  return reinterpret_cast<const uint2*>(chunk + kChunkCodes);
}

// Rows of a chunk of h that a block of down_sum_rows has in shared memory.
__host__ __device__ constexpr int max_columns_of_h(int chunks) {
  const int at_once = kAtOnceRows * chunks;
  return (at_once > kDownRows ? at_once : kDownRows) * (kExpertsPerToken + 1);
}

// A warp's copies of chunks: kDepth - 1 are on their way while one is used.
template <int kDepth>
class ChunkRing {
 public:
  __device__ explicit ChunkRing(std::byte* memory) : memory_(memory) {}

  __device__ __forceinline__ void fetch(const PackedView& w, int tile, int chunk) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const size_t group = static_cast<size_t>(tile) * w.padded_groups + chunk * kChunkGroups;
    const uint32_t to = shared_address(memory_ + next_ * kChunkBytes);
#pragma unroll
    for (int i = 0; i < kChunkGroups; ++i)
      cp_async16(to + static_cast<uint32_t>(i * 32 + lane) * 16, w.codes + group * 32 + i * 32 + lane);
    if (lane < 16) cp_async16(to + kChunkCodes + static_cast<uint32_t>(lane) * 16, w.scales + group * 8 + lane * 2);
    finish_fetch();
  }
  // Counts as a fetch; what is read there is never used.
  __device__ __forceinline__ void finish_fetch() {
    cp_async_commit();
    next_ = next_ + 1 == kDepth ? 0 : next_ + 1;
  }
  // Waits for the oldest chunk.
  __device__ __forceinline__ const std::byte* take() {
    cp_async_wait<kDepth - 2>();
    __syncwarp();
    const std::byte* chunk = memory_ + used_ * kChunkBytes;
    used_ = used_ + 1 == kDepth ? 0 : used_ + 1;
    return chunk;
  }

 private:
  std::byte* memory_;
  int next_ = 0, used_ = 0;
};

template <int kDepth>
__global__ void __launch_bounds__(kThreads, 1) swiglu_up_rows(RowsParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, r = lane / 4, q = lane % 4;
  const int chunks = p.up.padded_groups / kChunkGroups;
  auto* rings = shared;
  auto* x = reinterpret_cast<__half*>(shared + kWarps * kDepth * kChunkBytes);
  const int x_stride = chunks * kChunkInputs + kRowPad;
  auto& list = *reinterpret_cast<ExpertItems*>(x + (p.rows + 1) * x_stride);

  for (int i = tid; i < x_stride / 8; i += kThreads)  // what a column that is no row reads
    reinterpret_cast<uint4*>(x + p.rows * x_stride)[i] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();
  launch_dependents();  // not earlier: down_sum_rows relies on the router's end
  const int pieces = x_stride / 8;
  for (int i = tid; i < p.rows * pieces; i += kThreads) {
    const int row = i / pieces, piece = i % pieces;
    const bool valid = piece * 8 < p.hidden;
    cp_async16(shared_address(x + row * x_stride + piece * 8),
               p.a.moe_input + static_cast<size_t>(row) * p.hidden + (valid ? piece * 8 : 0), valid);
  }
  cp_async_commit();
  list.build<kThreads>(p.a, p.rows, p.experts, p.router_width, p.shared_column, p.choose);
  if (p.choose && blockIdx.x == 0) list.publish(p.a, p.rows);

  // Tiles in the list's order; an item of the shared expert may have more or fewer than the others.
  const int shared_items = (p.rows + kItemColumns - 1) / kItemColumns, shared_tiles = shared_items * p.shared_up.tiles;
  const int all = shared_tiles + (list.count - shared_items) * p.up.tiles;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(static_cast<int64_t>(all) * block / blocks);
  const int end = static_cast<int>(static_cast<int64_t>(all) * (block + 1) / blocks);
  struct Work {
    ExpertItem item;
    int tile;
  };
  const auto work = [&](int i) -> Work {
    if (i < shared_tiles) return {list.items[i / p.shared_up.tiles], i % p.shared_up.tiles};
    const int routed = i - shared_tiles;
    return {list.items[shared_items + routed / p.up.tiles], routed % p.up.tiles};
  };
  ChunkRing<kDepth> ring(rings + warp * kDepth * kChunkBytes);
  int fetch_at = first + warp, fetch_chunk = 0;
  Work fetched{};
  const auto fetch = [&] {
    if (fetch_at >= end) return ring.finish_fetch();
    if (fetch_chunk == 0) fetched = work(fetch_at);
    ring.fetch(fetched.item.expert == kSharedExpert ? p.shared_up : p.up.entry(fetched.item.expert), fetched.tile,
               fetch_chunk);
    if (++fetch_chunk == chunks) fetch_chunk = 0, fetch_at += kWarps;
  };
#pragma unroll
  for (int i = 0; i < kDepth - 1; ++i) fetch();
  cp_async_wait<kDepth - 1>();  // the rows of x
  __syncthreads();

  for (int i = first + warp; i < end; i += kWarps) {
    const Work now = work(i);
    const auto entry = [&](int column) { return list.entries[now.item.first + column]; };
    const int row = r < now.item.count ? entry(r) & 255 : p.rows;
    const auto* column = reinterpret_cast<const uint32_t*>(x + row * x_stride);
    float acc[4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const std::byte* weights = ring.take();
      fetch();
      ColumnsOfChunk columns;
      columns.load(column, chunk);
      multiply_columns<4>(acc, codes_of(weights), scales_of(weights), columns);
    }
    const int unit = now.tile * 8 + r;
    if (unit >= (now.item.expert == kSharedExpert ? p.shared_width : p.expert_width)) continue;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * q + c >= now.item.count) continue;
      const int at = entry(2 * q + c);
      p.a.hidden[p.hidden_at(at & 255, at >> 8) + unit] = __float2half_rn(silu(acc[c]) * acc[2 + c] * kHiddenScale);
    }
  }
}

template <int kDepth>
__global__ void __launch_bounds__(kThreads, 1) down_sum_rows(RowsParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, r = lane / 4, q = lane % 4;
  const int tile = static_cast<int>(blockIdx.x), choices = kExpertsPerToken + 1;
  const int chunks = max(p.down.padded_groups, p.shared_down.padded_groups) / kChunkGroups;
  p.take_rows(static_cast<int>(blockIdx.y) * kDownRows, kDownRows);
  auto* sums = reinterpret_cast<float*>(shared + kWarps * kDepth * kChunkBytes);  // [row][choice][chunk][output]
  // Of h, [row][choice][chunk][input] of as many chunks as there is room for.
  const int at_once = p.rows <= kAtOnceRows ? chunks : 1, columns_of_h = p.rows * choices * at_once;
  auto* h = reinterpret_cast<__half*>(sums + kDownRows * choices * chunks * kTileRows);
  constexpr int kStride = kChunkInputs + kRowPad;
  // The last column is zero: what a column of a product that is no row reads.
  auto& list = *reinterpret_cast<ExpertItems*>(h + (max_columns_of_h(chunks) + 1) * kStride);

  launch_dependents();
  if (!p.choose) grid_dependency_wait();
  list.build<kThreads>(p.a, p.rows, p.experts, p.router_width, p.shared_column, p.choose);
  // Units: (item, chunk), the chunks that are there at once next to each other; an expert may have fewer chunks than the
  // widest, whose sums are then zero.
  const int units = list.count * chunks, phase_units = list.count * at_once;
  const auto item_of = [&](int unit) { return list.items[unit % phase_units / at_once]; };
  const auto chunk_of = [&](int unit) { return unit / phase_units * at_once + unit % phase_units % at_once; };
  const auto view = [&](const ExpertItem& item) {
    return item.expert == kSharedExpert ? p.shared_down : p.down.entry(item.expert);
  };
  ChunkRing<kDepth> ring(shared + warp * kDepth * kChunkBytes);
  int fetch_at = warp;
  const auto fetch = [&] {
    if (fetch_at < units) {
      const PackedView w = view(item_of(fetch_at));
      if (chunk_of(fetch_at) * kChunkGroups < w.padded_groups) {
        ring.fetch(w, tile, chunk_of(fetch_at));
        fetch_at += kWarps;
        return;
      }
    }
    ring.finish_fetch();
    fetch_at += kWarps;
  };
#pragma unroll
  for (int i = 0; i < kDepth - 1; ++i) fetch();
  grid_dependency_wait();

  constexpr int kPieces = kChunkInputs / 8;  // 16 bytes
  int i = warp;
  for (int first_chunk = 0; first_chunk < chunks; first_chunk += at_once) {
    for (int piece = tid; piece < (columns_of_h + 1) * kPieces; piece += kThreads) {
      const int column = piece / kPieces, pair = column / at_once, row = pair / choices, choice = pair % choices;
      const int input = (first_chunk + column % at_once) * kChunkInputs + piece % kPieces * 8;
      const bool valid =
          column < columns_of_h && input < (choice == kExpertsPerToken ? p.shared_width : p.expert_width);
      cp_async16(shared_address(h + column * kStride + piece % kPieces * 8),
                 valid ? p.a.hidden + p.hidden_at(row, choice) + input : p.a.hidden, valid);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (; i < (first_chunk / at_once + 1) * phase_units; i += kWarps) {
      const ExpertItem item = item_of(i);
      const int chunk = chunk_of(i), width = item.expert == kSharedExpert ? p.shared_width : p.expert_width;
      const auto pair = [&](int column) {  // row and choice of a column
        const int at = list.entries[item.first + column];
        return (at & 255) * choices + (at >> 8);
      };
      const int column = r < item.count ? pair(r) * at_once + chunk - first_chunk : columns_of_h;
      const std::byte* weights = ring.take();
      fetch();
      float acc[4] = {};
      if (chunk * kChunkInputs < width) {
        ColumnsOfChunk columns;
        columns.load(reinterpret_cast<const uint32_t*>(h + column * kStride), 0);
        multiply_columns<4>(acc, codes_of(weights), scales_of(weights), columns);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (2 * q + c < item.count)  // outputs 2 r, 2 r + 1 of the tile
          *reinterpret_cast<float2*>(sums + (pair(2 * q + c) * chunks + chunk) * kTileRows + 2 * r) =
              make_float2(acc[c], acc[2 + c]);
    }
    __syncthreads();  // h has been used, and at the end the sums are there
  }
  const int row = tid / kTileRows, output = tid % kTileRows;
  if (row >= p.rows) return;
  float total = 0;
#pragma unroll
  for (int choice = 0; choice <= kExpertsPerToken; ++choice) {
    const float* from = sums + (row * (kExpertsPerToken + 1) + choice) * chunks * kTileRows + output;
    float sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) sum += from[chunk * kTileRows];
    total += list.weights[row][choice] * sum;
  }
  p.a.residual[static_cast<size_t>(row) * p.hidden + tile * kTileRows + output] += total / kHiddenScale;
}

RowsParams make_params(const ExpertsDecode& e) {
  auto p = experts_params<RowsParams>(e);
  p.rows = e.rows;
  p.choose = e.choose;
  return p;
}

constexpr int kDeep = 4, kShallow = 2, kDownDepth = 3;  // of the rings

size_t up_bytes(const RowsParams& p, int depth) {
  const size_t row = static_cast<size_t>(p.up.padded_groups * kGroup + kRowPad) * sizeof(__half);
  return static_cast<size_t>(kWarps * depth * kChunkBytes) + static_cast<size_t>(p.rows + 1) * row +
         sizeof(ExpertItems);
}
size_t down_bytes(const RowsParams& p) {
  const auto chunks = static_cast<size_t>(std::max(p.down.padded_groups, p.shared_down.padded_groups) / kChunkGroups);
  return static_cast<size_t>(kWarps * kDownDepth * kChunkBytes) +
         kDownRows * (kExpertsPerToken + 1) * chunks * kTileRows * sizeof(float) +
         (static_cast<size_t>(max_columns_of_h(static_cast<int>(chunks))) + 1) * (kChunkInputs + kRowPad) *
             sizeof(__half) +
         sizeof(ExpertItems);
}
size_t room(const DeviceInfo& device) { return static_cast<size_t>(device.shared_per_block) - 1024; }

}  // namespace

bool experts_rows_fit(const DeviceInfo& device, const ExpertsDecode& e) {
  if (e.rows < kMinExpertRows || e.rows > kMaxExpertRows || e.experts->count > kMaxFusedExperts) return false;
  const RowsParams p = make_params(e);
  return up_bytes(p, kShallow) <= room(device) && down_bytes(p) <= room(device);
}

void experts_up_rows(const Launch& launch, const ExpertsDecode& e) {
  const RowsParams p = make_params(e);
  const bool deep = up_bytes(p, kDeep) <= room(launch.device);
  launch_kernel(launch, deep ? swiglu_up_rows<kDeep> : swiglu_up_rows<kShallow>,
                dim3(static_cast<unsigned>(launch.device.multiprocessors)), kThreads,
                up_bytes(p, deep ? kDeep : kShallow), 1, p);
}

void experts_down_rows(const Launch& launch, const ExpertsDecode& e) {
  const RowsParams p = make_params(e);
  launch_kernel(launch, down_sum_rows<kDownDepth>,
                dim3(static_cast<unsigned>(p.down.tiles), static_cast<unsigned>((p.rows + kDownRows - 1) / kDownRows)),
                kThreads, down_bytes(p), 1, p);
}

}  // namespace calla::cuda
