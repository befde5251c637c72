#pragma once
// Which form of a kernel runs for which shape: every threshold of the backend, apart from kernels and launch code.
#include <algorithm>

#include "backend/metal/params.h"
#include "model/shape.h"

namespace calla::metal {

struct Policy {
  // Dense matrices: from this many rows on, weights are expanded once a tile instead of once a row.
  int gemm_rows = 8;
  // Experts: grouping pays when an expert sees a second row, at experts / kExpertsPerToken rows on average.
  int grouped_rows = 32;
  // Attention rows that one dispatch of the decode kernel takes, and from which a sequence uses tiles instead.
  int sdpa_rows = 8;
  int fixed_block_from = mtl::kFixedBlockFrom;

  bool use_gemm(int rows) const { return rows >= gemm_rows; }
  bool use_grouped(int rows) const { return rows >= grouped_rows; }

  // 32-row tiles when the average expert fills at least half of one.
  static int expert_tile(int rows, int experts, bool wide) {
    return wide && rows * kExpertsPerToken >= 16 * experts ? 32 : 16;
  }
  static int dense_tile(int rows, bool wide) { return wide && rows > 16 ? 32 : 16; }
  static size_t tile_threads(int tile) { return tile == 32 ? mtl::kTileThreads : mtl::kTileThreads / 2; }

  // Key ranges of the decode attention. General layout: a simdgroup waits for memory at each of its keys, so ranges have
  // 64 of them, eight a simdgroup, until there are 16 ranges (with two threadgroups for each of two KV heads 64
  // threadgroups, one or two a core on the largest GPUs); from 4,096 keys on 256, and at most 32 ranges. Below 128 keys
  // one range costs less than the dispatch that merges two.
  bool fixed_blocks(int keys) const { return keys >= fixed_block_from; }
  int splits(int keys) const {
    if (fixed_blocks(keys)) return (keys + mtl::kFixedBlockKeys - 1) / mtl::kFixedBlockKeys;
    return std::clamp(keys / 256, std::clamp(keys / 64, 1, 16), 32);
  }

  // Multiply-adds of one attention dispatch: more are cut into several.
  double attention_work = 16e9;
};

}  // namespace calla::metal
