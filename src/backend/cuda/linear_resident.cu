// affine_gemv_resident: y[n] = or += sum_k w[n][k] x[k], w packed 4-bit; RMSNorm of x folded in.
//   Launch    one block a multiprocessor at most, 16 warps; a block takes a run of tiles of 16 outputs, and all its weights
//             go to shared memory before it waits for the kernel in front.
//   Shared    9/16 x 16 K bytes a tile, 5 tiles at most; x as fixed point (2 K bytes), the units' sums.
//   Moves     the weights once, K * 4 (fp16: 2) bytes of x a block (from L2). Bandwidth-bound: floor = bytes / peak.
//   Numerics  fixed_row.cuh.
#include <algorithm>

#include "backend/cuda/fixed_row.cuh"
#include "backend/cuda/linear_resident.h"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32;
constexpr int kMostTiles = 5;
// What a block may take, so that the next kernel's weights have room beside it.
constexpr size_t kMostBytes = 112 * 1024;

struct ResidentParams {
  PackedView w;
  GemvInput in;
  float* out;
  int columns;
};

template <int kChunks>
constexpr uint32_t kTileCodes = kChunks* kChunkGroups * 512;
template <int kChunks>
constexpr uint32_t kTileScales = kChunks* kChunkGroups * 64;

// kNormed: the input is the residual row, RMSNorm applied, and outputs are stored; else fp16, and outputs are added.
template <bool kNormed, int kChunks>
__global__ void __launch_bounds__(kThreads, 2) affine_gemv_resident(ResidentParams p) {
  constexpr int kGroups = kChunks * kChunkGroups;
  constexpr int kRounds = (kGroups * kGroup + kFixedRoundInputs<kWarps> - 1) / kFixedRoundInputs<kWarps>;
  constexpr uint32_t kTileBytes = kTileCodes<kChunks> + kTileScales<kChunks>;
  constexpr uint32_t kUnitCodes = kTileCodes<1>, kUnitScales = kTileScales<1>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ uint64_t full[kMostTiles];
  __shared__ float squares[kWarps];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first = p.w.tiles * block / blocks, count = p.w.tiles * (block + 1) / blocks - first;
  const int k = p.w.groups * kGroup;

  launch_dependents();
  if (tid == 0) {
    for (uint64_t& barrier : full) barrier_init(&barrier, 1);
    fence_async_proxy();
    for (int i = 0; i < count; ++i) {
      const auto tile = static_cast<size_t>(first + i);
      std::byte* to = shared + i * kTileBytes;
      barrier_expect(&full[i], kTileBytes);
      bulk_copy_part(to, p.w.codes + tile * p.w.codes_per_tile(), kTileCodes<kChunks>, &full[i]);
      bulk_copy_part(to + kTileCodes<kChunks>, p.w.scales + tile * p.w.scales_per_tile(), kTileScales<kChunks>,
                     &full[i]);
    }
  }
  std::byte* x_memory = shared + count * kTileBytes;
  const FixedRow x(x_memory, kGroups);
  auto* units = reinterpret_cast<float*>(x_memory + FixedRow::bytes(kGroups));
  FixedInputs norm[kRounds];
  if constexpr (kNormed) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = fixed_input<kWarps>(i);
      norm[i] = {};
      if (at < k)
        norm[i] = {*reinterpret_cast<const float2*>(p.in.norm + at),
                   *reinterpret_cast<const float2*>(p.in.norm + at + 8)};
    }
  }
  const int n = first * kTileRows + tid;
  const bool mine = tid < count * kTileRows && n < p.columns;
  __syncthreads();  // the barriers stand
  // Here and not at their use, where each wait would hold up the loads from shared memory.
  for (int i = 0; i < count; ++i) barrier_wait(&full[i], 0);
  grid_dependency_wait();

  FixedInputs v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = fixed_input<kWarps>(i);
    v[i] = {};
    if (at < k) v[i] = kNormed ? load_fixed(p.in.residual, at) : load_fixed(p.in.half, at);
  }
  float old = 0;
  if (!kNormed && mine) old = __ldcg(p.out + n);
  if constexpr (kNormed) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      sum += v[i].squares();
      v[i].low.x *= norm[i].low.x, v[i].low.y *= norm[i].low.y;
      v[i].high.x *= norm[i].high.x, v[i].high.y *= norm[i].high.y;
    }
    sum = sum_lanes(sum);
    if (lane == 0) squares[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    store_fixed<kWarps>(x, i, v[i], i * (kFixedRoundInputs<kWarps> / kGroup) + tid / 16 < kGroups);
  __syncthreads();

  // A warp has one chunk, of every so many tiles.
  static_assert(kWarps % kChunks == 0);
  const int chunk = warp % kChunks;
  const FixedChunk input(x, chunk);
  for (int tile = warp / kChunks; tile < count; tile += kWarps / kChunks) {
    const std::byte* from = shared + tile * kTileBytes;
    FixedUnit unit;
    unit.load(from + chunk * kUnitCodes, from + kTileCodes<kChunks> + chunk * kUnitScales);
    store_fixed_unit(units + (tile * kChunks + chunk) * kTileRows,
                     scale_fixed(multiply_fixed(unit, input), unit.scale, input));
  }
  __syncthreads();
  if (!mine) return;
  float total = sum_fixed_units<kChunks>(units + tid / kTileRows * kChunks * kTileRows, tid % kTileRows);
  if constexpr (kNormed) total *= fixed_norm<kWarps>(squares, k, p.in.eps);
  p.out[n] = old + total;
}

int blocks_for(const DeviceInfo& device, const PackedView& w) { return std::min(w.tiles, device.multiprocessors); }

size_t shared_bytes(const PackedView& w, int tiles) {
  const auto most = static_cast<size_t>(tiles);
  const size_t tile = w.codes_per_tile() * sizeof(uint4) + w.scales_per_tile() * sizeof(uint2);
  return most * (tile + sizeof(float) * kTileRows * static_cast<size_t>(w.padded_groups / kChunkGroups)) +
         FixedRow::bytes(w.padded_groups);
}

template <bool kNormed>
void launch_resident(const Launch& launch, const ResidentParams& p) {
  const int blocks = blocks_for(launch.device, p.w);
  const auto run = [&](auto kernel) {
    launch_kernel(launch, kernel, dim3(static_cast<unsigned>(blocks)), kThreads,
                  shared_bytes(p.w, (p.w.tiles + blocks - 1) / blocks), 1, p);
  };
  switch (p.w.padded_groups / kChunkGroups) {
    case 1:
      return run(affine_gemv_resident<kNormed, 1>);
    case 2:
      return run(affine_gemv_resident<kNormed, 2>);
    case 8:
      return run(affine_gemv_resident<kNormed, 8>);
    case 16:
      return run(affine_gemv_resident<kNormed, 16>);
    default:
      check(false, "a width that resident_fits() accepts");
  }
}

}  // namespace

bool resident_fits(const DeviceInfo& device, const PackedView& w) {
  if (!device.is_hopper() || w.bits != 4) return false;
  const int chunks = w.padded_groups / kChunkGroups, blocks = blocks_for(device, w);
  const int tiles = (w.tiles + blocks - 1) / blocks;
  return (chunks == 1 || chunks == 2 || chunks == 8 || chunks == 16) && tiles <= kMostTiles &&
         shared_bytes(w, tiles) <= kMostBytes;
}

void gemv_resident(const Launch& launch, const PackedView& w, const GemvInput& in, float* out, int columns, bool add) {
  check(in.heads == nullptr && in.normed_out == nullptr, "the resident form writes outputs only, for the step's row");
  const bool normed = in.residual != nullptr;
  check(normed != add, "a normed input's outputs are stored, others added");
  if (normed) return launch_resident<true>(launch, {w, in, out, columns});
  launch_resident<false>(launch, {w, in, out, columns});
}

}  // namespace calla::cuda
