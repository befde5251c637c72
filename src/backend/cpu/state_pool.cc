#include "backend/cpu/state_pool.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace calla::cpu {

static_assert(kPageRows == kKvPageRows);

StatePool::StatePool(const ModelShape& shape, bool full_precision)
    : shape_(shape), element_bytes_(full_precision ? sizeof(float) : sizeof(half)) {
  for (int layer = 0, gdn = 0, attention = 0; layer < shape.layers(); ++layer)
    index_in_kind_.push_back(shape.layer_kinds[layer] == LayerKind::kAttention ? attention++ : gdn++);
  counts_offset_ = shape.gdn_layers() * (gdn_floats() + tail_floats()) * sizeof(float);
  const size_t used = counts_offset_ + shape.vocab * sizeof(TokenCount) + sizeof(TokenId) + alignof(TokenId);
  slot_bytes_ = (used + 63) / 64 * 64;
  page_bytes_ =
      static_cast<size_t>(shape.attention_layers()) * shape.kv_heads * 2 * kPageRows * kHeadDim * element_bytes_;
}

void StatePool::allocate(const StateMemoryPlan& plan) {
  check(slots_.size() == 0 && pages_.size() == 0, "state is allocated once");
  plan_ = plan;
  slots_ = MappedMemory(plan.recurrent_slots * slot_bytes_, "recurrent states");
  pages_ = MappedMemory(plan.kv_pages * page_bytes_, "the KV cache");
}

std::string StatePool::layout() const {
  return "cpu-2 gdn[block8][key128][column16]f32 kv[16]" + std::string(element_bytes_ == 4 ? "f32" : "f16");
}

std::span<std::byte> StatePool::slot(int slot) const {
  check(slot >= 0 && slot < plan_.recurrent_slots, "recurrent slot number");
  return {slots_.data() + slot * slot_bytes_, slot_bytes_};
}

std::span<std::byte> StatePool::page(int page) const {
  check(page >= 0 && page < plan_.kv_pages, "KV page number");
  return {pages_.data() + page * page_bytes_, page_bytes_};
}

void StatePool::clear_slot(int slot) { std::ranges::fill(this->slot(slot), std::byte{0}); }

void StatePool::copy_slot(int from, int to) { std::ranges::copy(slot(from), slot(to).begin()); }

void StatePool::copy_page(int from, int to) { std::ranges::copy(page(from), page(to).begin()); }

float* StatePool::gdn_state(int layer, int slot) const {
  return reinterpret_cast<float*>(this->slot(slot).data()) + index_in_kind_[layer] * (gdn_floats() + tail_floats());
}

float* StatePool::conv_tail(int layer, int slot) const { return gdn_state(layer, slot) + gdn_floats(); }

std::span<TokenCount> StatePool::counts(int slot) const {
  return {reinterpret_cast<TokenCount*>(this->slot(slot).data() + counts_offset_), static_cast<size_t>(shape_.vocab)};
}

TokenId& StatePool::last_token(int slot) const {
  return *reinterpret_cast<TokenId*>(this->slot(slot).data() + slot_bytes_ - sizeof(TokenId));
}

void StatePool::set_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) {
  const std::span<TokenCount> all = counts(slot);
  std::ranges::fill(all, TokenCount{0});
  for (TokenId token : generated) count_token(slot, token);
  for (TokenId token : prompt) all[token] |= kInPrompt;
}

void StatePool::count_token(int slot, TokenId token) {
  TokenCount& count = counts(slot)[token];
  if ((count & ~kInPrompt) != kInPrompt - 1) ++count;
}

void StatePool::read_gdn(int layer, int slot, std::span<float> state, std::span<float> conv) const {
  check(state.size() == gdn_floats() && conv.size() == tail_floats(), "state sizes");
  const float* from = gdn_state(layer, slot);
  for (int head = 0; head < shape_.gdn_value_heads; ++head)
    for (int key = 0; key < kGdnHeadDim; ++key)
      for (int value = 0; value < kGdnHeadDim; ++value)
        state[static_cast<size_t>(head) * kGdnStateFloats + key * kGdnHeadDim + value] =
            from[static_cast<size_t>(head) * kGdnStateFloats + gdn_state_index(key, value)];
  std::copy_n(conv_tail(layer, slot), conv.size(), conv.begin());
}

void StatePool::write_gdn(int layer, int slot, std::span<const float> state, std::span<const float> conv) {
  check(state.size() == gdn_floats() && conv.size() == tail_floats(), "state sizes");
  float* to = gdn_state(layer, slot);
  for (int head = 0; head < shape_.gdn_value_heads; ++head)
    for (int key = 0; key < kGdnHeadDim; ++key)
      for (int value = 0; value < kGdnHeadDim; ++value)
        to[static_cast<size_t>(head) * kGdnStateFloats + gdn_state_index(key, value)] =
            state[static_cast<size_t>(head) * kGdnStateFloats + key * kGdnHeadDim + value];
  std::ranges::copy(conv, conv_tail(layer, slot));
}

namespace {

void store(float x, half& out) { out = to_half(x); }
void store(float x, float& out) { out = x; }
float load(half x) { return to_float(x); }
float load(float x) { return x; }

}  // namespace

template <class T>
void StatePool::convert_kv(int layer, std::span<const int32_t> pages, int rows, float* k, float* v, bool write) const {
  for (int head = 0; head < shape_.kv_heads; ++head)
    for (int row = 0; row < rows; ++row) {
      const size_t at = (static_cast<size_t>(head) * rows + row) * kHeadDim;
      T* keys = this->keys<T>(layer, pages[row / kPageRows], head);
      T* values = this->values<T>(layer, pages[row / kPageRows], head);
      for (int i = 0; i < kHeadDim; ++i) {
        T& key = keys[key_index(row % kPageRows, i)];
        T& value = values[value_index(row % kPageRows, i)];
        if (write) {
          store(k[at + i], key);
          store(v[at + i], value);
        } else {
          k[at + i] = load(key);
          v[at + i] = load(value);
        }
      }
    }
}

void StatePool::read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k,
                        std::span<float> v) const {
  if (element_bytes_ == sizeof(float))
    convert_kv<float>(layer, pages, rows, k.data(), v.data(), false);
  else
    convert_kv<half>(layer, pages, rows, k.data(), v.data(), false);
}

void StatePool::write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                         std::span<const float> v) {
  std::vector<float> keys(k.begin(), k.end()), values(v.begin(), v.end());
  if (element_bytes_ == sizeof(float))
    convert_kv<float>(layer, pages, rows, keys.data(), values.data(), true);
  else
    convert_kv<half>(layer, pages, rows, keys.data(), values.data(), true);
}

}  // namespace calla::cpu
