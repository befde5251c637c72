#pragma once
// RecurrentPool and KvPool: the device memory behind recurrent slots and KV pages.
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device.h"

namespace calla::cuda {

// Slots of the GDN layers' state and convolution tail (fp32), token counts and last picked token.
class RecurrentPool {
 public:
  explicit RecurrentPool(const ModelShape& shape);
  void allocate(int slots, cudaStream_t stream);
  size_t slot_bytes() const;

  void clear(int slot, cudaStream_t stream);
  void copy(int from, int to, cudaStream_t stream);
  void set_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated, cudaStream_t stream);
  // These wait for the device.
  void export_slot(int slot, std::span<std::byte> out, cudaStream_t stream) const;
  void import_slot(int slot, std::span<const std::byte> in, cudaStream_t stream);
  void read(int gdn_layer, int slot, std::span<float> state, std::span<float> conv, cudaStream_t stream) const;
  void write(int gdn_layer, int slot, std::span<const float> state, std::span<const float> conv, cudaStream_t stream);

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

  int layers_ = 0;
  size_t vocab_ = 0;
  size_t gdn_floats_ = 0;
  size_t conv_floats_ = 0;
  int slots_ = 0;
  DeviceArray<float> state_;
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
