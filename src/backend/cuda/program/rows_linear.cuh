#pragma once
// The rows kernel's projections: kOut and kProject.
#include "backend/cuda/program/rows_block.cuh"

namespace calla::cuda::rows {

__device__ __forceinline__ uint32_t multiply_halves(uint32_t pair, __half2 factor) {
  const __half2 v = __hmul2(*reinterpret_cast<const __half2*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// residual += W mixed: a block takes one tile, a warp one chunk of its 4096 inputs. The first phase of a program finds
// `mixed` in its slot, another receives it.
__device__ __forceinline__ void out_phase(const Block& b, RingPlace& ring, bool first, bool last, RowsTags& tags) {
  const int warp = b.warp, lane = b.lane;
  OutArea& area = b.s.area.out;
  const int piece = warp * 32 + lane, sender = warp * 8 + lane / 4;
  WideWord w[kMost];
  float squares[kMost];
  if (first) {
#pragma unroll
    for (int row = 0; row < kMost; ++row) {
      const uint4 v =
          __ldcg(reinterpret_cast<const uint4*>(b.program.a.mixed) + b.at(row < b.rows ? row : 0, kMixed / 8) + piece);
      w[row] = {v.x, v.y, v.z, v.w};
      squares[row] = 0;
    }
  } else {
    receive<kMixed / 8>(
        w, &b.words.mixed[0][piece], b.rows, squares,
        [&](int row) { return &b.words.mixed_squares[row < b.rows ? row : 0][sender]; }, tags.of(WordKind::kMixed));
  }
#pragma unroll
  for (int row = 0; row < kMost; ++row) {
    float total = squares[row] + __shfl_xor_sync(0xffffffffu, squares[row], 4);  // four senders have a head
    total += __shfl_xor_sync(0xffffffffu, total, 8);
    const __half2 scale = __float2half2_rn(first ? 1.0f : scale_of_squares(squares[row], total, b.program.eps));
    const WideWord& v = w[row];
    *reinterpret_cast<uint4*>(area.x + static_cast<uint32_t>(row) * row_bytes(kMixed) + piece * 16) =
        make_uint4(multiply_halves(v.part[0], scale), multiply_halves(v.part[1], scale),
                   multiply_halves(v.part[2], scale), multiply_halves(v.part[3], scale));
  }
  __syncwarp();  // the warp has staged its own chunk
  ChunkColumns x;
  x.load(area.x + static_cast<uint32_t>(lane % 8) * row_bytes(kMixed), warp, lane);
  pass_slots(b, ring, kOutSlots, [&](int i, const std::byte* slot) {
    if (warp / kChunks == i) multiply_unit(area.units[warp], slot, warp % kChunks, x, lane);
  });
  consumer_barrier();
  if (!last) tags.turn(WordKind::kResidual);
  if (warp < kMost * kTileRows / 32) {
    const ResidualPlace at(b.tid);
    send_residual(b, at, b.s.residual[at.row][at.output] + sum_units<kWarps>(area.units, at.row, at.output), last,
                  tags.of(WordKind::kResidual));
  }
}

// projected = W RMSNorm(residual): tiles shared out among the blocks.
__device__ __forceinline__ void project_phase(const Block& b, const TokenPhase& p, RingPlace& ring,
                                              const RowsTags& tags) {
  const int tid = b.tid, warp = b.warp, chunk = warp / 2;
  ProjectArea& area = b.s.area.project;
  const TileShare share(p.tiles);
  stage_residual(b, area.x, tags.of(WordKind::kResidual));
  pair_barrier(warp);
  ChunkColumns x;
  x.load(area.x + static_cast<uint32_t>(b.lane % 8) * row_bytes(kHidden), chunk, b.lane);
  pass_slots(b, ring, share.count, [&](int i, const std::byte* slot) {
    if (i % 2 == warp % 2) multiply_unit(area.units[i][chunk], slot, chunk, x, b.lane);
  });
  consumer_barrier();
  const int outputs = share.count * kTileRows, width = p.tiles * kTileRows;
  for (int i = tid; i < outputs * b.rows; i += kWorkers) {
    const int row = i / outputs, output = i % outputs;
    b.program.a.projected[b.at(row, width) + share.first * kTileRows + output] =
        row_factor(b, row) * sum_units<kChunks>(area.units[output / kTileRows], row, output % kTileRows);
  }
}

}  // namespace calla::cuda::rows
