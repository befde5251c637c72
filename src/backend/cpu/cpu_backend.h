#pragma once
// The cpu backend: the stages of backend.h on all cores, weights used as they lie in the checkpoint.
//   - Activation slots are fp32 row-major arrays. A stage quantises its inputs itself (activations.h).
//   - A stage is one or two parallel loops; nothing is deferred, so submit() has nothing to start.
//   - What a row computes does not depend on the other rows, on their number or on the number of threads: the
//   order of
//     all its additions is fixed. So chunked and whole prefill, and solo and concurrent decode, agree bit for
//     bit.
#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/activations.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/linear.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/profile.h"
#include "backend/cpu/state_pool.h"
#include "backend/cpu/token_picker.h"
#include "base/thread_pool.h"

namespace calla::cpu {

struct AttentionScratch;

class CpuBackend final : public Backend {
 public:
  // Options used: max_rows, max_heads, threads, full_precision, and these names to `ablate`:
  //   avx512   use the AVX2 kernels on a machine that has AVX-512
  CpuBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options);
  ~CpuBackend() override;

  std::string name() const override { return "cpu"; }
  std::string description() const override;
  Profile& profile() { return profile_; }

  void allocate_state(const StateMemoryPlan& plan) override { pool_.allocate(plan); }
  size_t recurrent_slot_bytes() const override { return pool_.slot_bytes(); }
  size_t kv_page_bytes() const override { return pool_.page_bytes(); }
  void clear_recurrent(int slot) override { pool_.clear_slot(slot); }
  void copy_recurrent(int from, int to) override { pool_.copy_slot(from, to); }
  void copy_kv_page(int from, int to, int /*rows*/) override { pool_.copy_page(from, to); }
  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) override {
    pool_.set_counts(slot, prompt, generated);
  }
  std::string state_layout() const override { return pool_.layout(); }
  void export_recurrent(int slot, std::span<std::byte> out) override;
  void import_recurrent(int slot, std::span<const std::byte> in) override;
  void export_kv_page(int page, std::span<std::byte> out) override;
  void import_kv_page(int page, std::span<const std::byte> in) override;
  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override {
    pool_.read_gdn(layer, slot, state, conv);
  }
  void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) override {
    pool_.write_gdn(layer, slot, state, conv);
  }
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override {
    pool_.read_kv(layer, pages, rows, k, v);
  }
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v) override {
    pool_.write_kv(layer, pages, rows, k, v);
  }

  double probe_read_bandwidth() override;
  std::vector<KernelTime> profile(FunctionRef<void()> step) override;

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
  void read_slot(Slot slot, std::span<float> out) override;
  void write_slot(Slot slot, std::span<const float> in) override;

 private:
  // A sequence's rows in the batch.
  struct RowRange {
    const SequenceRows* sequence;
    int first;  // row in the batch
  };
  // The rows that chose an expert: entries [begin, end) of the lists below.
  struct ExpertGroup {
    int expert;
    int begin, end;
  };
  // What submit() hands over: kStepsInFlight steps in turn.
  struct Step {
    StepId id = 0;
    bool has_logits = false;
    std::vector<TokenId> picked;
    MappedArray<float> logits;  // [max_heads][vocab]
  };
  static constexpr int kFewRows = 8;  // up to which experts_down keeps every product
  struct AttentionRows {              // a tile of a sequence's rows
    const RowRange* range;
    int first;
  };

  float* slot(Slot which) const { return slots_[static_cast<size_t>(which)].data(); }
  float* row(Slot which, int index) const {
    return slot(which) + static_cast<size_t>(index) * slot_width(which, shape_);
  }
  Step& current() { return steps_[(last_step_ + 1) % kStepsInFlight]; }
  // rmsnorm(residual) of all rows -> out [rows][hidden].
  void norm_rows(const FloatVector& weight, float* out);
  void mix_sequence(int layer, const RowRange& range, int key_head, int thread);
  void attend_tile(int layer, const RowRange& range, int kv_head, int first, int rows, int thread);
  void attend_parts(int layer);
  void attend_page(int layer, const SequenceRows& sequence, int kv_head, int page, const float* q, int position,
                   AttentionPartial& partial) const;
  void experts_down_few(const MoeWeights& w);
  void experts_down_many(const MoeWeights& w);
  void finish_attention(const AttentionPartial& partial, int batch_row, int kv_head);

  const ModelShape shape_;
  const ModelWeights& weights_;
  const BackendOptions options_;
  const Kernels kernels_;
  ThreadPool threads_;
  Linear linear_;
  StatePool pool_;
  Profile profile_;

  std::vector<MappedArray<float>> slots_;  // by Slot; kLogits and kExpertHidden live elsewhere
  MappedArray<float> normed_;              // [max_rows][hidden]
  MappedArray<float> router_logits_;       // [max_rows][experts]
  MappedArray<float> routed_hidden_;       // [max_rows * T][expert_width]
  MappedArray<float> shared_hidden_;       // [max_rows][shared_width]
  MappedArray<float> down_products_;       // [kFewRows * (T + 1)][hidden]: routed by expert, then shared
  Activations inputs_;                     // of the stage that runs
  Activations routed_inputs_;              // of the routed experts' down projections
  Activations shared_inputs_;
  std::vector<std::vector<float>> conv_taps_;  // per GDN layer [4][conv width]; empty for other layers
  MappedArray<float> gdn_scratch_;             // per thread: q, k, v, o [max_rows][128], decay, beta [max_rows]
  std::vector<double> rope_frequencies_;
  MappedArray<float> rope_;  // [max_rows][rotary_dim]: cosines, then sines
  std::unique_ptr<AttentionScratch> attention_;
  std::vector<AttentionRows> attention_tiles_;
  std::vector<TokenPicker> pickers_;  // per thread

  // The batch that runs.
  Batch batch_;
  int rows_ = 0;
  std::vector<TokenId> tokens_;   // kLastPicked resolved
  std::vector<int> positions_;    // of each row
  std::vector<RowRange> ranges_;  // one per sequence
  // Rows by expert.
  std::vector<ExpertGroup> groups_;  // ascending expert
  std::vector<int32_t> entry_rows_;  // row of the batch
  std::vector<int32_t> entry_ids_;   // row * T + i: row of routed_hidden_
  std::vector<float> entry_weights_;
  std::vector<int> expert_starts_;

  std::array<Step, kStepsInFlight> steps_;
  StepId last_step_ = 0;
};

}  // namespace calla::cpu
