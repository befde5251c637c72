#pragma once
// The model as the encoder needs it: every matrix with its buffers and the pipelines that fit its format, every small
// vector uploaded. Built once; encoding a step only reads it.
#include <optional>
#include <vector>

#include "backend/metal/device.h"
#include "backend/metal/options.h"
#include "backend/metal/params.h"
#include "backend/metal/weight_buffers.h"
#include "model/shape.h"

namespace calla::metal {

struct BoundMatrix {
  BufferSpan codes;   // or bf16 values
  BufferSpan scales;  // the codes again for bf16: bound, never read
  BufferSpan biases;
  mtl::MatrixShape shape{};
  int bits = 4;  // 16: bf16
  int stack = 1;

  double weights() const { return static_cast<double>(stack) * shape.n * shape.k; }
};

// A pipeline for 16-row tiles and one for 32-row tiles.
struct TileKernels {
  const Kernel* rows16 = nullptr;
  const Kernel* rows32 = nullptr;
  const Kernel& of(int tile) const { return tile == 32 ? *rows32 : *rows16; }
};

// A dense matrix with its GEMM.
struct DenseMatrix {
  BoundMatrix matrix;
  TileKernels gemm;
};

struct GdnPlan {
  DenseMatrix qkv, z, a, b, out;
  BufferSpan conv, a_log, dt_bias, norm;
  const Kernel* project = nullptr;  // rmsnorm_qmv
  const Kernel* project_out = nullptr;
};

struct AttentionPlan {
  DenseMatrix q, k, v, out;
  BufferSpan q_norm, k_norm;
  const Kernel* project = nullptr;
  const Kernel* project_out = nullptr;
};

struct MoePlan {
  DenseMatrix router, shared_expert_gate;
  BoundMatrix gate, up, down, shared_gate, shared_up, shared_down;
  const Kernel* route = nullptr;  // rmsnorm_qmv
  const Kernel* up_qmv = nullptr;
  const Kernel* down_qmv = nullptr;
  TileKernels up_qmm;
  TileKernels down_qmm;
  // Controls of the ablations.
  const Kernel* gate_up_apart = nullptr;
  const Kernel* down_apart = nullptr;
  TileKernels up_qmm_bf16;
  TileKernels down_qmm_bf16;
  const Kernel* dequantise_up = nullptr;
  const Kernel* dequantise_down = nullptr;
};

struct LayerPlan {
  BufferSpan input_norm, post_norm;
  std::optional<GdnPlan> gdn;
  std::optional<AttentionPlan> attention;
  MoePlan moe;
  int index_in_kind = 0;  // among the layers of its kind
};

struct ModelPlan {
  BoundMatrix embedding;
  BufferSpan final_norm;
  BoundMatrix lm_head;
  BufferSpan rope_frequencies;
  std::vector<LayerPlan> layers;
  const Kernel* embed = nullptr;
  const Kernel* head = nullptr;  // rmsnorm_qmv
};

// `tensor_ops`: take the GEMMs with tensor operations.
ModelPlan make_plan(Device& device, const WeightBuffers& buffers, const ModelShape& shape, const ModelWeights& weights,
                    const Ablations& ablations, bool tensor_ops);

// A matrix with its buffers. Throws as check_matrix does.
BoundMatrix bind_matrix(const WeightBuffers& buffers, const WeightMatrix& matrix, const char* name);

// Throws CheckpointError if the kernels cannot run this matrix (a format or a size that they do not have).
void check_matrix(const WeightMatrix& matrix, const char* name);

}  // namespace calla::metal
