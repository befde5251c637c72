#pragma once
// Memory of the attend stage.
#include <vector>

#include "backend/cpu/kernels.h"

namespace calla::cpu {

inline constexpr int kTileRows = 8;    // rows that share a page while it is in L2
inline constexpr int kPartRows = 512;  // positions per partial result; fixed, whatever the number of threads
inline constexpr int kPagesPerPart = kPartRows / kPageRows;
inline constexpr int kGroupFloats = kGqaFactor * kHeadDim;  // the query heads of one KV head

// What one thread needs for a tile of rows.
struct AttentionTile {
  AttentionPartial part[kTileRows];
  AttentionPartial total[kTileRows];
  alignas(64) float q[kTileRows][kGroupFloats];  // scaled
};

struct AttentionScratch {
  explicit AttentionScratch(int threads) : tiles(static_cast<size_t>(threads)) {}
  std::vector<AttentionTile> tiles;     // per thread
  std::vector<AttentionPartial> parts;  // when the parts of a row are spread over the threads
};

}  // namespace calla::cpu
