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

constexpr int kMostTiles = 5;
// What a block may take, so that the next kernel's weights have room beside it.
constexpr size_t kMostBytes = 112 * 1024;

struct ResidentParams {
  PackedView w;
  GemvInput in;
  float* out;
  int columns;
  uint32_t tile_code_bytes, tile_scale_bytes;
};

template <bool kNormed, bool kAdd, int kRounds>
__global__ void __launch_bounds__(kFixedThreads, 2) affine_gemv_resident(ResidentParams p) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ uint64_t full[kMostTiles];
  __shared__ float squares[kFixedWarps];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int first = p.w.tiles * block / blocks, count = p.w.tiles * (block + 1) / blocks - first;
  const int chunks = p.w.padded_groups / kChunkGroups, k = p.w.groups * kGroup;
  const uint32_t tile_bytes = p.tile_code_bytes + p.tile_scale_bytes;

  launch_dependents();
  if (tid == 0) {
    for (uint64_t& barrier : full) barrier_init(&barrier, 1);
    fence_async_proxy();
    for (int i = 0; i < count; ++i) {
      const auto tile = static_cast<size_t>(first + i);
      barrier_expect(&full[i], tile_bytes);
      bulk_copy_part(shared + i * tile_bytes, p.w.codes + tile * p.w.codes_per_tile(), p.tile_code_bytes, &full[i]);
      bulk_copy_part(shared + i * tile_bytes + p.tile_code_bytes, p.w.scales + tile * p.w.scales_per_tile(),
                     p.tile_scale_bytes, &full[i]);
    }
  }
  std::byte* x_memory = shared + count * tile_bytes;
  const FixedRow x(x_memory, p.w.padded_groups);
  auto* units = reinterpret_cast<float*>(x_memory + FixedRow::bytes(p.w.padded_groups));
  FixedInputs norm_weights[kRounds];
  if constexpr (kNormed) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int at = fixed_input(i);
      norm_weights[i] = {};
      if (at < k)
        norm_weights[i] = {*reinterpret_cast<const float2*>(p.in.norm + at),
                           *reinterpret_cast<const float2*>(p.in.norm + at + 8)};
    }
  }
  grid_dependency_wait();

  FixedInputs v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = fixed_input(i);
    v[i] = {};
    if (at < k) v[i] = kNormed ? load_fixed(p.in.residual, at) : load_fixed(p.in.half, at);
  }
  const int n = first * kTileRows + tid;
  const bool mine = tid < count * kTileRows && n < p.columns;
  float old = 0;
  if (kAdd && mine) old = __ldcg(p.out + n);
  if constexpr (kNormed) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      sum += v[i].squares();
      v[i].low.x *= norm_weights[i].low.x, v[i].low.y *= norm_weights[i].low.y;
      v[i].high.x *= norm_weights[i].high.x, v[i].high.y *= norm_weights[i].high.y;
    }
    sum = sum_lanes(sum);
    if (lane == 0) squares[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    store_fixed(x, i, v[i], i * (kFixedRoundInputs / kGroup) + tid / 16 < p.w.padded_groups);
  __syncthreads();

  // Chunks divide the warps, so a warp's chunk stays the same.
  const int chunk = warp % chunks, tile_step = kFixedWarps / chunks;
  const FixedChunk input(x, chunk);
  for (int tile = warp / chunks; tile < count; tile += tile_step) {
    barrier_wait(&full[tile], 0);
    const std::byte* from = shared + tile * tile_bytes;
    const float2 sums =
        multiply_fixed(reinterpret_cast<const uint4*>(from) + chunk * (kChunkGroups * 32),
                       reinterpret_cast<const uint2*>(from + p.tile_code_bytes) + chunk * (kChunkGroups * 8), input);
    store_fixed_unit(units + (tile * chunks + chunk) * kTileRows, sums);
  }
  __syncthreads();
  if (!mine) return;
  float total = sum_fixed_units(units + tid / kTileRows * chunks * kTileRows, chunks, tid % kTileRows);
  if constexpr (kNormed) total *= fixed_norm(squares, k, p.in.eps);
  p.out[n] = old + total;
}

int blocks_for(const DeviceInfo& device, const PackedView& w) { return std::min(w.tiles, device.multiprocessors); }

size_t shared_bytes(const PackedView& w, int tiles) {
  const auto most = static_cast<size_t>(tiles);
  const size_t tile = w.codes_per_tile() * sizeof(uint4) + w.scales_per_tile() * sizeof(uint2);
  return most * (tile + sizeof(float) * kTileRows * static_cast<size_t>(w.padded_groups / kChunkGroups)) +
         FixedRow::bytes(w.padded_groups);
}

template <bool kNormed, bool kAdd>
void launch_resident(const Launch& launch, const PackedView& w, const ResidentParams& p) {
  const int blocks = blocks_for(launch.device, w);
  const size_t bytes = shared_bytes(w, (w.tiles + blocks - 1) / blocks);
  const auto kernel = w.groups * kGroup <= kFixedRoundInputs ? affine_gemv_resident<kNormed, kAdd, 1>
                                                             : affine_gemv_resident<kNormed, kAdd, 2>;
  launch_kernel(launch, kernel, dim3(static_cast<unsigned>(blocks)), kFixedThreads, bytes, 1, p);
}

}  // namespace

bool resident_fits(const DeviceInfo& device, const PackedView& w) {
  if (!device.is_hopper() || w.bits != 4) return false;
  const int chunks = w.padded_groups / kChunkGroups, blocks = blocks_for(device, w);
  const int tiles = (w.tiles + blocks - 1) / blocks;
  return chunks <= kFixedWarps && kFixedWarps % chunks == 0 && tiles <= kMostTiles &&
         shared_bytes(w, tiles) <= kMostBytes;
}

void gemv_resident(const Launch& launch, const PackedView& w, const GemvInput& in, float* out, int columns, bool add) {
  ResidentParams p{w, in, out, columns, 0, 0};
  p.tile_code_bytes = static_cast<uint32_t>(w.codes_per_tile() * sizeof(uint4));
  p.tile_scale_bytes = static_cast<uint32_t>(w.scales_per_tile() * sizeof(uint2));
  check(in.heads == nullptr && in.normed_out == nullptr, "the resident form writes outputs only, for the step's row");
  if (in.residual != nullptr) {
    check(!add, "a normed input feeds a stored output");
    return launch_resident<true, false>(launch, w, p);
  }
  if (add) return launch_resident<false, true>(launch, w, p);
  launch_resident<false, false>(launch, w, p);
}

}  // namespace calla::cuda
