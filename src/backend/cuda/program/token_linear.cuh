#pragma once
// The token kernel's projections: kOut and kProject.
#include "backend/cuda/program/token_block.cuh"

namespace calla::cuda::token {

// residual += W mixed: a block takes one tile, a warp one chunk of its 4096 inputs.
__device__ __forceinline__ void out_phase(const Block& b, RingPlace ring, uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32;
  BlockMemory& s = b.s;
  const TokenWords& words = *b.program.words;
  const WideWord* from = words.mixed + tid;
  const uint64_t* from_squares = words.squares + tid / 4;  // the sender's
  WideWord w = peek(from);
  uint64_t squares = peek(from_squares);
  finish_receiving(w, from, generation - 1);
  finish_receiving(squares, from_squares, generation - 1);
  const float mine = __uint_as_float(static_cast<uint32_t>(squares));
  float total = mine + __shfl_xor_sync(0xffffffffu, mine, 4);  // four senders have a head
  total += __shfl_xor_sync(0xffffffffu, total, 8);
  const float scale = mine < 0 ? 1.0f : scale_of_squares(mine, total, b.program.eps);
  store_eight(b.row(), unpack_eight(w), unpacked_factor(w) * scale);
  __syncwarp();  // the warp has staged its own chunk
  multiply_tiles<1>(b, ring.plus(warp / kChunks), 0, warp % kChunks, b.row(), warp, s.units + warp * kTileRows, 0);
  consumer_barrier();
  release(b, ring, kOutSlots);
  if (tid < kTileRows) send_residual(b, s.residual[tid] + sum_fixed_units<kWarps>(s.units, tid), generation);
}

// projected = W RMSNorm(residual): tiles shared out among the blocks.
__device__ __forceinline__ void project_phase(const Block& b, const TokenPhase& p, RingPlace ring,
                                              uint32_t generation) {
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, chunk = warp / 2;
  BlockMemory& s = b.s;
  const TileShare share(p.tiles);
  stage_residual(b, load_norm(p.norm), generation - 1);
  chunk_barrier(chunk);
#pragma unroll 1
  for (int tile = warp % 2; tile < share.count; tile += 2)
    multiply_tiles<1>(b, ring.plus(tile), 0, chunk, b.row(), chunk, s.units + (tile * kChunks + chunk) * kTileRows, 0);
  consumer_barrier();
  release(b, ring, share.count);
  if (tid < share.count * kTileRows)
    b.program.a.projected[share.first * kTileRows + tid] =
        fixed_norm<kWarps>(s.squares, kHidden, b.program.eps) *
        sum_fixed_units<kChunks>(s.units + tid / kTileRows * kChunks * kTileRows, tid % kTileRows);
}

}  // namespace calla::cuda::token
