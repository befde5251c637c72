#pragma once
// What a step tells the kernels: built on the host in begin(), copied to the device in one piece.
#include <cuda_fp16.h>

#include <cstdint>

#include "backend/sampling.h"
#include "model/shape.h"

namespace calla::cuda {

struct StepSequence {
  int32_t slot = 0;       // recurrent slot
  int32_t first_row = 0;  // of the batch
  int32_t rows = 0;
  int32_t position = 0;     // of first_row
  int32_t page_offset = 0;  // its page table starts at pages[page_offset]
  int32_t log = 0;          // of its states; means nothing if the step keeps none
};

struct StepHead {
  int32_t row = 0;
  int32_t slot = 0;
  int32_t pick = 0;
  float uniform = 0;         // draw_uniform(seed, position of the token to be picked)
  int32_t mask_offset = -1;  // words into masks; -1: every token is allowed
  int32_t result = 0;        // where in the results the picked token goes
  SamplingParams sampling;
};

// Device pointers of one step. In a recorded step they point to a fixed block, so that replays see new contents.
struct StepView {
  const TokenId* tokens = nullptr;
  const StepSequence* sequences = nullptr;
  const StepHead* heads = nullptr;
  const int32_t* pages = nullptr;
  const uint32_t* masks = nullptr;
  int rows = 0;
  int sequence_count = 0;
  int head_count = 0;
};

// A tile of attention rows: consecutive tokens of one sequence.
struct AttentionTile {
  int32_t sequence = 0;
  int32_t first = 0;  // row within the sequence
};

// experts_up stores hidden * kHiddenScale as fp16, so that its range ends at 4e6 instead of 65504.
inline constexpr float kHiddenScale = 1.0f / 64;

// The activation slots in device memory; all sized for max_rows.
struct Activations {
  float* residual = nullptr;       // [R][hidden]
  __half* normed = nullptr;        // [R][hidden] input of the next projection (prefill form)
  float* projected = nullptr;      // [R][layer.in.width] the projection's parts side by side
  uint16_t* attn_q = nullptr;      // [R][q_width] bf16
  __half* mixed = nullptr;         // [R][mixer_width]
  __half* moe_input = nullptr;     // [R][hidden]
  float* router_logits = nullptr;  // [R][router.width]: experts, then the shared gate's own 16 columns
  int32_t* expert_ids = nullptr;   // [R][8]
  float* expert_weights = nullptr;
  float* shared_gate = nullptr;  // [R]
  __half* hidden = nullptr;      // [R][8 * expert_width + shared_width], times kHiddenScale
  float* logits = nullptr;       // [max_heads][vocab]
};

#ifdef __CUDACC__
// The sequence that `row` belongs to. A decode step has one row a sequence.
__device__ __forceinline__ int find_sequence(const StepView& step, int row) {
  if (step.sequence_count == step.rows) return row;
  int s = 0;
  while (s + 1 < step.sequence_count && step.sequences[s + 1].first_row <= row) ++s;
  return s;
}
#endif

}  // namespace calla::cuda
