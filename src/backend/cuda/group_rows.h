#pragma once
// Rows by expert, on the device: what the grouped matrix products of prefill need, without a look from the host.
#include "backend/cuda/gemm.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"

namespace calla::cuda {

struct Grouping {
  int32_t* pairs = nullptr;     // [rows * 8] row * 8 + choice, sorted by expert
  ExpertTile* tiles = nullptr;  // [max_tiles(rows, experts)]
  int32_t* tile_count = nullptr;
};

// Upper bound on the tiles of a step.
int max_expert_tiles(int rows, int experts);
// expert_ids -> histogram -> prefix sum -> pairs and tiles. Experts <= 1024.
void group_by_expert(const Launch& launch, const int32_t* expert_ids, int rows, int experts, const Grouping& out);

// residual[row] += (sum_i weight_i y[row][i] + shared_gate y[row][8]) / kHiddenScale; y bf16 [row][9][hidden].
void sum_experts(const Launch& launch, const Activations& a, const uint16_t* y, int rows, int hidden);

}  // namespace calla::cuda
