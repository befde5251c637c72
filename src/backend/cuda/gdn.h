#pragma once
// Gated DeltaNet: convolution, q/k normalisation, gates, the recurrence and the gated RMSNorm.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

// A head's state lies in parts of 32 columns, [part][128 keys][32], so that a block of the decode kernels finds its part in
// one piece. Where key `key` of column `column` lies:
inline constexpr int kStateColumns = 32, kStatePartFloats = kGdnHeadDim * kStateColumns;
__host__ __device__ constexpr size_t state_place(int head, int key, int column) {
  return static_cast<size_t>(head) * kGdnHeadDim * kGdnHeadDim +
         static_cast<size_t>(column / kStateColumns * kStatePartFloats + key * kStateColumns + column % kStateColumns);
}

// One GDN layer's view of a step.
struct GdnParams {
  StepView step;
  float* projected = nullptr;  // [row][stride]: qkv at 0, z, a, b at their columns
  size_t stride = 0;
  int z_column = 0, a_column = 0, b_column = 0;
  const float* conv = nullptr;        // [channels][4]
  const float* decay_rate = nullptr;  // [value_heads]
  const float* dt_bias = nullptr;
  const float* norm = nullptr;  // [128]
  float eps = 0;
  int key_heads = 0, value_heads = 0;
  // Recurrent memory of slot s: at state + s * slot_floats, the heads' states (state_place), then the convolution's last
  // three inputs [3][channels], oldest first.
  float* state = nullptr;
  size_t slot_floats = 0;
  __half* mixed = nullptr;  // [row][mixed_stride]
  size_t mixed_stride = 0;
  // Prefill scratch: convolved q, k (normalised) and v [row][channels], in whose place of v the scan leaves its output;
  // and the scalars of each block of four rows [gdn_blocks()][value_heads][kBlockScalars].
  float* convolved = nullptr;
  float* block_scalars = nullptr;

  __host__ __device__ int channels() const { return (2 * key_heads + value_heads) * kGdnHeadDim; }
  __host__ __device__ size_t state_floats() const {
    return static_cast<size_t>(value_heads) * kGdnHeadDim * kGdnHeadDim;
  }
};

// The scan takes a sequence's rows four at a time. Scalars of row t of a block, with G_t the product of the decays of
// rows 0..t of the block: G_t, beta_t, G_3 / G_t, 0; beta_t G_t / G_j k_t.k_j (j < t, else 0), 0; G_t / G_j q_t.k_j
// (j <= t, else 0).
inline constexpr int kBlockRows = 4;
inline constexpr int kBlockScalars = kBlockRows * 12;
// The most blocks that `rows` rows can make. Sequence s starts at block first_row / 4 + s.
constexpr size_t gdn_blocks(size_t rows) { return rows / kBlockRows + rows + 1; }

// True if the fused decode kernel can run: sm_90, and a key head's blocks fit a cluster.
bool gdn_decode_fits(const DeviceInfo& device, int key_heads, int value_heads);
// One token of each sequence (step.rows == step.sequence_count), everything in one kernel.
void gdn_decode(const Launch& launch, const GdnParams& p);

// Any rows: three kernels.
void gdn_prefill(const Launch& launch, const GdnParams& p);

}  // namespace calla::cuda
