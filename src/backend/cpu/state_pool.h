#pragma once
// StatePool: the memory of all sequences. Recurrent slots (GDN states, convolution tails, token counts, last
// token) and KV pages, each one block of memory that costs nothing until it is touched.
//   slot   [GDN layer]{ state [value head][kGdnStateFloats] (order: gdn_state_index), tail [3][conv width] }
//   fp32,
//          counts [vocab], last token
//   page   [attention layer][KV head]{ keys, values } of 64 positions (order: key_index, value_index), half
//   or fp32
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/memory.h"

namespace calla::cpu {

class StatePool {
 public:
  StatePool(const ModelShape& shape, bool full_precision);
  void allocate(const StateMemoryPlan& plan);

  size_t slot_bytes() const { return slot_bytes_; }
  size_t page_bytes() const { return page_bytes_; }
  std::string layout() const;

  std::span<std::byte> slot(int slot) const;
  std::span<std::byte> page(int page) const;
  void clear_slot(int slot);
  void copy_slot(int from, int to);
  void copy_page(int from, int to);

  // `layer` indexes the model's layers.
  float* gdn_state(int layer, int slot) const;
  float* conv_tail(int layer, int slot) const;
  std::span<TokenCount> counts(int slot) const;
  TokenId& last_token(int slot) const;
  void set_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated);
  void count_token(int slot, TokenId token);

  // Keys of one KV head in a page; the values follow them. T: half, or float in full precision.
  template <class T>
  T* keys(int layer, int page_index, int head) const {
    check(sizeof(T) == element_bytes_, "KV cache element");
    return reinterpret_cast<T*>(page(page_index).data() + head_offset(layer, head));
  }
  template <class T>
  T* values(int layer, int page_index, int head) const {
    return keys<T>(layer, page_index, head) + kPageRows * kHeadDim;
  }

  // Conversions to the reference's layout, for tests.
  void read_gdn(int layer, int slot, std::span<float> state, std::span<float> conv) const;
  void write_gdn(int layer, int slot, std::span<const float> state, std::span<const float> conv);
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) const;
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v);

 private:
  size_t head_offset(int layer, int head) const {
    return (static_cast<size_t>(index_in_kind_[layer]) * shape_.kv_heads + head) * 2 * kPageRows * kHeadDim *
           element_bytes_;
  }
  size_t gdn_floats() const { return static_cast<size_t>(shape_.gdn_value_heads) * kGdnStateFloats; }
  size_t tail_floats() const { return static_cast<size_t>(kConvWidth - 1) * shape_.gdn_conv_width(); }
  template <class T>
  void convert_kv(int layer, std::span<const int32_t> pages, int rows, float* k, float* v, bool write) const;

  const ModelShape shape_;
  const size_t element_bytes_;
  std::vector<int> index_in_kind_;  // of a layer among the layers of its kind
  size_t counts_offset_ = 0;
  size_t slot_bytes_ = 0;
  size_t page_bytes_ = 0;
  StateMemoryPlan plan_;
  MappedMemory slots_;
  MappedMemory pages_;
};

}  // namespace calla::cpu
