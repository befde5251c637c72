// Kernels over single rows of activations: RMSNorm, quantisation, SwiGLU, gates, argmax.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/row_kernels.cc"
#include "backend/cpu/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "backend/cpu/math-inl.h"
#include "backend/cpu/target_flags.h"

#if HWY_ONCE
#include "backend/cpu/tables.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace calla::cpu {
namespace HWY_NAMESPACE {

void RmsNorm(const float* x, const float* weight, int n, float eps, float* out) {
  const FloatTag d;
  const float factor = 1 / std::sqrt(SumOfSquares(x, n) / static_cast<float>(n) + eps);
  const auto scale = hn::Set(d, factor);
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), scale), hn::LoadU(d, weight + i)), d, out + i);
}

// One group of up to 64 values to 16-bit integers; returns {d, d * sum of the integers}. NaN or infinity
// among the inputs makes d NaN, so that it shows in every output.
ActivationScale QuantizeGroup(const float* x, int n, int16_t* out) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<int16_t, FloatTag> d16;
  constexpr float kLargest = 127 * 256 + 127;
  auto largest = hn::Zero(d), poison = hn::Zero(d);
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d))) {
    const auto v = hn::LoadU(d, x + i);
    largest = hn::Max(largest, hn::Abs(v));
    poison = hn::MulAdd(v, hn::Zero(d), poison);
  }
  const float top = hn::GetLane(hn::MaxOfLanes(d, largest));
  // Without a finite largest value there is nothing to round: the poison says so.
  const bool usable = top > std::numeric_limits<float>::min() * kLargest && top <= std::numeric_limits<float>::max();
  const float inverse = usable ? kLargest / top : 0.0f;
  const float scale = inverse > 0 ? top / kLargest : 0.0f;
  auto total = hn::Zero(di);
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d))) {
    const auto q = hn::NearestInt(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, inverse)));
    total = hn::Add(total, q);
    hn::StoreU(hn::DemoteTo(d16, q), d16, out + i);
  }
  const float nan_or_zero = hn::GetLane(hn::SumOfLanes(d, poison));
  return {scale + nan_or_zero, scale * static_cast<float>(hn::GetLane(hn::SumOfLanes(di, total)))};
}

// 128 integers to the two planes; stride 2 picks the even (then odd) ones.
HWY_INLINE void StorePlanes(const int16_t* values, ByteOrder order, int8_t* planes) {
  const int stride = order == ByteOrder::kSplit ? 2 : 1, half = kActivationBlock / stride;
  for (int part = 0; part < stride; ++part)
    for (int i = 0; i < half; ++i) {
      const int v = values[i * stride + part];
      const int hi = (v + 128) >> 8;
      planes[part * half + i] = static_cast<int8_t>(hi);
      planes[kActivationBlock + part * half + i] = static_cast<int8_t>(v - hi * 256);
    }
}

void Quantize(const float* x, int k, int group, ByteOrder order, int8_t* planes, ActivationScale* scales) {
  for (int from = 0; from < k; from += kActivationBlock) {
    int16_t values[kActivationBlock];
    const int n = std::min(kActivationBlock, k - from);
    for (int i = 0; i < n; i += group) scales[(from + i) / group] = QuantizeGroup(x + from + i, group, values + i);
    std::fill(values + n, values + kActivationBlock, int16_t{0});
    if (order == ByteOrder::kSplit)
      StorePlanes(values, ByteOrder::kSplit, planes + 2 * from);
    else
      StorePlanes(values, ByteOrder::kNatural, planes + 2 * from);
  }
}

// Calls row(i, to): `to` is where the 16 columns of panel row i go, a buffer if fewer than 16 of them count.
template <class Body>
HWY_INLINE void ForPanelRows(int m, int n, float* out, size_t stride, const int32_t* rows, Body body) {
  for (int i = 0; i < m; ++i) {
    float* to = out + static_cast<size_t>(rows != nullptr ? rows[i] : i) * stride;
    if (n == kPanel) {
      body(i, to);
    } else {
      HWY_ALIGN float buffer[kPanel] = {};
      std::memcpy(buffer, to, static_cast<size_t>(n) * sizeof(float));
      body(i, buffer);
      std::memcpy(to, buffer, static_cast<size_t>(n) * sizeof(float));
    }
  }
}

void Store(const float* y, int m, int n, float* out, size_t stride, const int32_t* rows) {
  ForPanelRows(m, n, out, stride, rows,
               [&](int i, float* to) { std::memcpy(to, y + i * kPanel, kPanel * sizeof(float)); });
}

void Add(const float* y, int m, int n, const float* weights, float* out, size_t stride, const int32_t* rows) {
  const FloatTag d;
  ForPanelRows(m, n, out, stride, rows, [&](int i, float* to) {
    const auto weight = hn::Set(d, weights != nullptr ? weights[i] : 1.0f);
    for (int j = 0; j < kPanel; j += static_cast<int>(hn::Lanes(d)))
      hn::StoreU(hn::MulAdd(weight, hn::Load(d, y + i * kPanel + j), hn::LoadU(d, to + j)), d, to + j);
  });
}

void SwiGlu(const float* gate, const float* up, int m, int n, float* out, size_t stride, const int32_t* rows) {
  const FloatTag d;
  ForPanelRows(m, n, out, stride, rows, [&](int i, float* to) {
    for (int j = 0; j < kPanel; j += static_cast<int>(hn::Lanes(d)))
      hn::StoreU(hn::Mul(Silu(d, hn::Load(d, gate + i * kPanel + j)), hn::Load(d, up + i * kPanel + j)), d, to + j);
  });
}

void Axpy(float weight, const float* y, int n, float* out) {
  const FloatTag d;
  const auto w = hn::Set(d, weight);
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d)))
    hn::StoreU(hn::MulAdd(w, hn::LoadU(d, y + i), hn::LoadU(d, out + i)), d, out + i);
}

void SigmoidGate(const float* gate, int n, float* x) {
  const FloatTag d;
  for (int i = 0; i < n; i += static_cast<int>(hn::Lanes(d)))
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), Sigmoid(d, hn::LoadU(d, gate + i))), d, x + i);
}

bool BlockMaxima(const float* x, int64_t n, float* maxima) {
  constexpr auto kBlock = static_cast<int64_t>(kMaxBlock);
  const FloatTag d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto nan = hn::Zero(d);  // stays zero without NaN
  bool tail_is_nan = false;
  for (int64_t from = 0; from < n; from += kBlock, ++maxima) {
    auto largest = lowest;
    if (from + kBlock <= n) {
      for (int64_t i = from; i < from + kBlock; i += static_cast<int64_t>(hn::Lanes(d))) {
        const auto v = hn::LoadU(d, x + i);
        largest = hn::Max(largest, v);
        nan = hn::Add(nan, hn::IfThenElseZero(hn::IsNaN(v), v));
      }
      *maxima = hn::GetLane(hn::MaxOfLanes(d, largest));
    } else {
      *maxima = -std::numeric_limits<float>::infinity();
      for (int64_t i = from; i < n; ++i) {
        tail_is_nan |= std::isnan(x[i]);
        *maxima = std::max(*maxima, x[i]);
      }
    }
  }
  return !tail_is_nan && !std::isnan(hn::GetLane(hn::SumOfLanes(d, nan)));
}

int64_t ArgMax(const float* x, int64_t n) {
  constexpr int64_t kBlocksAtOnce = 64, kStep = kBlocksAtOnce * static_cast<int64_t>(kMaxBlock);
  float best = -std::numeric_limits<float>::infinity();
  int64_t best_from = -1;
  for (int64_t from = 0; from < n; from += kStep) {
    float maxima[kBlocksAtOnce];
    const int64_t count = std::min(kStep, n - from);
    if (!BlockMaxima(x + from, count, maxima)) return -1;
    const int64_t blocks = (count + static_cast<int64_t>(kMaxBlock) - 1) / static_cast<int64_t>(kMaxBlock);
    const float top = *std::max_element(maxima, maxima + blocks);
    if (top > best) {
      best = top;
      best_from = from;
    }
  }
  return best_from < 0 ? -1 : std::find(x + best_from, x + n, best) - x;
}

RowKernels GetRowKernels() { return {RmsNorm, Quantize, Store, Add, SwiGlu, Axpy, SigmoidGate, ArgMax, BlockMaxima}; }

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace calla::cpu {
HWY_EXPORT(GetRowKernels);
RowKernels row_kernels() { return HWY_DYNAMIC_DISPATCH(GetRowKernels)(); }
}  // namespace calla::cpu
#endif
