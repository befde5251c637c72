#pragma once
// The Metal backend: the stages of backend.h as dispatches. docs/metal.md is the map.
//
// Reading order: params.h and kernels/ (what runs), policy.h (which form when), plan.h (the model, bound), encoder.h
// (dispatches and barriers), sequence_memory.h, then the stages: stages_gdn.cc, stages_attention.cc, stages_moe.cc and
// stages_ends.cc (embedding, head, pick). metal_backend.cc has construction and the life of a step.
//
// Two steps are in flight: each has its own step buffer (rows, page table, sampling parameters), logits and picked
// tokens; the activations are shared, since the GPU works on one step after the other. A token goes from one step to
// the next through the slot's last-token word and never needs the CPU.
#include <array>
#include <memory>
#include <optional>

#include "backend/backend.h"
#include "backend/metal/encoder.h"
#include "backend/metal/options.h"
#include "backend/metal/plan.h"
#include "backend/metal/policy.h"
#include "backend/metal/residency.h"
#include "backend/metal/sequence_memory.h"

namespace calla::metal {

class MetalBackend final : public Backend {
 public:
  MetalBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options,
               const MetalTestOptions& test_options = {});
  ~MetalBackend() override;

  std::string name() const override { return "metal"; }
  std::string description() const override;
  bool asynchronous() const override { return true; }

  void allocate_state(const StateMemoryPlan& plan) override;
  size_t recurrent_slot_bytes() const override { return SequenceMemory::recurrent_slot_bytes(shape_); }
  size_t kv_page_bytes() const override { return SequenceMemory::kv_page_bytes(shape_); }
  void clear_recurrent(int slot) override { pool().clear_recurrent(encoder_, slot); }
  void copy_recurrent(int from, int to) override { pool().copy_recurrent(encoder_, from, to); }
  void copy_kv_page(int from, int to, int rows) override { pool().copy_kv_page(encoder_, from, to, rows); }
  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) override;
  std::string state_layout() const override { return "metal-1"; }
  void export_recurrent(int slot, std::span<std::byte> out) override;
  void import_recurrent(int slot, std::span<const std::byte> in) override;
  void export_kv_page(int page, std::span<std::byte> out) override;
  void import_kv_page(int page, std::span<const std::byte> in) override;
  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override;
  void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) override;
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override;
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v) override;

  bool begin(const Batch& batch) override;
  void embed() override;
  void project_gdn(int layer) override;
  void mix_gdn(int layer) override;
  void project_attention(int layer) override;
  void prepare_attention(int layer) override;
  void attend(int layer) override;
  void project_residual(int layer) override;
  void route(int layer) override;
  void group_rows(int layer) override;
  void experts_up(int layer) override;
  void experts_down(int layer) override;
  void head() override;
  void pick() override;
  StepId submit() override;
  void wait(StepId step) override;
  std::span<const float> logits(StepId step, int head_index) override;
  std::span<const TokenId> picked(StepId step) override;
  double probe_read_bandwidth() override;
  void read_slot(Slot slot, std::span<float> out) override;
  void write_slot(Slot slot, std::span<const float> in) override;

  // Of the step submitted last.
  const EncoderCounts& step_counts() const { return step_counts_; }
  bool uses_tensor_ops() const { return tensor_ops_; }

 private:
  // What one step needs for itself: written by the CPU while the other step runs.
  struct StepBuffers {
    BufferSpan rows;             // RowInfo
    BufferSpan sequences;        // SequenceInfo
    BufferSpan sequence_of_row;  // int
    BufferSpan pages;            // int
    BufferSpan tiles;            // AttentionTile
    BufferSpan heads;            // HeadInfo
    BufferSpan head_rows;        // int
    BufferSpan masks;            // uint32
    BufferSpan phases;           // int [GDN layers][sequences]
    BufferSpan logits;
    BufferSpan picked;
    StepId id = 0;
    std::vector<NS::SharedPtr<MTL::CommandBuffer>> command_buffers;
  };

  // Activations that are no slots.
  struct Scratch {
    BufferSpan normed;         // [R, H] bf16
    BufferSpan conv_out;       // [R, C] bf16
    BufferSpan gates;          // [R, Hv] float2
    BufferSpan scan_out;       // [R, Vw] f32
    BufferSpan router_logits;  // [R, E] f32
    BufferSpan shared_logit;   // [R] f32
    BufferSpan sorted;         // [R * 9] int
    BufferSpan blocks;         // ExpertBlock
    BufferSpan groups;         // 6 uint
    BufferSpan pair_out;       // [R, 9, H] bf16
    BufferSpan partials;       // decode attention, ranges
    BufferSpan sums;
    BufferSpan slice_max;     // SliceMax [heads, slices]
    BufferSpan pick_weights;  // [heads, vocab rounded up to 4] f32
    BufferSpan expanded[3];   // only with fused-dequant ablated: gate, up, down of a layer, bf16
  };

  // Kernels that depend on nothing but the options and the matrix units.
  struct Kernels {
    const Kernel* rmsnorm;
    const Kernel* gdn_step;
    const Kernel* gdn_conv;
    const Kernel* gdn_scan;
    const Kernel* gdn_gated_norm;
    const Kernel* prepare_qkv;
    const Kernel* sdpa_decode[2][2][2];  // [single pass][fold prepare][fixed blocks]
    const Kernel* sdpa_merge;
    const Kernel* sdpa_tile;
    const Kernel* router_topk;
    const Kernel* moe_group_rows;
    const Kernel* experts_combine;
    const Kernel* swiglu;
    const Kernel* pick_max;
    const Kernel* pick_weights;
    const Kernel* pick_token;
  };

  // --- metal_backend.cc ---
  void choose_matrix_units(const ModelWeights& weights);
  void make_kernels();
  void allocate_activations();
  SequenceMemory& pool();
  StepBuffers& step() { return steps_[next_step_ % kStepsInFlight]; }
  const BufferSpan& slot(Slot which) const { return slots_[static_cast<size_t>(which)]; }
  void synchronise();  // commits, and waits until the GPU is idle
  void flush_deferred();
  void fill_step(const Batch& batch);

  // --- stages ---
  // Matrices over the same RMSNorm of the residual stream, as GEMV or GEMM; `normed` gets the normalised rows.
  struct Output {
    const DenseMatrix* matrix;
    BufferSpan out;
    bool is_float;
  };
  void project(const Kernel& qmv, const BufferSpan& norm, std::span<const Output> outputs, const BufferSpan& normed,
               bool keep_normed);
  void gemm(const DenseMatrix& matrix, const BufferSpan& x, int in_stride, const BufferSpan& out, int out_stride);
  mtl::GdnParams gdn_params(const LayerPlan& layer) const;
  mtl::AttentionParams attention_params(const LayerPlan& layer) const;
  void dispatch_prepare(int layer);
  void attend_tiles(const LayerPlan& layer);
  void attend_rows(const LayerPlan& layer, bool fold);
  mtl::ExpertsParams up_params(const MoePlan& moe) const;
  mtl::ExpertsParams down_params(const MoePlan& moe) const;
  void experts_up_apart(const MoePlan& moe);
  void experts_down_apart(const MoePlan& moe);
  void combine();
  void group_rows_on_cpu(const mtl::GroupParams& params);
  BoundMatrix expanded(const Kernel& dequantise, const BoundMatrix& matrix, int which);

  const ModelShape shape_;
  const BackendOptions options_;
  const Ablations ablations_;
  const MetalTestOptions test_options_;
  Policy policy_;
  Device device_;
  std::optional<WeightBuffers> weights_;
  ModelPlan plan_;
  Residency residency_;
  bool tensor_ops_ = false;
  std::string tensor_note_;  // why tensor operations are not used
  Kernels kernels_{};
  StepEncoder encoder_;
  std::array<BufferSpan, static_cast<size_t>(Slot::kLogits) + 1> slots_;
  Scratch scratch_;
  std::optional<SequenceMemory> pool_;
  std::array<StepBuffers, kStepsInFlight> steps_;

  // The step being recorded.
  StepId next_step_ = 1;
  int rows_ = 0;
  int head_count_ = 0;
  bool samples_ = false;  // a head does not take the largest logit
  std::vector<SequenceRows> sequences_;
  int max_sequence_rows_ = 0;
  int max_keys_ = 0;  // of a row
  int tile_count_ = 0;
  std::vector<double> tile_work_;  // multiply-adds of each attention tile and query head
  int deferred_prepare_ = -1;      // layer whose prepare_attention waits for attend
  int expert_tile_ = 16;
  EncoderCounts step_counts_;
  StepId failed_until_ = 0;  // steps up to here are lost
};

}  // namespace calla::metal
