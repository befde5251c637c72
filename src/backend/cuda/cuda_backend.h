#pragma once
// CudaBackend: the stages of backend.h on an NVIDIA GPU.
//
// Reading order: layout.h (weights), uploader.h (how they get here), step.h (what a step tells the kernels), state.h and
// state_log.h (what outlives a step), this file, cuda_backend.cc (steps and their recording), stages.cc (which kernel runs
// when), then the kernels. Decode of the real shape: program/ (token_program for one row, rows_program for several),
// attention_rows, the head. Else linear_stream and linear_rows, experts_stream and experts_rows (before Hopper linear_decode and
// experts_decode), gdn_decode. Prefill: gemm, group_rows, gdn_prefill, attention_tiles. pick; plain for the rest.
//
// Forms. Few rows run through the decode kernels (memory-bound, weights read once for all rows): projections and experts up
// to 32 rows, attention and GDN with one row a sequence. More rows run through the prefill kernels (tensor cores). A step
// in which every sequence has one row is recorded as a CUDA graph the second time its shape is seen, and replayed from
// then on: positions, page tables, tokens and sampling parameters lie in device memory, which begin() overwrites.
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/bandwidth.h"
#include "backend/cuda/experts_decode.h"
#include "backend/cuda/gdn.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/group_rows.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/linear_decode.h"
#include "backend/cuda/pick.h"
#include "backend/cuda/profile.h"
#include "backend/cuda/program/rows_program.h"
#include "backend/cuda/program/token_program.h"
#include "backend/cuda/state.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

// Mechanisms that --ablate can switch off.
struct Mechanisms {
  bool graphs = true;            // replay decode steps as CUDA graphs
  bool dependent_launch = true;  // programmatic dependent launch in decode
  bool gqa_packing = true;       // eight query heads share each read of the cache (decode)
  bool split_kv = true;          // a row's cache is shared out among blocks (decode)
  bool fused_choice = true;      // the experts are chosen inside the expert kernels (decode)
  bool expert_list =
      true;  // an expert's weights are read once for the rows that chose it (7..32 rows, outside programs)
  bool token_program = true;  // one row's stages, from layer to layer, as one kernel (decode, Hopper, the real shape)
  bool rows_program = true;   // the same for two to 32 sequences
  bool state_log = true;      // a state is written once for four tokens (in programs of several rows)
  bool fused_gdn = true;      // one kernel for a GDN token (decode)
  bool weight_stream = true;  // weights wait in shared memory for the activations (decode, Hopper); else in registers
  bool wgmma = true;          // prefill on tensor cores, experts grouped; else eight rows at a time (Hopper)

  // Throws UsageError for an unknown name.
  static Mechanisms without(const std::vector<std::string>& names);
  static std::vector<std::string> names();
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options);
  ~CudaBackend() override;

  std::string name() const override { return "cuda"; }
  std::string description() const override;
  bool asynchronous() const override { return true; }

  void allocate_state(const StateMemoryPlan& plan) override;
  size_t recurrent_slot_bytes() const override { return recurrent_.slot_bytes(); }
  size_t kv_page_bytes() const override { return kv_.page_bytes(); }
  void clear_recurrent(int slot) override { recurrent_.clear(slot, state_stream()); }
  void copy_recurrent(int from, int to) override { recurrent_.copy(from, to, state_stream()); }
  void copy_kv_page(int from, int to, int /*rows*/) override { kv_.copy(from, to, state_stream()); }
  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) override {
    recurrent_.set_counts(slot, prompt, generated, state_stream());
  }
  std::string state_layout() const override { return "cuda-2"; }
  void export_recurrent(int slot, std::span<std::byte> out) override {
    recurrent_.export_slot(slot, out, state_stream());
  }
  void import_recurrent(int slot, std::span<const std::byte> in) override {
    recurrent_.import_slot(slot, in, state_stream());
  }
  void export_kv_page(int page, std::span<std::byte> out) override { kv_.export_page(page, out, state_stream()); }
  void import_kv_page(int page, std::span<const std::byte> in) override { kv_.import_page(page, in, state_stream()); }
  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override {
    recurrent_.read(index_in_kind_[static_cast<size_t>(layer)], slot, state, conv, state_stream());
  }
  void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) override {
    recurrent_.write(index_in_kind_[static_cast<size_t>(layer)], slot, state, conv, state_stream());
  }
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override {
    kv_.read(index_in_kind_[static_cast<size_t>(layer)], pages, rows, k, v, state_stream());
  }
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v) override {
    kv_.write(index_in_kind_[static_cast<size_t>(layer)], pages, rows, k, v, state_stream());
  }

  double probe_read_bandwidth() override { return cuda::probe_read_bandwidth(device_, stream_.get()); }
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

  // Forces recorded work out and runs the rest of the step as it comes, for whoever looks between stages.
  void require_eager();
  // Of a step that runs as programs, of at most eight rows each.
  static constexpr int kMostProgramRows = 32;
  // One row, or one of each of a few sequences, of the shape that the programs are written for.
  bool in_program() const {
    if (step_.rows == 1) return token_words_.size() > 0;
    return in_rows_program(step_.rows, step_.sequence_count);
  }
  bool in_rows_program(int rows, int sequences) const {
    return rows > 1 && rows == sequences && rows <= kMostProgramRows && rows_words_.size() > 0;
  }
  void settle();  // runs what has been put off
  const DeviceWeights& weights() const { return weights_; }
  cudaStream_t stream() const { return stream_.get(); }

 private:
  // What distinguishes recorded steps: rows, heads, whether tokens are picked, whether by sampling, deep_attention_.
  using GraphKey = std::tuple<int, int, bool, bool, bool>;
  enum class Mode : uint8_t { kEager, kRecording, kReplay, kProfiling };

  struct InFlight {
    Event done;
    PinnedArray<std::byte> block;  // the step's StepBlock on the host
    PinnedArray<float> logits;
    int heads = 0;
  };

  // Where the parts of a step lie in its block.
  struct BlockLayout {
    size_t heads = 0, sequences = 0, tokens = 0, tiles = 0, words = 0, bytes = 0;
  };

  void allocate_slots();
  void build_block(const Batch& batch, InFlight& to);
  void end_recording(bool keep);
  // The stream, for whoever is after the sequences' state: what has been recorded runs first, since an exception may have cut
  // a step short, and state that changes in a recording would not have changed.
  cudaStream_t state_stream() {
    if (mode_ == Mode::kRecording) end_recording(false);
    return stream_.get();
  }
  void end_profiling();
  // Tells the profiler, if there is one, what a stage's kernels have to move.
  void count_bytes(double bytes) {
    if (mode_ == Mode::kProfiling) profiler_->add_bytes(stream_.get(), bytes);
  }
  const LayerOnDevice& layer(int index) const { return weights_.layers[static_cast<size_t>(index)]; }
  bool decode_rows() const { return step_.rows <= kMaxGemvRows; }
  // RMSNorm inside the projection. The streaming form does that for one row only.
  bool one_pass_norm() const {
    return step_.rows == 1 || (decode_rows() && !(mechanisms_.weight_stream && device_.is_hopper()));
  }
  bool wgmma() const { return mechanisms_.wgmma && device_.is_hopper(); }
  bool grouped_experts(const LayerOnDevice& layer) const {
    return !decode_rows() && !listed_experts(layer) && wgmma() && layer.experts.packed && shape_.experts <= 1024;
  }
  // The experts run through experts_rows.cu.
  bool listed_experts(const LayerOnDevice& layer) const {
    return mechanisms_.expert_list && layer.experts.packed && experts_rows_fit(device_, experts_decode(layer));
  }
  double expert_bytes(const LayerOnDevice& layer) const;
  bool stream_experts(const ExpertsDecode& e) const {
    return mechanisms_.weight_stream && experts_stream_fit(device_, e);
  }
  TokenPhase& add_phase(TokenPhaseKind kind, double bytes);
  void run_program();  // what has been put off into it
  void route_now(int index);
  void experts_up_now(int index);
  Launch launch_after_any() const;  // without programmatic dependent launch
  void project(const LayerOnDevice& layer);
  // Runs a projection that project_gdn() left to mix_gdn(), for whoever looks at its slots before.
  void settle_projection();
  void project_rows(const PackedView& w, const GemvInput& in, int rows, float* out, size_t out_stride, int columns,
                    bool add) const;
  void multiply(const Linear& w, const __half* x, size_t x_stride, int rows, float* out, size_t out_stride, bool add);
  void multiply_experts(const PackedView& routed, const PackedView& shared, const __half* x, size_t x_stride,
                        size_t x_choice_stride, std::byte* out, size_t out_stride, size_t out_choice_stride,
                        int columns, int shared_columns, GemmOutput output);
  GdnParams gdn_params(int index) const;
  AttentionParams attention_params(int index) const;
  ExpertsDecode experts_decode(const LayerOnDevice& layer) const;
  int splits(int rows) const;
  struct SlotMemory {
    void* data;
    int element_bytes;
    size_t stride;  // elements
  };
  SlotMemory slot_memory(Slot slot) const;

  const ModelShape shape_;
  const BackendOptions options_;
  const Mechanisms mechanisms_;
  const DeviceInfo device_;
  std::vector<int> index_in_kind_;  // of a layer among the layers of its kind
  Stream stream_;
  DeviceWeights weights_;
  RecurrentPool recurrent_;
  KvPool kv_;
  std::vector<DeviceBytes> slot_memory_;
  Activations slots_;
  DeviceArray<double> inverse_frequency_;
  DeviceArray<float> convolved_, block_scalars_;    // GDN prefill scratch
  DeviceArray<int32_t> pairs_, expert_tile_count_;  // experts' prefill scratch
  DeviceArray<ExpertTile> expert_tiles_;
  DeviceArray<TokenWords> token_words_;  // empty where token_program.cu cannot run
  DeviceArray<RowsWords> rows_words_;    // of 2, 3 .. 8 rows; empty where rows_program.cu cannot run
  DeviceArray<uint16_t> expert_out_;     // bf16 [row][9][hidden]
  DeviceArray<float> partial_;           // split-KV scratch
  DeviceArray<float> sample_weights_;
  DeviceArray<uint64_t> pick_best_;
  DeviceArray<uint32_t> pick_arrived_;
  size_t projected_width_ = 0;

  DeviceBytes block_;             // the current step's parameters
  PinnedArray<TokenId> results_;  // [step in flight][head], written by the pick kernels
  Launch launch_;
  StepView step_;
  const AttentionTile* tiles_ = nullptr;
  int tile_count_ = 0;
  Mode mode_ = Mode::kEager;
  GraphKey key_{};
  std::map<GraphKey, std::optional<Graph>> graphs_;  // an empty entry: seen once
  bool keeps_logs_ = false;                          // the step's programs add to the states' logs
  std::vector<int> step_slots_, step_logs_;
  bool want_logits_ = false;
  bool sampled_ = false;
  bool deep_attention_ = false;  // some split of the cache has more than two pages
  TokenProgram program_;         // phases put off until something else is asked for
  double program_bytes_ = 0;
  int pending_projection_ = -1;  // layer whose project_gdn() is left to mix_gdn(), for a program
  // Stages put off until experts_down() can put them into a program as one phase.
  enum class PutOff : uint8_t { kNothing, kRoute, kRouteAndUp };
  PutOff put_off_ = PutOff::kNothing;
  int put_off_layer_ = 0;
  bool choice_pending_ = false;  // route() left the choice of experts to the expert kernels
  std::array<InFlight, kStepsInFlight> in_flight_;
  StepId last_step_ = 0;
  std::unique_ptr<StepProfiler> profiler_;  // while profile() runs
  std::vector<KernelTime> profiled_;
  double cached_bytes_ = 0;  // of the keys and values that an attention layer reads in this step
};

}  // namespace calla::cuda
