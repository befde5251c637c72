// affine_rows: y[m][n] = or += sum_k w[n][k] x[m][k] for 2..32 rows, w packed 4- or 8-bit.
//   Launch    one block a multiprocessor (fewer if there are fewer tiles), consumer warps and a producer warp
//             (stream.cuh); a block takes every so-many-th tile of 16 outputs. 32 rows of 4096 inputs take two launches.
//   Shared    a ring of tiles (9/16 x 16 K bytes each), the rows of x as they are (2 K bytes each, columns.cuh), sums.
//   Moves     the weights once, K * 2 bytes of x a row and block (from L2). Bandwidth-bound: floor = bytes / peak.
//   Numerics  a row's result does not depend on the other rows of the batch.
#include <algorithm>
#include <numeric>

#include "backend/cuda/columns.cuh"
#include "backend/cuda/linear_rows.h"

namespace calla::cuda {
namespace {

struct LinearParams {
  PackedView w;
  const __half* x;
  size_t x_stride;
  float* out;
  size_t out_stride;
  int rows;
  int columns;
  int slots;    // of the ring
  int batch;    // tiles whose sums meet at one barrier
  int buffers;  // of sums
  uint32_t slot_bytes, code_bytes;
};

int chunks_of(const PackedView& w) { return w.padded_groups / kChunkGroups; }
int column_blocks(int rows) { return (rows + kColumns - 1) / kColumns; }

template <int kBits, bool kAdd>
__global__ void __launch_bounds__(kStreamThreads, 1) affine_rows(LinearParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ TileRing ring;
  __shared__ uint64_t x_full;
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, r = lane / 4, q = lane % 4;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  // Every blocks-th tile, so that the blocks read neighbouring memory at a time.
  const int count = (p.w.tiles - block + blocks - 1) / blocks;
  const auto tile_at = [&](int i) { return block + i * blocks; };
  const int chunks = p.w.padded_groups / kChunkGroups, k = chunks * kChunkInputs, x_row = k + kRowPad;
  auto* x = reinterpret_cast<__half*>(shared + p.slots * p.slot_bytes);
  const int groups_of_columns = (p.rows + kColumns - 1) / kColumns;
  auto* sums = reinterpret_cast<float*>(x + groups_of_columns * kColumns * x_row);

  launch_dependents();
  if (tid == 0) {
    ring.init(chunks);
    barrier_init(&x_full, 1);
    fence_async_proxy();
  }
  __syncthreads();

  if (warp == kStreamWarps) {
    const auto scale_bytes = static_cast<uint32_t>(p.w.scales_per_tile() * sizeof(uint2));
    uint32_t parity = 1;  // of a slot's last use: none yet
    int slot = 0;
    const auto copy = [&](int i) {
      if (i >= p.slots) barrier_wait(&ring.empty[slot], parity);
      if (lane == 0) {
        const auto tile = static_cast<size_t>(tile_at(i));
        std::byte* to = shared + slot * p.slot_bytes;
        barrier_expect(&ring.full[slot], p.code_bytes + scale_bytes);
        bulk_copy_part(to, p.w.codes + tile * p.w.codes_per_tile(), p.code_bytes, &ring.full[slot]);
        bulk_copy_part(to + p.code_bytes, p.w.scales + tile * p.w.scales_per_tile(), scale_bytes, &ring.full[slot]);
      }
      __syncwarp();
      if (++slot == p.slots) slot = 0, parity ^= 1;
    };
    const int ahead = min(count, p.slots);
    for (int i = 0; i < ahead; ++i) copy(i);
    grid_dependency_wait();
    const auto row_bytes = static_cast<uint32_t>(k) * sizeof(__half);
    if (lane == 0) barrier_expect(&x_full, row_bytes * static_cast<uint32_t>(p.rows));
    __syncwarp();
    if (lane < p.rows) bulk_copy_part(x + lane * x_row, p.x + lane * p.x_stride, row_bytes, &x_full);
    __syncwarp();
    for (int i = ahead; i < count; ++i) copy(i);
    return;
  }

  UnitWalk at(chunks, p.slots);
  grid_dependency_wait();
  const int tile_sums = chunks * groups_of_columns * kTileRows * kColumns, tile_outputs = kTileRows * p.rows;
  const auto output = [&](int i, int batch_first) -> float* {  // i = (tile, row, output), or null if it is padding
    const int tile = i / tile_outputs, row = i % tile_outputs / kTileRows;
    const int n = tile_at(batch_first + tile) * kTileRows + i % kTileRows;
    return n < p.columns ? p.out + row * p.out_stride + n : nullptr;
  };
  // What an added output adds to, read early for the first batch.
  float old = 0;
  if constexpr (kAdd) {
    if (tid < min(p.batch, count) * tile_outputs) {
      const float* y = output(tid, 0);
      if (y != nullptr) old = __ldcg(y);
    }
  }
  barrier_wait(&x_full, 0);
  ColumnsOfChunk columns;
  int loaded = -1, buffer = 0;
  for (int batch_first = 0; batch_first < count; batch_first += p.batch) {
    const int end = min(batch_first + p.batch, count);
    float* mine = sums + buffer * p.batch * tile_sums;
    for (; at.tile() < end; at.next()) {
      barrier_wait(&ring.full[at.slot()], at.parity());
      const std::byte* slot = shared + at.slot() * p.slot_bytes;
      const auto* codes = reinterpret_cast<const uint4*>(slot) + at.chunk() * (kChunkGroups * 32 * kBits / 4);
      const auto* scales = reinterpret_cast<const uint2*>(slot + p.code_bytes) + at.chunk() * (kChunkGroups * 8);
      float* to = mine + (at.tile() - batch_first) * tile_sums + at.chunk() * groups_of_columns * kTileRows * kColumns;
      for (int c = 0; c < groups_of_columns; ++c) {
        if (groups_of_columns > 1 || at.chunk() != loaded) {
          loaded = at.chunk();
          columns.load(reinterpret_cast<const uint32_t*>(x + (c * kColumns + r) * x_row), loaded);
        }
        float acc[4] = {};
        multiply_columns<kBits>(acc, codes, scales, columns);
        float* pair = to + c * kTileRows * kColumns + 2 * r * kColumns + 2 * q;  // outputs 2 r, 2 r + 1
        *reinterpret_cast<float2*>(pair) = make_float2(acc[0], acc[1]);
        *reinterpret_cast<float2*>(pair + kColumns) = make_float2(acc[2], acc[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.empty[at.slot()]);
    }
    consumer_barrier();
    for (int i = tid; i < (end - batch_first) * tile_outputs; i += kStreamConsumers) {
      float* y = output(i, batch_first);
      if (y == nullptr) continue;
      const int row = i % tile_outputs / kTileRows;
      const float* from = mine + i / tile_outputs * tile_sums + row / kColumns * kTileRows * kColumns +
                          i % kTileRows * kColumns + row % kColumns;
      float total = 0;
#pragma unroll 8
      for (int c = 0; c < chunks; ++c) total += from[c * groups_of_columns * kTileRows * kColumns];
      if constexpr (kAdd) {
        *y = (batch_first == 0 && i == tid ? old : *y) + total;
      } else {
        *y = total;
      }
    }
    if (p.buffers == 2) buffer ^= 1;
  }
}

size_t tile_bytes(const PackedView& w) {
  return (w.codes_per_tile() * sizeof(uint4) + w.scales_per_tile() * sizeof(uint2) + 127) / 128 * 128;
}

// Fills in the geometry; returns the bytes of shared memory, or 0 if it does not fit.
size_t plan(const DeviceInfo& device, LinearParams& p, int blocks) {
  const int chunks = chunks_of(p.w), share = (p.w.tiles + blocks - 1) / blocks, groups = column_blocks(p.rows);
  const size_t room = static_cast<size_t>(device.shared_per_block) - 1024;
  const size_t tile_sums = sizeof(float) * static_cast<size_t>(chunks * groups) * kTileRows * kColumns;
  p.batch = std::clamp(8 / groups, 1, share);
  p.buffers = share > p.batch ? 2 : 1;
  p.slot_bytes = static_cast<uint32_t>(tile_bytes(p.w));
  p.code_bytes = static_cast<uint32_t>(p.w.codes_per_tile() * sizeof(uint4));
  const size_t fixed =
      static_cast<size_t>(groups * kColumns) * static_cast<size_t>(chunks * kChunkInputs + kRowPad) * sizeof(__half) +
      static_cast<size_t>(p.batch * p.buffers) * tile_sums;
  if (fixed + p.slot_bytes > room) return 0;
  p.slots = std::min({share, static_cast<int>((room - fixed) / p.slot_bytes), kMaxSlots});
  if (p.slots < share) {
    // The same warps must take turns in a slot, else one may wait for a phase before the one in front of it has begun and
    // take that for its own.
    const int turns = kStreamWarps / std::gcd(kStreamWarps, chunks);
    p.slots = p.slots / turns * turns;
  }
  if (p.slots == 0) return 0;
  return static_cast<size_t>(p.slots) * p.slot_bytes + fixed;
}

int block_count(const DeviceInfo& device, const PackedView& w) { return std::min(w.tiles, device.multiprocessors); }

template <int kBits>
void launch_rows(const Launch& launch, const LinearParams& p, size_t bytes, bool add) {
  launch_kernel(launch, add ? affine_rows<kBits, true> : affine_rows<kBits, false>,
                dim3(static_cast<unsigned>(block_count(launch.device, p.w))), kStreamThreads, bytes, 1, p);
}

}  // namespace

bool linear_rows_fit(const DeviceInfo& device, const PackedView& w, int rows) {
  LinearParams p{};
  p.w = w;
  p.rows = std::min(rows, kColumns);
  return device.is_hopper() && rows <= kMaxLinearRows && w.groups == w.padded_groups && chunks_of(w) <= kStreamWarps &&
         plan(device, p, block_count(device, w)) > 0;
}

void linear_rows(const Launch& launch, const PackedView& w, const __half* x, size_t x_stride, int rows, float* out,
                 size_t out_stride, int columns, bool add) {
  for (int done = 0; done < rows;) {
    LinearParams p{w,          x + static_cast<size_t>(done) * x_stride,
                   x_stride,   out + static_cast<size_t>(done) * out_stride,
                   out_stride, rows - done,
                   columns,    0,
                   0,          0,
                   0,          0};
    // As many rows as fit at once.
    size_t bytes = plan(launch.device, p, block_count(launch.device, w));
    while (bytes == 0 && p.rows > kColumns) {
      p.rows = (column_blocks(p.rows) - 1) * kColumns;
      bytes = plan(launch.device, p, block_count(launch.device, w));
    }
    check(bytes > 0, "linear_rows_fit was asked");
    w.bits == 8 ? launch_rows<8>(launch, p, bytes, add) : launch_rows<4>(launch, p, bytes, add);
    done += p.rows;
  }
}

}  // namespace calla::cuda
