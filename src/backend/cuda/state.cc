#include <algorithm>

#include "backend/cuda/state.h"

#include <cstring>

#include "backend/cuda/attention.h"
#include "backend/cuda/gdn.h"
#include "base/bf16.h"

namespace calla::cuda {
namespace {

void copy_now(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream), "copy of sequence state");
  cuda_check(cudaStreamSynchronize(stream), "copy of sequence state");
}

// Where element `i` of [head][128 keys][128 columns] lies.
size_t place_of(size_t i) {
  constexpr size_t kDim = kGdnHeadDim;
  return state_place(static_cast<int>(i / (kDim * kDim)), static_cast<int>(i / kDim % kDim),
                     static_cast<int>(i % kDim));
}

}  // namespace

RecurrentPool::RecurrentPool(const ModelShape& shape)
    : layers_(shape.gdn_layers()),
      vocab_(static_cast<size_t>(shape.vocab)),
      gdn_floats_(static_cast<size_t>(shape.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim),
      conv_floats_(static_cast<size_t>(kConvWidth - 1) * static_cast<size_t>(shape.gdn_conv_width())) {}

void RecurrentPool::allocate(int slots, int logs, cudaStream_t stream) {
  slots_ = slots;
  slot_of_log_.assign(static_cast<size_t>(logs), std::nullopt);
  logs_ = DeviceArray<StateLog>(slot_of_log_.size() * log_parts(), "memory for logs of recurrent states");
  if (logs_) cuda_check(cudaMemsetAsync(logs_.data(), 0, logs_.size_bytes(), stream), "clear logs");
  const auto n = static_cast<size_t>(slots);
  state_ = DeviceArray<float>(n * slot_floats(), "memory for recurrent states");
  counts_ = DeviceArray<TokenCount>(n * vocab_, "memory for token counts");
  last_picked_ = DeviceArray<TokenId>(n, "memory for picked tokens");
  for (int slot = 0; slot < slots; ++slot) clear(slot, stream);
}

size_t RecurrentPool::slot_bytes() const {
  return slot_floats() * sizeof(float) + vocab_ * sizeof(TokenCount) + sizeof(TokenId);
}

std::optional<size_t> RecurrentPool::log_of(int slot) const {
  const auto found = std::find(slot_of_log_.begin(), slot_of_log_.end(), std::optional(slot));
  if (found == slot_of_log_.end()) return std::nullopt;
  return static_cast<size_t>(found - slot_of_log_.begin());
}

void RecurrentPool::open_logs(std::span<const int> slots, std::span<int> logs, cudaStream_t stream) {
  check(slots.size() <= slot_of_log_.size(), "a log for each of a step's slots");
  const auto can_go = [&](const std::optional<int>& slot) {
    return !slot || std::find(slots.begin(), slots.end(), *slot) == slots.end();
  };
  for (size_t i = 0; i < slots.size(); ++i) {
    std::optional<size_t> log = log_of(slots[i]);
    if (!log) {
      auto other = std::find(slot_of_log_.begin(), slot_of_log_.end(), std::nullopt);
      if (other == slot_of_log_.end()) other = std::find_if(slot_of_log_.begin(), slot_of_log_.end(), can_go);
      if (*other) settle(**other, stream);
      *other = slots[i];
      log = static_cast<size_t>(other - slot_of_log_.begin());
    }
    logs[i] = static_cast<int>(*log);
  }
}

void RecurrentPool::apply_log(int slot, cudaStream_t stream) {
  if (const auto index = log_of(slot))
    apply_logs(slot_state(slot), layer_floats(), log(*index), layers_, static_cast<int>(parts()), stream);
}

void RecurrentPool::settle(int slot, cudaStream_t stream) {
  apply_log(slot, stream);
  if (const auto index = log_of(slot)) slot_of_log_[*index] = std::nullopt;
}

void RecurrentPool::empty_log(int slot, cudaStream_t stream) {
  if (const auto index = log_of(slot))
    cuda_check(cudaMemsetAsync(log(*index), 0, log_parts() * sizeof(StateLog), stream), "clear a log");
}

void RecurrentPool::clear(int slot, cudaStream_t stream) {
  empty_log(slot, stream);
  cuda_check(cudaMemsetAsync(slot_state(slot), 0, slot_floats() * sizeof(float), stream), "clear a recurrent state");
  cuda_check(cudaMemsetAsync(slot_counts(slot), 0, vocab_ * sizeof(TokenCount), stream), "clear token counts");
  cuda_check(cudaMemsetAsync(last_picked_.data() + slot, 0, sizeof(TokenId), stream), "clear the picked token");
}

void RecurrentPool::copy(int from, int to, cudaStream_t stream) {
  if (from == to) return;
  apply_log(from, stream);
  empty_log(to, stream);
  constexpr auto kKind = cudaMemcpyDeviceToDevice;
  cuda_check(cudaMemcpyAsync(slot_state(to), slot_state(from), slot_floats() * sizeof(float), kKind, stream),
             "copy a recurrent state");
  cuda_check(cudaMemcpyAsync(slot_counts(to), slot_counts(from), vocab_ * sizeof(TokenCount), kKind, stream),
             "copy token counts");
  cuda_check(cudaMemcpyAsync(last_picked_.data() + to, last_picked_.data() + from, sizeof(TokenId), kKind, stream),
             "copy the picked token");
}

void RecurrentPool::set_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated,
                               cudaStream_t stream) {
  std::vector<TokenCount> counts(vocab_);
  for (TokenId token : generated) {
    TokenCount& count = counts[static_cast<size_t>(token)];
    if (count != kInPrompt - 1) ++count;
  }
  for (TokenId token : prompt) counts[static_cast<size_t>(token)] |= kInPrompt;
  copy_now(slot_counts(slot), counts.data(), vocab_ * sizeof(TokenCount), cudaMemcpyHostToDevice, stream);
}

void RecurrentPool::export_slot(int slot, std::span<std::byte> out, cudaStream_t stream) {
  check(out.size() == slot_bytes(), "size of an exported recurrent slot");
  apply_log(slot, stream);
  const size_t a = slot_floats() * sizeof(float), b = vocab_ * sizeof(TokenCount);
  constexpr auto kKind = cudaMemcpyDeviceToHost;
  copy_now(out.data(), slot_state(slot), a, kKind, stream);
  copy_now(out.data() + a, slot_counts(slot), b, kKind, stream);
  copy_now(out.data() + a + b, last_picked_.data() + slot, sizeof(TokenId), kKind, stream);
}

void RecurrentPool::import_slot(int slot, std::span<const std::byte> in, cudaStream_t stream) {
  check(in.size() == slot_bytes(), "size of an imported recurrent slot");
  empty_log(slot, stream);
  const size_t a = slot_floats() * sizeof(float), b = vocab_ * sizeof(TokenCount);
  constexpr auto kKind = cudaMemcpyHostToDevice;
  copy_now(slot_state(slot), in.data(), a, kKind, stream);
  copy_now(slot_counts(slot), in.data() + a, b, kKind, stream);
  copy_now(last_picked_.data() + slot, in.data() + a + b, sizeof(TokenId), kKind, stream);
}

void RecurrentPool::read(int gdn_layer, int slot, std::span<float> state, std::span<float> conv, cudaStream_t stream) {
  check(state.size() == gdn_floats_ && conv.size() == conv_floats_, "size of a GDN state");
  apply_log(slot, stream);
  const float* from = layer(gdn_layer) + static_cast<size_t>(slot) * slot_floats();
  std::vector<float> raw(gdn_floats_);
  copy_now(raw.data(), from, state.size_bytes(), cudaMemcpyDeviceToHost, stream);
  for (size_t i = 0; i < gdn_floats_; ++i) state[i] = raw[place_of(i)];
  copy_now(conv.data(), from + gdn_floats_, conv.size_bytes(), cudaMemcpyDeviceToHost, stream);
}

void RecurrentPool::write(int gdn_layer, int slot, std::span<const float> state, std::span<const float> conv,
                          cudaStream_t stream) {
  check(state.size() == gdn_floats_ && conv.size() == conv_floats_, "size of a GDN state");
  apply_log(slot, stream);
  float* to = layer(gdn_layer) + static_cast<size_t>(slot) * slot_floats();
  std::vector<float> raw(gdn_floats_);
  for (size_t i = 0; i < gdn_floats_; ++i) raw[place_of(i)] = state[i];
  copy_now(to, raw.data(), state.size_bytes(), cudaMemcpyHostToDevice, stream);
  copy_now(to + gdn_floats_, conv.data(), conv.size_bytes(), cudaMemcpyHostToDevice, stream);
}

KvPool::KvPool(const ModelShape& shape) : layers_(shape.attention_layers()), kv_heads_(shape.kv_heads) {}

size_t KvPool::layer_page_bytes() const { return static_cast<size_t>(kv_heads_) * 2 * kTileBytes; }

void KvPool::allocate(int pages, cudaStream_t stream) {
  pages_ = pages;
  memory_ = DeviceBytes(static_cast<size_t>(pages) * page_bytes(), "memory for the KV cache");
  // Rows that nothing has written yet get weight 0 in attention; they must not be NaN.
  cuda_check(cudaMemsetAsync(memory_.data(), 0, memory_.size(), stream), "clear the KV cache");
}

void KvPool::copy(int from, int to, cudaStream_t stream) {
  cuda_check(cudaMemcpy2DAsync(memory_.data() + static_cast<size_t>(to) * layer_page_bytes(), layer_bytes(),
                               memory_.data() + static_cast<size_t>(from) * layer_page_bytes(), layer_bytes(),
                               layer_page_bytes(), static_cast<size_t>(layers_), cudaMemcpyDeviceToDevice, stream),
             "copy a KV page");
}

void KvPool::export_page(int page, std::span<std::byte> out, cudaStream_t stream) const {
  check(out.size() == page_bytes(), "size of an exported KV page");
  cuda_check(cudaMemcpy2DAsync(out.data(), layer_page_bytes(),
                               memory_.data() + static_cast<size_t>(page) * layer_page_bytes(), layer_bytes(),
                               layer_page_bytes(), static_cast<size_t>(layers_), cudaMemcpyDeviceToHost, stream),
             "export a KV page");
  cuda_check(cudaStreamSynchronize(stream), "export a KV page");
}

void KvPool::import_page(int page, std::span<const std::byte> in, cudaStream_t stream) {
  check(in.size() == page_bytes(), "size of an imported KV page");
  cuda_check(cudaMemcpy2DAsync(memory_.data() + static_cast<size_t>(page) * layer_page_bytes(), layer_bytes(),
                               in.data(), layer_page_bytes(), layer_page_bytes(), static_cast<size_t>(layers_),
                               cudaMemcpyHostToDevice, stream),
             "import a KV page");
  cuda_check(cudaStreamSynchronize(stream), "import a KV page");
}

void KvPool::read(int attention_layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v,
                  cudaStream_t stream) const {
  std::vector<std::byte> page(layer_page_bytes());
  for (int first = 0; first < rows; first += kKvPageRows) {
    const auto id = static_cast<size_t>(pages[static_cast<size_t>(first / kKvPageRows)]);
    copy_now(page.data(), layer(attention_layer) + id * layer_page_bytes(), page.size(), cudaMemcpyDeviceToHost,
             stream);
    for (int head = 0; head < kv_heads_; ++head)
      for (int which = 0; which < 2; ++which)
        for (int row = 0; row < std::min(kKvPageRows, rows - first); ++row)
          for (int dim = 0; dim < kHeadDim; ++dim) {
            bf16 value;
            std::memcpy(&value, page.data() + (head * 2 + which) * kTileBytes + tile_offset(row, dim / 8) + dim % 8 * 2,
                        sizeof value);
            (which ? v : k)[(static_cast<size_t>(head) * rows + first + row) * kHeadDim + dim] = to_float(value);
          }
  }
}

void KvPool::write(int attention_layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                   std::span<const float> v, cudaStream_t stream) {
  std::vector<std::byte> page(layer_page_bytes());
  for (int first = 0; first < rows; first += kKvPageRows) {
    const auto id = static_cast<size_t>(pages[static_cast<size_t>(first / kKvPageRows)]);
    std::byte* at = layer(attention_layer) + id * layer_page_bytes();
    copy_now(page.data(), at, page.size(), cudaMemcpyDeviceToHost, stream);
    for (int head = 0; head < kv_heads_; ++head)
      for (int which = 0; which < 2; ++which)
        for (int row = 0; row < std::min(kKvPageRows, rows - first); ++row)
          for (int dim = 0; dim < kHeadDim; ++dim) {
            const bf16 value =
                to_bf16((which ? v : k)[(static_cast<size_t>(head) * rows + first + row) * kHeadDim + dim]);
            std::memcpy(page.data() + (head * 2 + which) * kTileBytes + tile_offset(row, dim / 8) + dim % 8 * 2, &value,
                        sizeof value);
          }
    copy_now(at, page.data(), page.size(), cudaMemcpyHostToDevice, stream);
  }
}

}  // namespace calla::cuda
