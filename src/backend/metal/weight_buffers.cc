#include "backend/metal/weight_buffers.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"

namespace calla::metal {
namespace {

constexpr size_t kCodeAlignment = 8;    // a lane loads 64 bits of codes at once
constexpr size_t kNumberAlignment = 4;  // offsets of a binding are multiples of 4

struct Tensor {
  MemorySpan memory;
  size_t alignment;
};

void add(std::vector<Tensor>& tensors, const void* data, size_t bytes, size_t alignment) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  tensors.push_back({{begin, begin + bytes}, alignment});
}

std::vector<Tensor> tensors_of(const ModelWeights& weights) {
  std::vector<Tensor> tensors;
  for (const WeightMatrix* m : matrices_of(weights)) {
    const size_t rows = static_cast<size_t>(m->stack) * m->n;
    if (m->format == WeightFormat::kBf16) {
      add(tensors, m->values, rows * m->k * sizeof(bf16), kNumberAlignment);
    } else {
      add(tensors, m->codes, rows * m->words_per_row() * sizeof(uint32_t), kCodeAlignment);
      add(tensors, m->scales, rows * m->groups_per_row() * sizeof(bf16), kNumberAlignment);
      add(tensors, m->biases, rows * m->groups_per_row() * sizeof(bf16), kNumberAlignment);
    }
  }
  return tensors;
}

}  // namespace

std::vector<const WeightMatrix*> matrices_of(const ModelWeights& weights) {
  std::vector<const WeightMatrix*> all = {&weights.embedding, &weights.lm_head};
  for (const LayerWeights& layer : weights.layers) {
    if (layer.gdn) {
      const GdnWeights& w = *layer.gdn;
      all.insert(all.end(), {&w.in_qkv, &w.in_z, &w.in_a, &w.in_b, &w.out});
    } else {
      const AttentionWeights& w = *layer.attention;
      all.insert(all.end(), {&w.q, &w.k, &w.v, &w.out});
    }
    const MoeWeights& w = layer.moe;
    all.insert(all.end(), {&w.router, &w.expert_gate_proj, &w.expert_up_proj, &w.expert_down_proj, &w.shared_gate_proj,
                           &w.shared_up_proj, &w.shared_down_proj, &w.shared_expert_gate});
  }
  return all;
}

std::vector<MemorySpan> plan_views(std::vector<MemorySpan> tensors, size_t page_bytes, size_t largest_view) {
  largest_view = largest_view / page_bytes * page_bytes;
  size_t largest_tensor = 0;  // in whole pages, wherever it starts
  for (MemorySpan& t : tensors) {
    t.begin = t.begin / page_bytes * page_bytes;
    t.end = (t.end + page_bytes - 1) / page_bytes * page_bytes;
    largest_tensor = std::max(largest_tensor, t.bytes());
  }
  if (largest_tensor > largest_view)
    throw DeviceError("Metal: a weight tensor of " + std::to_string(largest_tensor >> 20) +
                      " MB is longer than the longest buffer that this GPU allows (" +
                      std::to_string(largest_view >> 20) + " MB)");
  std::sort(tensors.begin(), tensors.end(), [](const MemorySpan& a, const MemorySpan& b) { return a.begin < b.begin; });
  std::vector<MemorySpan> spans;
  for (const MemorySpan& t : tensors) {
    if (!spans.empty() && t.begin <= spans.back().end) {
      spans.back().end = std::max(spans.back().end, t.end);
    } else {
      spans.push_back(t);
    }
  }
  std::vector<MemorySpan> views;
  for (const MemorySpan& span : spans) {
    uintptr_t begin = span.begin;
    while (span.end - begin > largest_view) {
      views.push_back({begin, begin + largest_view});
      // A tensor that sticks out of this view begins in its last `largest_tensor` bytes.
      begin += std::max(largest_view - largest_tensor, page_bytes);
    }
    views.push_back({begin, span.end});
  }
  return views;
}

WeightBuffers::WeightBuffers(Device& device, const ModelWeights& weights) {
  std::vector<MemorySpan> in_place;
  std::vector<Tensor> misplaced;
  for (const Tensor& tensor : tensors_of(weights)) {
    if (tensor.memory.begin % tensor.alignment == 0) {
      in_place.push_back(tensor.memory);
    } else {
      misplaced.push_back(tensor);
    }
  }
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const MemorySpan& view : plan_views(in_place, page_bytes, device.traits().max_buffer_bytes)) {
    MTL::Buffer* buffer = device.wrap(reinterpret_cast<const void*>(view.begin), view.bytes(), "weights");
    views_.push_back({view, {buffer, 0, view.bytes()}});
  }
  for (const Tensor& tensor : misplaced) {
    const BufferSpan copy = device.allocate(tensor.memory.bytes(), "weights off their alignment");
    std::memcpy(copy.as<std::byte>(), reinterpret_cast<const void*>(tensor.memory.begin), tensor.memory.bytes());
    views_.push_back({tensor.memory, copy});
    copied_bytes_ += tensor.memory.bytes();
  }
}

BufferSpan WeightBuffers::at(const void* tensor, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(tensor);
  // Copies come last and win: the views may cover a misplaced tensor's bytes too.
  for (auto view = views_.rbegin(); view != views_.rend(); ++view) {
    if (view->memory.begin <= begin && begin + bytes <= view->memory.end)
      return view->buffer.part(begin - view->memory.begin, bytes);
  }
  check(false, "a weight tensor lies in no buffer");
  return {};
}

}  // namespace calla::metal
