// affine_gemv: y[m][n] = sum_k w[n][k] x[m][k] for 1..8 rows, w packed 4- or 8-bit; RMSNorm of x folded in.
//   Launch    block 256 = 8 warps that split K; a block takes kTiles tiles of 16 outputs at a time and strides over the
//             tiles; its first weights are in registers before it waits for x (programmatic dependent launch).
//   Shared    x as B operands: 2 K bytes a row; partial sums: 512 kTiles bytes a row.
//   Moves     the weights once, K * 4 bytes of x a block (from L2). Bandwidth-bound: floor = bytes / peak.
//   Numerics  x rounded to fp16, codes exact, sums in fp32 in an order fixed by K alone: a row's result does not depend
//             on the other rows of the batch.
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/linear_decode.h"

namespace calla::cuda {
namespace {

struct GemvParams {
  PackedView w;
  GemvInput in;
  float* out;
  size_t out_stride;
  int rows;
  int columns;
};

template <int kBits, int kTiles, int kChunks, int kCols, bool kNormed, bool kAdd>
__global__ void __launch_bounds__(kGemvThreads, 3) affine_gemv(GemvParams p) {
  extern __shared__ uint4 shared[];
  __shared__ float scratch[kGemvWarps];
  const StagedInput<kCols> x(shared, p.w.padded_groups);
  float* partials = x.sums + p.w.padded_groups * kCols;
  const int k = p.w.groups * kGroup, warp = static_cast<int>(threadIdx.x / 32);

  launch_dependents();
  BlockProduct<kBits, kTiles, kChunks, kCols> product;
  int tile = static_cast<int>(blockIdx.x) * kTiles;
  product.prefetch(p.w, tile);
  grid_dependency_wait();

  const auto row_index = [&](int row) { return p.in.heads != nullptr ? p.in.heads[row].row : row; };
  __half* copy = blockIdx.x == 0 ? p.in.normed_out : nullptr;
  if constexpr (kCols == 1) {
    const size_t at = row_index(0) * p.in.stride;
    if constexpr (kNormed) {
      stage_row<true>(x, 0, p.in.residual + at, k, p.in.norm, p.in.eps, scratch, copy);
    } else {
      stage_row<false>(x, 0, p.in.half + at, k, nullptr, 0.0f, scratch, nullptr);
    }
  } else if (warp < p.rows) {
    const size_t at = row_index(warp) * p.in.stride;
    if constexpr (kNormed) {
      stage_row_by_warp<true>(x, warp, p.in.residual + at, k, p.in.norm, p.in.eps,
                              copy != nullptr ? copy + static_cast<size_t>(warp) * k : nullptr);
    } else {
      stage_row_by_warp<false>(x, warp, p.in.half + at, k, nullptr, 0.0f, nullptr);
    }
  }
  __syncthreads();

  while (true) {
    product.multiply(p.w, tile, x, partials);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTiles * kTileRows * kCols; i += kGemvThreads) {
      const int local = i / kCols, col = i % kCols, n = tile * kTileRows + local;
      if (col < p.rows && n < p.columns) {
        float* y = p.out + col * p.out_stride + n;
        const float total = sum_partials<kTiles, kCols>(partials, local, col);
        *y = kAdd ? *y + total : total;
      }
    }
    tile += static_cast<int>(gridDim.x) * kTiles;
    if (tile >= p.w.tiles) break;
    product.prefetch(p.w, tile);
    __syncthreads();  // the partial sums are free again
  }
}

template <int kBits, int kTiles, int kChunks, int kCols, bool kNormed, bool kAdd>
void launch_gemv(const Launch& launch, const GemvParams& p) {
  const size_t bytes =
      StagedInput<kCols>::bytes(p.w.padded_groups) + sizeof(float) * kGemvWarps * kTiles * kTileRows * kCols;
  const int blocks = (p.w.tiles + kTiles - 1) / kTiles;
  const int resident = launch.device.multiprocessors * 4;
  // Few blocks: one tile set each, so that all loads start at once. Many (lm_head): blocks stride.
  const int grid = blocks <= 2 * resident ? blocks : resident;
  launch_kernel(launch, affine_gemv<kBits, kTiles, kChunks, kCols, kNormed, kAdd>, dim3(static_cast<unsigned>(grid)),
                kGemvThreads, bytes, 1, p);
}

template <int kBits, int kTiles, int kChunks>
void choose_form(const Launch& launch, const GemvParams& p, bool add) {
  const bool normed = p.in.residual != nullptr;
  check(!(normed && add), "a normed input feeds a stored output");
  if (p.rows == 1) {
    if (normed) return launch_gemv<kBits, kTiles, kChunks, 1, true, false>(launch, p);
    if (add) return launch_gemv<kBits, kTiles, kChunks, 1, false, true>(launch, p);
    return launch_gemv<kBits, kTiles, kChunks, 1, false, false>(launch, p);
  }
  if (normed) return launch_gemv<kBits, kTiles, kChunks, 8, true, false>(launch, p);
  if (add) return launch_gemv<kBits, kTiles, kChunks, 8, false, true>(launch, p);
  return launch_gemv<kBits, kTiles, kChunks, 8, false, false>(launch, p);
}

}  // namespace

void gemv(const Launch& launch, const PackedView& w, const GemvInput& in, int rows, float* out, size_t out_stride,
          int columns, bool add) {
  check(rows >= 1 && rows <= kMaxGemvRows, "decode projections take 1 to 8 rows");
  const GemvParams p{w, in, out, out_stride, rows, columns};
  if (w.bits == 8) return choose_form<8, 1, 1>(launch, p, add);
  // Long rows: one tile, all of a warp's share of K in flight. Short rows: two tiles.
  if (w.groups > kGemvWarps * kChunkGroups) return choose_form<4, 1, 2>(launch, p, add);
  return choose_form<4, 2, 1>(launch, p, add);
}

}  // namespace calla::cuda
