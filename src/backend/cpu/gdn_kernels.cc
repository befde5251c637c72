// Kernels of the Gated DeltaNet mixer: causal convolution, normalisation, and the recurrence
//   S <- g S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
// over the rows of a chunk, 32 value columns at a time. Their part of the state (16 KiB) stays in L1. The
// pass that updates S for row t also gathers S^T k for row t + 1, so S is read and written once per row.
#include <algorithm>
#include <cmath>

#include "backend/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/gdn_kernels.cc"
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

void ConvSilu(const float* x, size_t x_stride, const float* tail, size_t tail_stride, const float* taps,
              size_t taps_stride, int rows, int n, float* out) {
  const FloatTag d;
  for (int c = 0; c < n; c += static_cast<int>(hn::Lanes(d))) {
    const auto w0 = hn::LoadU(d, taps + c), w1 = hn::LoadU(d, taps + taps_stride + c);
    const auto w2 = hn::LoadU(d, taps + 2 * taps_stride + c), w3 = hn::LoadU(d, taps + 3 * taps_stride + c);
    auto x0 = hn::LoadU(d, tail + c), x1 = hn::LoadU(d, tail + tail_stride + c);
    auto x2 = hn::LoadU(d, tail + 2 * tail_stride + c);
    for (int t = 0; t < rows; ++t) {
      const auto x3 = hn::LoadU(d, x + static_cast<size_t>(t) * x_stride + c);
      const auto sum = hn::MulAdd(w3, x3, hn::MulAdd(w2, x2, hn::MulAdd(w1, x1, hn::Mul(w0, x0))));
      hn::StoreU(Silu(d, sum), d, out + static_cast<size_t>(t) * n + c);
      x0 = x1;
      x1 = x2;
      x2 = x3;
    }
  }
}

void L2Norm(float* x, int rows, float scale) {
  const FloatTag d;
  for (int t = 0; t < rows; ++t, x += kGdnHeadDim) {
    const auto factor = hn::Set(d, scale / std::sqrt(SumOfSquares(x, kGdnHeadDim) + 1e-6f));
    for (int i = 0; i < kGdnHeadDim; i += static_cast<int>(hn::Lanes(d)))
      hn::StoreU(hn::Mul(hn::LoadU(d, x + i), factor), d, x + i);
  }
}

// Columns [0, 32) of one head: two blocks of 16, kParts vectors in all.
HWY_INLINE void ScanColumns(const float* q, const float* k, const float* v, const float* decay, const float* beta,
                            int rows, float* state, float* out) {
  constexpr int kBlockFloats = kGdnHeadDim * kStateColumns;
  const FloatTag d;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
  // The vectors of one row of the two blocks, as many at a time as the registers hold.
  constexpr int kParts = kLanes == 16 ? 2 : 1;
  constexpr int kVectors = 2 * kStateColumns / kLanes;
  for (int first = 0; first < kVectors; first += kParts) {
    float* s[kParts];
    int column[kParts];
    hn::VFromD<FloatTag> memory[kParts];
    for (int p = 0; p < kParts; ++p) {
      column[p] = (first + p) * kLanes;
      s[p] = state + column[p] / kStateColumns * kBlockFloats + column[p] % kStateColumns;
      memory[p] = hn::Zero(d);
    }
    for (int i = 0; i < kGdnHeadDim; ++i)
      for (int p = 0; p < kParts; ++p)
        memory[p] = hn::MulAdd(hn::Set(d, k[i]), hn::Load(d, s[p] + i * kStateColumns), memory[p]);
    for (int t = 0; t < rows; ++t) {
      const float* qt = q + t * kGdnHeadDim;
      const float* kt = k + t * kGdnHeadDim;
      const float* next_k = t + 1 < rows ? kt + kGdnHeadDim : kt;
      const auto g = hn::Set(d, decay[t]);
      hn::VFromD<FloatTag> delta[kParts], o[kParts], next[kParts];
      for (int p = 0; p < kParts; ++p) {
        const auto value = hn::LoadU(d, v + t * kGdnHeadDim + column[p]);
        delta[p] = hn::Mul(hn::Set(d, beta[t]), hn::NegMulAdd(g, memory[p], value));
        o[p] = next[p] = hn::Zero(d);
      }
      for (int i = 0; i < kGdnHeadDim; ++i) {
        const auto ki = hn::Set(d, kt[i]), qi = hn::Set(d, qt[i]), ni = hn::Set(d, next_k[i]);
        for (int p = 0; p < kParts; ++p) {
          const auto updated = hn::MulAdd(ki, delta[p], hn::Mul(g, hn::Load(d, s[p] + i * kStateColumns)));
          o[p] = hn::MulAdd(qi, updated, o[p]);
          next[p] = hn::MulAdd(ni, updated, next[p]);
          hn::Store(updated, d, s[p] + i * kStateColumns);
        }
      }
      for (int p = 0; p < kParts; ++p) {
        hn::StoreU(o[p], d, out + t * kGdnHeadDim + column[p]);
        memory[p] = next[p];
      }
    }
  }
}

void Scan(const float* q, const float* k, const float* v, const float* decay, const float* beta, int rows, float* state,
          float* out) {
  constexpr int kColumns = 2 * kStateColumns;
  for (int c = 0; c < kGdnHeadDim; c += kColumns)
    ScanColumns(q, k, v + c, decay, beta, rows, state + c * kGdnHeadDim, out + c);
}

void GatedNorm(const float* o, const float* weight, const float* z, float eps, float* out) {
  const FloatTag d;
  const auto factor = hn::Set(d, 1 / std::sqrt(SumOfSquares(o, kGdnHeadDim) / kGdnHeadDim + eps));
  for (int i = 0; i < kGdnHeadDim; i += static_cast<int>(hn::Lanes(d))) {
    const auto normed = hn::Mul(hn::Mul(hn::LoadU(d, o + i), factor), hn::LoadU(d, weight + i));
    hn::StoreU(hn::Mul(normed, Silu(d, hn::LoadU(d, z + i))), d, out + i);
  }
}

GdnKernels GetGdnKernels() { return {ConvSilu, L2Norm, Scan, GatedNorm}; }

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace calla::cpu {
HWY_EXPORT(GetGdnKernels);
GdnKernels gdn_kernels() { return HWY_DYNAMIC_DISPATCH(GetGdnKernels)(); }
}  // namespace calla::cpu
#endif
