#pragma once
// RecurrentPool and KvPool: the device memory behind recurrent slots and KV pages.
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device.h"
#include "backend/cuda/state_log.h"

namespace calla::cuda {

// Slots of the GDN layers' state and convolution tail (fp32), token counts and last picked token; and logs (state_log.h) of a
// few slots' states.
class RecurrentPool {
 public:
  explicit RecurrentPool(const ModelShape& shape);
  // `logs` slots at a time can have logs.
  void allocate(int slots, int logs, cudaStream_t stream);
  // Of a slot, without logs: what is exported.
  size_t slot_bytes() const;

  void clear(int slot, cudaStream_t stream);
  void copy(int from, int to, cudaStream_t stream);
  void set_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated, cudaStream_t stream);
  // These wait for the device.
  void export_slot(int slot, std::span<std::byte> out, cudaStream_t stream);
  void import_slot(int slot, std::span<const std::byte> in, cudaStream_t stream);
  void read(int gdn_layer, int slot, std::span<float> state, std::span<float> conv, cudaStream_t stream);
  void write(int gdn_layer, int slot, std::span<const float> state, std::span<const float> conv, cudaStream_t stream);

  // The log of each of a step's slots, for a step that keeps logs; opened if there was none, for which that of a slot that is
  // not in this step may be settled. There are as many logs as such a step has slots, or more.
  void open_logs(std::span<const int> slots, std::span<int> logs, cudaStream_t stream);
  // Brings a slot's states up to its log, if it has one, and closes that: not in the middle of a step that keeps logs.
  void settle(int slot, cudaStream_t stream);
  // The same, but the log stays open.
  void apply_log(int slot, cudaStream_t stream);
  int logs() const { return static_cast<int>(slot_of_log_.size()); }
  // The logs of a layer's parts in log 0; logs are log_parts() apart.
  StateLog* layer_log(int gdn_layer) const { return logs_.data() + static_cast<size_t>(gdn_layer) * parts(); }
  size_t log_parts() const { return static_cast<size_t>(layers_) * parts(); }

  // State of a layer in slot 0; slots are slot_floats() apart.
  float* layer(int gdn_layer) const { return state_.data() + static_cast<size_t>(gdn_layer) * layer_floats(); }
  size_t slot_floats() const { return static_cast<size_t>(layers_) * layer_floats(); }
  TokenCount* counts() const { return counts_.data(); }
  TokenId* last_picked() const { return last_picked_.data(); }
  int slots() const { return slots_; }

 private:
  size_t gdn_floats() const { return gdn_floats_; }
  size_t layer_floats() const { return gdn_floats_ + conv_floats_; }
  float* slot_state(int slot) const { return state_.data() + static_cast<size_t>(slot) * slot_floats(); }
  TokenCount* slot_counts(int slot) const { return counts_.data() + static_cast<size_t>(slot) * vocab_; }
  size_t parts() const { return gdn_floats_ / kStatePartFloats; }  // of a layer's state
  StateLog* log(size_t index) const { return logs_.data() + index * log_parts(); }
  std::optional<size_t> log_of(int slot) const;
  // What is in the slot's log no longer matters.
  void empty_log(int slot, cudaStream_t stream);

  int layers_ = 0;
  size_t vocab_ = 0;
  size_t gdn_floats_ = 0;
  size_t conv_floats_ = 0;
  int slots_ = 0;
  DeviceArray<float> state_;
  DeviceArray<StateLog> logs_;
  std::vector<std::optional<int>> slot_of_log_;
  DeviceArray<TokenCount> counts_;
  DeviceArray<TokenId> last_picked_;
};

// Pages of keys and values, [attention layer][page] (see attention.h for a page's layout).
class KvPool {
 public:
  explicit KvPool(const ModelShape& shape);
  void allocate(int pages, cudaStream_t stream);
  size_t page_bytes() const { return static_cast<size_t>(layers_) * layer_page_bytes(); }

  void copy(int from, int to, cudaStream_t stream);
  // These wait for the device.
  void export_page(int page, std::span<std::byte> out, cudaStream_t stream) const;
  void import_page(int page, std::span<const std::byte> in, cudaStream_t stream);
  void read(int attention_layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v,
            cudaStream_t stream) const;
  void write(int attention_layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
             std::span<const float> v, cudaStream_t stream);

  std::byte* layer(int attention_layer) const {
    return memory_.data() + static_cast<size_t>(attention_layer) * layer_bytes();
  }
  int pages() const { return pages_; }

 private:
  size_t layer_page_bytes() const;
  size_t layer_bytes() const { return static_cast<size_t>(pages_) * layer_page_bytes(); }

  int layers_ = 0;
  int kv_heads_ = 0;
  int pages_ = 0;
  DeviceBytes memory_;
};

}  // namespace calla::cuda
