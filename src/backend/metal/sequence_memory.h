#pragma once
// Sequence state on the device: recurrent slots (GDN states, convolution tails, token counts, last token) and KV pages.
// Layouts: gdn.metal, kv.h. Copies and clears are dispatches, recorded in order with the steps; whatever the CPU reads
// or writes directly needs the GPU idle first, which is the caller's part (MetalBackend::synchronise).
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/metal/encoder.h"

namespace calla::metal {

class SequenceMemory {
 public:
  SequenceMemory(Device& device, const ModelShape& shape, const StateMemoryPlan& plan);

  static size_t recurrent_slot_bytes(const ModelShape& shape);
  static size_t kv_page_bytes(const ModelShape& shape);

  const BufferSpan& states() const { return states_; }
  const BufferSpan& tails() const { return tails_; }
  const BufferSpan& counts() const { return counts_; }
  const BufferSpan& last_tokens() const { return last_tokens_; }
  const BufferSpan& kv() const { return kv_; }
  int count_stride() const { return count_stride_; }
  const StateMemoryPlan& plan() const { return plan_; }

  // Which of the two tails of a slot and GDN layer is the current one.
  int phase(int gdn_layer, int slot) const { return phases_[static_cast<size_t>(slot) * layers_ + gdn_layer]; }
  void flip_phase(int gdn_layer, int slot) { phases_[static_cast<size_t>(slot) * layers_ + gdn_layer] ^= 1; }

  void clear_recurrent(StepEncoder& encoder, int slot);
  void copy_recurrent(StepEncoder& encoder, int from, int to);
  void copy_kv_page(StepEncoder& encoder, int from, int to, int rows);

  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated);
  void export_recurrent(int slot, std::span<std::byte> out) const;
  void import_recurrent(int slot, std::span<const std::byte> in);
  void export_kv_page(int page, std::span<std::byte> out) const;
  void import_kv_page(int page, std::span<const std::byte> in);
  void read_gdn(int gdn_layer, int slot, std::span<float> state, std::span<float> conv) const;
  void write_gdn(int gdn_layer, int slot, std::span<const float> state, std::span<const float> conv);
  void read_kv(int attention_layer, std::span<const int32_t> pages, int rows, std::span<float> k,
               std::span<float> v) const;
  void write_kv(int attention_layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v);

 private:
  // The slot's part of each of the four buffers.
  std::vector<BufferSpan> parts_of(int slot) const;
  BufferSpan tail(int gdn_layer, int slot, int phase) const;
  bf16* kv_row(int attention_layer, int page, int which, int head, int row) const;

  const ModelShape& shape_;
  const StateMemoryPlan plan_;
  const int layers_;  // GDN
  const int count_stride_;
  const size_t state_bytes_;  // of a slot, all layers
  const size_t tail_bytes_;
  BufferSpan states_, tails_, counts_, last_tokens_, kv_;
  std::vector<uint8_t> phases_;  // [slot][layer]
  const Kernel& copy_;
  const Kernel& fill_;
};

}  // namespace calla::metal
