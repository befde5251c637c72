// affine_gemv_stream: y[m][n] = sum_k w[n][k] x[m][k] for 1..8 rows, w packed 4- or 8-bit; RMSNorm of x folded in.
//   Launch    one block a multiprocessor (fewer if there are fewer tiles), consumer warps and a producer warp
//             (stream.cuh); a block takes a run of tiles of 16 outputs.
//   Shared    a ring of tiles (9/16 x 16 K bytes each), x as B operands (2 K bytes a row), two buffers of partial sums.
//   Moves     the weights once, K * 4 bytes of x a block (from L2). Bandwidth-bound: floor = bytes / peak.
//   Numerics  as affine_gemv: a row's result does not depend on the other rows of the batch.
#include <algorithm>

#include "backend/cuda/linear_stream.h"
#include "backend/cuda/stream.cuh"

namespace calla::cuda {
namespace {

struct StreamParams {
  PackedView w;
  GemvInput in;
  float* out;
  size_t out_stride;
  int rows;
  int columns;
  int slots;  // of the ring
  int batch;  // tiles whose sums meet at one barrier
  uint32_t slot_bytes, code_bytes, x_bytes;
};

// The most tiles whose sums meet at one barrier.
template <int kCols>
constexpr int kMostBatchTiles = kCols == 1 ? 8 : 4;

int chunks_of(const PackedView& w) { return w.padded_groups / kChunkGroups; }
size_t slot_bytes(const PackedView& w) {
  return (w.codes_per_tile() * sizeof(uint4) + w.scales_per_tile() * sizeof(uint2) + 127) / 128 * 128;
}
template <int kCols>
size_t x_bytes(const PackedView& w) {
  return (StagedInput<kCols>::bytes(w.padded_groups) + 127) / 128 * 128;
}
template <int kCols>
size_t partial_bytes(const PackedView& w, int batch) {
  return sizeof(float) * static_cast<size_t>(batch * chunks_of(w) * kTileRows * kCols);
}

template <int kBits, int kCols, bool kNormed, bool kAdd>
__global__ void __launch_bounds__(kStreamThreads, 1) affine_gemv_stream(StreamParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ TileRing ring;
  __shared__ float scratch[kStreamWarps];
  __shared__ uint4 zeros[kZeroPieces];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first = p.w.tiles * block / blocks, count = p.w.tiles * (block + 1) / blocks - first;
  const int chunks = p.w.padded_groups / kChunkGroups;

  launch_dependents();
  if (tid == 0) ring.init(chunks);
  __syncthreads();

  if (warp == kStreamWarps) {
    if (lane != 0) return;
    const auto code_bytes = static_cast<uint32_t>(p.w.codes_per_tile() * sizeof(uint4));
    const auto scale_bytes = static_cast<uint32_t>(p.w.scales_per_tile() * sizeof(uint2));
    const uint4* codes = p.w.codes + static_cast<size_t>(first) * p.w.codes_per_tile();
    const uint2* scales = p.w.scales + static_cast<size_t>(first) * p.w.scales_per_tile();
    uint32_t parity = 1;  // of a slot's last use: none yet
    for (int i = 0, slot = 0; i < count; ++i) {
      if (i >= p.slots) barrier_wait(&ring.empty[slot], parity);
      std::byte* to = shared + slot * p.slot_bytes;
      barrier_expect(&ring.full[slot], code_bytes + scale_bytes);
      bulk_copy_part(to, codes, code_bytes, &ring.full[slot]);
      bulk_copy_part(to + code_bytes, scales, scale_bytes, &ring.full[slot]);
      codes += p.w.codes_per_tile();
      scales += p.w.scales_per_tile();
      if (++slot == p.slots) slot = 0, parity ^= 1;
    }
    return;
  }

  std::byte* x_memory = shared + p.slots * p.slot_bytes;
  const StagedInput<kCols> x(x_memory, p.w.padded_groups);
  auto* partials = reinterpret_cast<float*>(x_memory + p.x_bytes);
  const int k = p.w.groups * kGroup;
  RowStager<kNormed && kCols == 1> stager(k, p.in.norm);
  UnitWalk at(chunks, p.slots);
  if (tid < kZeroPieces) zeros[tid] = make_uint4(0, 0, 0, 0);
  grid_dependency_wait();
  const auto row_index = [&](int row) { return p.in.heads != nullptr ? p.in.heads[row].row : row; };
  __half* copy = block == 0 ? p.in.normed_out : nullptr;
  // Output i of a batch of tiles, or null if it is padding.
  const auto output = [&](int i, int batch_first) -> float* {
    const int col = i % kCols, n = (first + batch_first) * kTileRows + i / kCols;
    return col < p.rows && n < p.columns ? p.out + col * p.out_stride + n : nullptr;
  };
  // What an added output adds to, read early for the first batch.
  float old = 0;
  if constexpr (kAdd) {
    static_assert(kTileRows * 8 <= kStreamConsumers);
    if (tid < min(p.batch, count) * kTileRows * kCols) {
      const float* y = output(tid, 0);
      if (y != nullptr) old = __ldcg(y);
    }
  }
  if constexpr (kCols == 1) {
    const size_t at = row_index(0) * p.in.stride;
    if constexpr (kNormed) {
      stager.stage(x, 0, p.in.residual + at, p.in.eps, scratch, copy);
    } else {
      stager.stage(x, 0, p.in.half + at, 0.0f, scratch, nullptr);
    }
  } else {
    stage_rows(x, p.in.half, p.in.stride, p.rows, k);
  }
  consumer_barrier();

  UnitInput<kCols> input;
  int loaded = -1;
  float* mine = partials;
  float* other = partials + p.batch * chunks * kTileRows * kCols;
  for (int batch_first = 0; batch_first < count; batch_first += p.batch) {
    const int end = min(batch_first + p.batch, count);
    for (; at.tile() < end; at.next()) {
      if (at.chunk() != loaded) {
        loaded = at.chunk();
        input.load(x, zeros, loaded);
      }
      barrier_wait(&ring.full[at.slot()], at.parity());
      const std::byte* slot = shared + at.slot() * p.slot_bytes;
      const auto* codes = reinterpret_cast<const uint4*>(slot) + at.chunk() * (kChunkGroups * 32 * kBits / 4);
      const auto* scales = reinterpret_cast<const uint2*>(slot + p.code_bytes) + at.chunk() * (kChunkGroups * 8);
      const UnitSums<kCols> sums = multiply_unit<kBits, kCols>(codes, scales, input);
      __syncwarp();
      if (lane == 0) barrier_arrive(&ring.empty[at.slot()]);
      store_unit<kCols>(mine + ((at.tile() - batch_first) * chunks + at.chunk()) * kTileRows * kCols, sums);
    }
    consumer_barrier();
    for (int i = tid; i < (end - batch_first) * kTileRows * kCols; i += kStreamConsumers) {
      float* y = output(i, batch_first);
      if (y == nullptr) continue;
      const float total =
          total_of<kCols>(mine + i / (kTileRows * kCols) * chunks * kTileRows * kCols, chunks, i % (kTileRows * kCols));
      if constexpr (kAdd) {
        *y = (batch_first == 0 && i == tid ? old : *y) + total;
      } else {
        *y = total;
      }
    }
    float* swap = mine;
    mine = other;
    other = swap;
  }
}

template <int kBits, int kCols, bool kNormed, bool kAdd>
void launch_stream(const Launch& launch, StreamParams p) {
  const int blocks = std::min(p.w.tiles, launch.device.multiprocessors);
  const int share = (p.w.tiles + blocks - 1) / blocks;
  p.batch = std::min(share, kMostBatchTiles<kCols>);
  p.x_bytes = static_cast<uint32_t>(x_bytes<kCols>(p.w));
  p.slot_bytes = static_cast<uint32_t>(slot_bytes(p.w));
  p.code_bytes = static_cast<uint32_t>(p.w.codes_per_tile() * sizeof(uint4));
  const size_t fixed = p.x_bytes + 2 * partial_bytes<kCols>(p.w, p.batch);
  const size_t room = static_cast<size_t>(launch.device.shared_per_block) - 1024 - fixed;
  p.slots = std::min({share, static_cast<int>(room / p.slot_bytes), kMaxSlots});
  launch_kernel(launch, affine_gemv_stream<kBits, kCols, kNormed, kAdd>, dim3(static_cast<unsigned>(blocks)),
                kStreamThreads, static_cast<size_t>(p.slots) * p.slot_bytes + fixed, 1, p);
}

template <int kBits>
void choose_form(const Launch& launch, const StreamParams& p, bool add) {
  const bool normed = p.in.residual != nullptr;
  check(!(normed && add), "a normed input feeds a stored output");
  if (p.rows == 1) {
    if (normed) return launch_stream<kBits, 1, true, false>(launch, p);
    if (add) return launch_stream<kBits, 1, false, true>(launch, p);
    return launch_stream<kBits, 1, false, false>(launch, p);
  }
  check(!normed, "several rows come normed");
  if (add) return launch_stream<kBits, 8, false, true>(launch, p);
  launch_stream<kBits, 8, false, false>(launch, p);
}

}  // namespace

bool stream_fits(const DeviceInfo& device, const PackedView& w, int rows) {
  const size_t fixed = rows == 1 ? x_bytes<1>(w) + 2 * partial_bytes<1>(w, kMostBatchTiles<1>)
                                 : x_bytes<8>(w) + 2 * partial_bytes<8>(w, kMostBatchTiles<8>);
  return device.is_hopper() && fixed + 2 * slot_bytes(w) + 1024 <= static_cast<size_t>(device.shared_per_block);
}

void gemv_stream(const Launch& launch, const PackedView& w, const GemvInput& in, int rows, float* out,
                 size_t out_stride, int columns, bool add) {
  check(rows >= 1 && rows <= kMaxGemvRows, "decode projections take 1 to 8 rows");
  const StreamParams p{w, in, out, out_stride, rows, columns, 0, 0, 0, 0, 0};
  if (w.bits == 8) return choose_form<8>(launch, p, add);
  choose_form<4>(launch, p, add);
}

}  // namespace calla::cuda
