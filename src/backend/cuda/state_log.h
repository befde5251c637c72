#pragma once
// A log of a recurrent state's last changes: the state in memory stays as it was for some tokens, of which the log has what
// the delta rule adds, and is written once for all of them. Reading both is as good as reading the state.
//
// Writing the states was a twelfth of the bytes of a step of eight sequences; so programs of several rows (program/rows_gdn.cuh)
// keep logs. Whoever else works on a state first has its log applied (RecurrentPool).
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/gdn.h"

namespace calla::cuda {

inline constexpr int kLogTokens = 3;  // of a log; with the next one the state is written

// Of one part of the state (state_place): a token changes it from S to decay S + key change^T.
struct StateLogEntry {
  float key[kGdnHeadDim];
  float change[kStateColumns];
  float decay;
  int32_t count;  // of the first entry: how many the log has
  float pad[2];   // to whole copies of 16 bytes
};
struct StateLog {
  StateLogEntry entries[kLogTokens];
};
static_assert(sizeof(StateLogEntry) % 16 == 0);

// Brings the states of `layers` layers, `layer_floats` apart and of `parts` parts each, up to their logs, and empties these.
void apply_logs(float* states, size_t layer_floats, StateLog* logs, int layers, int parts, cudaStream_t stream);

}  // namespace calla::cuda
