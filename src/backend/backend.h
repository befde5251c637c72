#pragma once
// Backend: the closed list of operations that the forward pass (model/forward.cc) is written in, and the memory they
// work on. `reference` defines every stage in plain fp32 loops; `cpu`, `metal` and `cuda` implement the same list.
//
// How a step runs
//   if (backend.begin(batch)) { stages, in the order of model/forward.cc }   // record or execute
//   StepId step = backend.submit();                                         // may return before the work is done
//   backend.wait(step); backend.logits(step, i); backend.picked(step);      // synchronises; errors surface here
// begin() returns false when the backend replays a step that it has recorded before (a CUDA graph): the caller then
// skips the stages. At most kStepsInFlight steps may be submitted and not yet waited for.
//
// Activations live in *slots* that the backend owns: one buffer per name below, in whatever dtype and layout suits it,
// sized once for max_rows rows. A stage reads and writes the slots its comment names; read_slot / write_slot convert to
// and from fp32 rows and exist for tests, selftest and debugging. A backend may defer or merge consecutive stages as
// long as what is read through read_slot, logits and picked is the same (to rounding).
//
// Sequence state lives in a pool of recurrent slots and KV pages that the backend allocates once (allocate_state).
// Who owns which slot or page is the engine's business (engine/state_pool.h); a backend only sees numbers.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/sampling.h"
#include "backend/weights.h"
#include "base/function_ref.h"
#include "model/shape.h"

namespace calla {

// KV rows (positions) per page. A page holds, for every attention layer and KV head, kKvPageRows keys and values.
inline constexpr int kKvPageRows = 64;
inline constexpr int kStepsInFlight = 2;
// As a token id in Batch::tokens: "the token that this sequence's last step picked", still on the device.
inline constexpr TokenId kLastPicked = -1;
// For people, when picked() has no token although nothing constrained it.
inline constexpr const char* kNotFinite =
    "the model's logits are not finite; is the checkpoint damaged? (calla inspect --verify)";

// Consecutive rows of a batch that belong to one sequence. Rows of different sequences never see each other.
struct SequenceRows {
  int recurrent_slot = 0;             // state of the GDN layers, token counts and last picked token
  std::span<const int32_t> kv_pages;  // pages for positions [0, position + rows); entry i holds rows i*64 ...
  int position = 0;                   // of the first row: tokens of this sequence already in the state
  int rows = 0;
};

// Logits (and a pick) are wanted after one row of the batch.
struct HeadRow {
  int row = 0;                        // index into the batch's rows; ascending
  int sequence = 0;                   // index into Batch::sequences
  bool pick = false;                  // run `pick` for it
  SamplingParams sampling;            // if pick
  std::span<const uint32_t> allowed;  // if pick: token mask, or empty (see pick_token)
};

struct Batch {
  std::span<const TokenId> tokens;          // [rows]
  std::span<const SequenceRows> sequences;  // in row order; their rows add up to tokens.size()
  std::span<const HeadRow> heads;           // may be empty (a prefill chunk that is not the last)
  bool want_logits = false;                 // the caller will read logits(); false lets them stay on the device
};

// The activations of one step. Widths in elements; R = rows of the batch, T = kExpertsPerToken.
enum class Slot : uint8_t {
  kResidual,       // [R, hidden]             the residual stream
  kGdnQkv,         // [R, gdn_conv_width]     projections before the convolution
  kGdnZ,           // [R, gdn_value_width]
  kGdnA,           // [R, gdn_value_heads]
  kGdnB,           // [R, gdn_value_heads]
  kAttnQGate,      // [R, q_heads * 512]      per head 256 query, 256 output-gate elements, as projected
  kAttnK,          // [R, kv_width]           as projected
  kAttnV,          // [R, kv_width]
  kAttnQ,          // [R, q_width]            after q_norm and RoPE (written by prepare_attention)
  kMixed,          // [R, mixer_width]        mixer output before the output projection (the layer's first K columns)
  kMoeInput,       // [R, hidden]             RMSNorm of the residual stream
  kExpertIds,      // [R, T]                  as floats through read_slot
  kExpertWeights,  // [R, T]                  renormalised to sum 1
  kSharedGate,     // [R, 1]                  sigmoid of the shared expert's gate
  kExpertHidden,   // [R, T * expert_width + shared_width]  silu(gate) * up: the T chosen experts, then the shared one
  kLogits,         // [heads, vocab]
};

struct BackendOptions {
  int max_rows = 512;           // rows of the largest batch: bounds the scratch memory
  int max_heads = 32;           // rows for which logits can be wanted at once
  int threads = 0;              // cpu: 0 = all cores the process may use
  bool full_precision = false;  // cpu: fp32 activations and KV cache throughout (slower; agrees with reference to 1e-5)
  bool replay_steps = true;     // cuda: record a step and replay it; off where stages are called one by one
  std::vector<std::string> ablate;  // mechanisms to switch off, by name; each backend documents its list
  // cuda: called now and then while the weights travel to the device, with the bytes sent and all bytes.
  std::function<void(double done, double total)> on_upload;
};

// What the backend needs to hold for sequences; decided once by the engine.
struct StateMemoryPlan {
  int recurrent_slots = 0;
  int kv_pages = 0;
};

using StepId = uint64_t;

// Where the time of a step went: one entry per kernel (cuda) or stage (cpu).
struct KernelTime {
  std::string name;
  int launches = 0;
  double seconds = 0;  // of all launches
  double bytes = 0;    // weights, states and KV rows that they must move together; 0: not counted
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual std::string name() const = 0;         // "cpu"
  virtual std::string description() const = 0;  // for people: "cpu: AVX-512 VNNI/BF16, 2 threads, int16 activations"

  // True if submit() returns before the work is done, so that it pays to submit step n+1 before step n is read.
  virtual bool asynchronous() const { return false; }

  // --- sequence state ---
  // Allocates (or reserves) the pool. Called once, before the first step. Throws DeviceError if it cannot fit.
  virtual void allocate_state(const StateMemoryPlan& plan) = 0;
  // Bytes of one recurrent slot and of one KV page in this backend's memory.
  virtual size_t recurrent_slot_bytes() const = 0;
  virtual size_t kv_page_bytes() const = 0;
  // Zeroes the recurrent and convolution state, the token counts and the last picked token of a slot.
  virtual void clear_recurrent(int slot) = 0;
  virtual void copy_recurrent(int from, int to) = 0;          // everything clear_recurrent names
  virtual void copy_kv_page(int from, int to, int rows) = 0;  // the first `rows` rows, of all layers and heads
  // Sets the token counts used by penalties: prompt tokens get kInPrompt, generated ones are counted.
  virtual void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) = 0;
  // Raw bytes in this backend's own layout, for snapshots on disk; state_layout() names that layout and changes with it.
  virtual std::string state_layout() const = 0;
  virtual void export_recurrent(int slot, std::span<std::byte> out) = 0;
  virtual void import_recurrent(int slot, std::span<const std::byte> in) = 0;
  virtual void export_kv_page(int page, std::span<std::byte> out) = 0;
  virtual void import_kv_page(int page, std::span<const std::byte> in) = 0;
  // For tests: the state in the reference's layout. state [value_heads][128 key][128 value]; conv [3][gdn_conv_width]
  // (oldest first); k, v [kv_heads][rows][256] for positions [0, rows).
  virtual void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) = 0;
  virtual void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) = 0;
  virtual void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) = 0;
  virtual void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                        std::span<const float> v) = 0;

  // --- a step ---
  // Starts a step; the spans of `batch` must stay valid until submit() returns. False: replayed, skip the stages.
  virtual bool begin(const Batch& batch) = 0;

  // Stages. `layer` indexes ModelWeights::layers. Arithmetic: docs/model.md.
  virtual void embed() = 0;                       // tokens -> Residual
  virtual void project_gdn(int layer) = 0;        // Residual -> RMSNorm -> GdnQkv, GdnZ, GdnA, GdnB
  virtual void mix_gdn(int layer) = 0;            // GdnQkv, GdnZ, GdnA, GdnB, state -> Mixed, state
  virtual void project_attention(int layer) = 0;  // Residual -> RMSNorm -> AttnQGate, AttnK, AttnV
  // q/k RMSNorm and partial RoPE: AttnQGate, AttnK, AttnV -> AttnQ, KV cache
  virtual void prepare_attention(int layer) = 0;
  virtual void attend(int layer) = 0;            // AttnQ, KV cache, gates in AttnQGate -> Mixed
  virtual void project_residual(int layer) = 0;  // Residual += out_proj(Mixed)
  virtual void route(int layer) = 0;             // Residual -> MoeInput, ExpertIds, ExpertWeights, SharedGate
  virtual void group_rows(int layer) = 0;    // rows by expert, for the experts' prefill form; decode forms do nothing
  virtual void experts_up(int layer) = 0;    // MoeInput -> ExpertHidden (gate and up projections, SwiGLU)
  virtual void experts_down(int layer) = 0;  // Residual += sum_i w_i down_i(hidden_i) + shared_gate * down(shared)
  virtual void head() = 0;                   // RMSNorm + lm_head of the wanted rows -> Logits
  virtual void pick() = 0;                   // Logits -> picked tokens; counts them; the next step's kLastPicked

  // Ends the step and starts it on the device.
  virtual StepId submit() = 0;
  // Waits until the step is done. Throws DeviceError if it failed; the pool's contents are then undefined for the
  // sequences of that step, and only for them.
  virtual void wait(StepId step) = 0;
  // After wait(): logits [vocab] of heads[index] (if want_logits), valid until the second begin() after this step's;
  // and the picked tokens, one per head (-1 where pick was false, or where no token could be picked).
  virtual std::span<const float> logits(StepId step, int head_index) = 0;
  virtual std::span<const TokenId> picked(StepId step) = 0;

  // --- measurements ---
  // Bytes per second at which this backend's processor reads fresh memory, measured now, alone; 0: not measured.
  virtual double probe_read_bandwidth() { return 0; }
  // Calls `step`, which submits one step and waits for it, and tells where the time went; kernels that overlap in a
  // step are timed apart, so their sum may exceed it. Empty: this backend cannot tell.
  virtual std::vector<KernelTime> profile(FunctionRef<void()> step) {
    step();
    return {};
  }

  // --- tests and tools ---
  // Rows [0, R) of a slot of the step begun last, as fp32. May force deferred work and synchronise.
  virtual void read_slot(Slot slot, std::span<float> out) = 0;
  virtual void write_slot(Slot slot, std::span<const float> in) = 0;
};

// Elements per row of a slot for this shape (kMixed: mixer_width()).
int slot_width(Slot slot, const ModelShape& shape);
const char* slot_name(Slot slot);

}  // namespace calla
