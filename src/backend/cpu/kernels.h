#pragma once
// The inner loops of the cpu backend, compiled once per instruction set and chosen at run time (Google
// Highway). Reading order of this folder:
//   kernels.h             what a kernel gets and does; *_kernels.cc the loops
//   activations.h         rows of activations in the form the matrix kernels take
//   linear.h              matrices times rows over all threads
//   state_pool.h          recurrent slots and KV pages
//   cpu_backend.h         the stages; stages_*.cc their bodies
#include <cstddef>
#include <cstdint>
#include <string>

#include "backend/cpu/half.h"
#include "base/bf16.h"
#include "model/shape.h"

namespace calla::cpu {

// --- matrices
// --------------------------------------------------------------------------------------------------------

// Outputs a matrix kernel computes at once: 16 consecutive rows of the weight matrix, one per lane. All that
// is summed for one output lies in one lane and in one order (along k), whatever the number of activation
// rows: a row's result does not depend on which other rows are in the batch.
inline constexpr int kPanel = 16;

// Quantised activations: a = d * (256 * hi + lo), 15 bits and a sign, one d per group of 64 (or 32) inputs. A
// row is a run of blocks of 128 inputs, 256 bytes each: the hi plane, then the lo plane. Within a plane the
// bytes are in the order in which the codes come out of the weights:
//   kSplit    the 64 even inputs, then the 64 odd ones (4-bit codes: low nibbles are even, high nibbles odd)
//   kNatural  as they are (8-bit codes)
// K is padded to whole blocks with zeros.
inline constexpr int kActivationBlock = 128;
enum class ByteOrder : uint8_t { kSplit, kNatural };

// Per row and group: the scale d and the sum of the group's (de-quantised) activations, for the weights'
// bias.
struct ActivationScale {
  float d;
  float sum;
};

// One panel times `m` rows: out[i][n] = sum_k w[n][k] * x[rows[i]][k].
struct PanelArgs {
  // Weights: row 0 of the panel; `valid` rows (1..16) exist, the other lanes repeat the last.
  const std::byte* codes = nullptr;  // packed codes, or bf16 values
  size_t row_bytes = 0;
  const bf16* scales = nullptr;
  const bf16* biases = nullptr;
  int groups = 0;  // per row of the matrix: the stride of scales and biases
  int group = 64;  // inputs per scale of the weights
  int valid = kPanel;
  int k = 0;
  // Activations: quantised (planes, act_scales) or fp32 (x), each with its stride from row to row.
  const int8_t* planes = nullptr;
  size_t plane_stride = 0;
  const ActivationScale* act_scales = nullptr;
  size_t act_scale_stride = 0;
  const float* x = nullptr;
  size_t x_stride = 0;
  const int32_t* rows = nullptr;  // [m], or null: 0, 1, 2 ...
  int m = 0;
  float* out = nullptr;  // [m][16], 64-byte aligned
  // The panel that this thread reads next: its lines are fetched ahead, in the order in which they lie in
  // memory.
  const std::byte* next_codes = nullptr;
  const bf16* next_scales = nullptr;
  const bf16* next_biases = nullptr;
};

using PanelKernel = void (*)(const PanelArgs&);

struct MatmulKernels {
  PanelKernel int4_g64, int4_g32, int8_g64, int8_g32;  // quantised activations with groups of 64 or 32
  PanelKernel float4, float8, float_bf16;              // fp32 activations, exact weights
};

// --- rows
// ------------------------------------------------------------------------------------------------------------

// Logits per block of block_maxima.
inline constexpr size_t kMaxBlock = 64;

struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*rmsnorm)(const float* x, const float* weight, int n, float eps, float* out);
  // Quantises a row of k inputs (see above) with groups of `group` (32 or 64).
  void (*quantize)(const float* x, int k, int group, ByteOrder order, int8_t* planes, ActivationScale* scales);
  // Panels [m][16], of which n columns count, to rows of a matrix: row i goes to out + rows[i] * stride (rows
  // null: i).
  //   store   out = y              add   out += weights[i] * y (weights null: 1)
  //   swiglu  out = silu(gate) * up
  void (*store)(const float* y, int m, int n, float* out, size_t stride, const int32_t* rows);
  void (*add)(const float* y, int m, int n, const float* weights, float* out, size_t stride, const int32_t* rows);
  void (*swiglu)(const float* gate, const float* up, int m, int n, float* out, size_t stride, const int32_t* rows);
  // out += weight * y
  void (*axpy)(float weight, const float* y, int n, float* out);
  // x *= sigmoid(gate)
  void (*sigmoid_gate)(const float* gate, int n, float* x);
  // The largest of n values, lowest index first; -1 if one is NaN or none exceeds -infinity.
  int64_t (*argmax)(const float* x, int64_t n);
  // The largest of each block of kMaxBlock values; false if one is NaN.
  bool (*block_maxima)(const float* x, int64_t n, float* maxima);
};

// --- Gated DeltaNet
// --------------------------------------------------------------------------------------------------

// State of one value head: [column block 8][key 128][column 16] fp32, so that a block of value columns is 8
// KiB in a row and stays in L1 while the rows of a chunk go by.
inline constexpr int kStateColumns = 16;
inline constexpr int kGdnStateFloats = kGdnHeadDim * kGdnHeadDim;
constexpr size_t gdn_state_index(int key, int value) {
  return (static_cast<size_t>(value / kStateColumns) * kGdnHeadDim + key) * kStateColumns + value % kStateColumns;
}

struct GdnKernels {
  // out[t][0..n) = silu(sum_j taps[j][.] * x[t - 3 + j][.]) for `rows` rows; rows before the first come from
  // tail [3][.] (oldest first). x, tail and taps have their own strides; n is a multiple of 16.
  void (*conv_silu)(const float* x, size_t x_stride, const float* tail, size_t tail_stride, const float* taps,
                    size_t taps_stride, int rows, int n, float* out);
  // Each of `rows` rows [128]: x *= scale / sqrt(sum x^2 + 1e-6)
  void (*l2norm)(float* x, int rows, float scale);
  // The recurrence over `rows` rows: q, k, v, out [rows][128], decay and beta [rows].
  void (*scan)(const float* q, const float* k, const float* v, const float* decay, const float* beta, int rows,
               float* state, float* out);
  // out = rmsnorm(o, weight) * silu(z), [128]
  void (*gated_norm)(const float* o, const float* weight, const float* z, float eps, float* out);
};

// --- attention
// -------------------------------------------------------------------------------------------------------

// A page of one KV head: keys of 64 positions, with the position in the lane, and values, with the dimension in the lane.
//   keys [4 blocks][256 dims][16 positions]     values [8 blocks][64 positions][32 dims]     (half, or float)
inline constexpr int kPageRows = 64;
inline constexpr int kKeyBlock = 16;
inline constexpr int kValueBlock = 32;
constexpr size_t key_index(int row, int dim) {
  return (static_cast<size_t>(row / kKeyBlock) * kHeadDim + dim) * kKeyBlock + row % kKeyBlock;
}
constexpr size_t value_index(int row, int dim) {
  return (static_cast<size_t>(dim / kValueBlock) * kPageRows + row) * kValueBlock + dim % kValueBlock;
}

// The 8 query heads of one KV head, for one row: online softmax over pages. `out` holds sum p * v not yet divided.
struct AttentionPartial {
  alignas(64) float out[kGqaFactor * kHeadDim];
  float max[kGqaFactor];
  float sum[kGqaFactor];
};

struct AttentionKernels {
  void (*reset)(AttentionPartial* partial);
  // q [8][256], scaled; the first `rows` positions of a page. `next`: the keys (values behind them) to fetch ahead.
  void (*page_half)(const float* q, const half* keys, const half* values, int rows, const half* next,
                    AttentionPartial* partial);
  void (*page_float)(const float* q, const float* keys, const float* values, int rows, const float* next,
                     AttentionPartial* partial);
  // into += from
  void (*merge)(const AttentionPartial* from, AttentionPartial* into);
  // out [8][256] = sum p * v / sum p
  void (*finish)(const AttentionPartial* partial, float* out);
};

struct Kernels {
  std::string name;  // "AVX-512 VNNI"
  MatmulKernels matmul;
  RowKernels row;
  GdnKernels gdn;
  AttentionKernels attention;
};

// The best kernels this machine can run; allow_avx512 = false leaves out the widest.
Kernels choose_kernels(bool allow_avx512 = true);

}  // namespace calla::cpu
