#include "backend/cpu/activations.h"

#include "base/check.h"

namespace calla::cpu {
namespace {

// A row of planes is a multiple of 4 KiB for the real model; the padding keeps the rows of a tile out of one
// L1 set.
constexpr size_t kPlanePadding = 64;
constexpr size_t kSerialRows = 16;  // so few rows are done sooner than a second thread could begin

size_t padded(int k) { return static_cast<size_t>((k + kActivationBlock - 1) / kActivationBlock) * kActivationBlock; }

int group_of(Coding coding) { return coding == Coding::kSplit64 || coding == Coding::kNatural64 ? 64 : 32; }

ByteOrder order_of(Coding coding) {
  return coding == Coding::kSplit64 || coding == Coding::kSplit32 ? ByteOrder::kSplit : ByteOrder::kNatural;
}

}  // namespace

Coding coding_for(const WeightMatrix& matrix, bool full_precision) {
  if (full_precision || matrix.format == WeightFormat::kBf16) return Coding::kFloat;
  if (matrix.bits == 4) return matrix.group == 32 ? Coding::kSplit32 : Coding::kSplit64;
  return matrix.group == 32 ? Coding::kNatural32 : Coding::kNatural64;
}

Activations::Activations(int rows, int k)
    : plane_stride_(2 * padded(k) + kPlanePadding), scale_stride_(static_cast<size_t>(k + 31) / 32) {
  for (Quantized& q : quantized_) {
    q.planes = MappedArray<int8_t>(rows * plane_stride_, "quantised activations");
    q.scales = MappedArray<ActivationScale>(rows * scale_stride_, "activation scales");
  }
}

void Activations::prepare(const float* x, size_t stride, const int32_t* order, int rows, int k, Codings codings,
                          const RowKernels& kernels, ThreadPool& pool) {
  x_ = x;
  x_stride_ = stride;
  order_ = order;
  for (int c = 0; c < kQuantizedCodings; ++c) {
    const auto coding = static_cast<Coding>(c);
    if (!codings.has(coding)) continue;
    const Quantized& q = quantized_[c];
    pool.parallel_for(static_cast<size_t>(rows), kSerialRows, [&](size_t begin, size_t end, int) {
      for (size_t row = begin; row < end; ++row)
        kernels.quantize(x + (order != nullptr ? static_cast<size_t>(order[row]) : row) * stride, k, group_of(coding),
                         order_of(coding), q.planes.data() + row * plane_stride_,
                         q.scales.data() + row * scale_stride_);
    });
  }
}

void Activations::describe(Coding coding, int first, PanelArgs& args) const {
  const auto row = static_cast<size_t>(first);
  if (coding == Coding::kFloat) {
    args.x = order_ != nullptr ? x_ : x_ + row * x_stride_;
    args.x_stride = x_stride_;
    if (order_ != nullptr) args.rows = order_ + first;
    return;
  }
  const Quantized& q = quantized_[static_cast<int>(coding)];
  args.planes = q.planes.data() + row * plane_stride_;
  args.plane_stride = plane_stride_;
  args.act_scales = q.scales.data() + row * scale_stride_;
  args.act_scale_stride = scale_stride_;
}

}  // namespace calla::cpu
