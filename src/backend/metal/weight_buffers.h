#pragma once
// The checkpoint's tensors as Metal buffers, without a copy: shared no-copy buffers over the page-aligned spans of the
// mapping, each at most maxBufferLength long; longer spans become views that overlap by the largest tensor, so that
// every tensor lies inside one view.
#include <cstdint>
#include <span>
#include <vector>

#include "backend/metal/device.h"
#include "backend/weights.h"

namespace calla::metal {

// A piece of memory, by address.
struct MemorySpan {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  size_t bytes() const { return end - begin; }
};

// The views (whole pages) that cover `tensors`. Pages between two tensors that nobody asked for are left out.
// `largest_view` is in bytes. Throws DeviceError if a tensor is longer than that.
std::vector<MemorySpan> plan_views(std::vector<MemorySpan> tensors, size_t page_bytes, size_t largest_view);

// All matrices of the model, in a fixed order.
std::vector<const WeightMatrix*> matrices_of(const ModelWeights& weights);

class WeightBuffers {
 public:
  WeightBuffers(Device& device, const ModelWeights& weights);

  // Where a tensor's bytes lie. It must be one of the model's.
  BufferSpan at(const void* tensor, size_t bytes) const;
  // Bytes that had to be copied because the file places them off the alignment that kernels need: 0 normally.
  size_t copied_bytes() const { return copied_bytes_; }

 private:
  struct View {
    MemorySpan memory;
    BufferSpan buffer;
  };
  std::vector<View> views_;  // by address; the copies behind them
  size_t copied_bytes_ = 0;
};

}  // namespace calla::metal
