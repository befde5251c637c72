// gqa_page: the 8 query heads of one KV head against up to 64 cached positions, for one row; online softmax.
//   q [8][256] fp32, already scaled     keys, values: one page of one KV head (layouts in kernels.h)
//   Each key and value is loaded once for all 8 heads. Scores: 16 positions in the lanes, no horizontal sums.
//   Values: 32 dimensions at a time over all positions.
//   Numerics  fp32 products and sums; a row's result does not depend on the other rows of the batch.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/attention_kernels.cc"
#include "backend/cpu/targets.h"
#include "hwy/cache_control.h"
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

using WordTag = hn::RebindToUnsigned<FloatTag>;
inline constexpr int kHeads = kGqaFactor;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
inline constexpr int kHeadsAtOnce = kLanes == 16 ? 8 : 4;  // as many accumulators as the registers hold

HWY_INLINE hn::VFromD<FloatTag> LoadFloats(const float* p) { return hn::LoadU(FloatTag(), p); }
HWY_INLINE hn::VFromD<FloatTag> LoadFloats(const half* p) {
  const hn::Rebind<hwy::float16_t, FloatTag> d16;
  return hn::PromoteTo(FloatTag(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
}

// scores[h][0..16) of one block of 16 positions.
template <class T>
HWY_INLINE void ScoreBlock(const float* q, const T* keys, float (*scores)[kPageRows]) {
  const FloatTag d;
  for (int n = 0; n < kKeyBlock; n += kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> acc[kHeadsAtOnce];
      for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::Zero(d);
      HWY_UNROLL(2)
      for (int i = 0; i < kHeadDim; ++i) {
        const auto k = LoadFloats(keys + i * kKeyBlock + n);
        HWY_UNROLL(8)
        for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::MulAdd(k, hn::Set(d, q[(h0 + h) * kHeadDim + i]), acc[h]);
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) hn::Store(acc[h], d, scores[h0 + h] + n);
    }
}

// out[h][32 dims of `block`] += sum_r p[r][h] * values[r]; two vectors of dimensions at a time.
template <class T>
HWY_INLINE void MixBlock(const float (*p)[kHeads], const T* values, int rows, int block, float* out) {
  const FloatTag d;
  for (int n = 0; n < kValueBlock; n += 2 * kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> first[kHeadsAtOnce], second[kHeadsAtOnce];
      float* o = out + h0 * kHeadDim + block * kValueBlock + n;
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        first[h] = hn::Load(d, o + h * kHeadDim);
        second[h] = hn::Load(d, o + h * kHeadDim + kLanes);
      }
      for (int r = 0; r < rows; ++r) {
        const auto v0 = LoadFloats(values + r * kValueBlock + n),
                   v1 = LoadFloats(values + r * kValueBlock + n + kLanes);
        HWY_UNROLL(8)
        for (int h = 0; h < kHeadsAtOnce; ++h) {
          const auto weight = hn::Set(d, p[r][h0 + h]);
          first[h] = hn::MulAdd(v0, weight, first[h]);
          second[h] = hn::MulAdd(v1, weight, second[h]);
        }
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        hn::Store(first[h], d, o + h * kHeadDim);
        hn::Store(second[h], d, o + h * kHeadDim + kLanes);
      }
    }
}

// Asks for n elements of the page that comes next.
template <class T>
HWY_INLINE void FetchAhead(const T* p, int n) {
  for (int i = 0; i < n; i += static_cast<int>(64 / sizeof(T))) hwy::Prefetch(p + i);
}

HWY_INLINE void Scale(float* x, int n, float factor) {
  const FloatTag d;
  const auto f = hn::Set(d, factor);
  for (int i = 0; i < n; i += kLanes) hn::Store(hn::Mul(hn::Load(d, x + i), f), d, x + i);
}

template <class T>
void Page(const float* q, const T* keys, const T* values, int rows, const T* next, AttentionPartial* partial) {
  const FloatTag d;
  constexpr int kBlock = kKeyBlock;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  alignas(64) float scores[kHeads][kPageRows];
  alignas(64) float p[kPageRows][kHeads];
  const int blocks = (rows + kBlock - 1) / kBlock;
  for (int b = 0; b < blocks; ++b) {
    float(*out)[kPageRows] = reinterpret_cast<float(*)[kPageRows]>(&scores[0][b * kBlock]);
    ScoreBlock(q, keys + key_index(b * kBlock, 0), out);
    FetchAhead(next + key_index(b * kBlock, 0), kBlock * kHeadDim);
  }
  for (int h = 0; h < kHeads; ++h) {
    float* s = scores[h];
    std::fill(s + rows, s + blocks * kBlock, kLowest);
    auto largest = hn::Set(d, partial->max[h]);
    for (int r = 0; r < blocks * kBlock; r += kLanes) largest = hn::Max(largest, hn::Load(d, s + r));
    const float max = hn::GetLane(hn::MaxOfLanes(d, largest));
    const auto shift = hn::Set(d, max);
    auto total = hn::Zero(d);
    for (int r = 0; r < blocks * kBlock; r += kLanes) {
      // exp is asked for nothing below -87: that weight is zero to fp32 beside the largest, which is 1.
      const auto x = hn::Sub(hn::Load(d, s + r), shift);
      const auto floor = hn::Set(d, -87.0f);
      const auto e = hn::IfThenElseZero(hn::Gt(x, floor), hn::Exp(d, hn::Max(x, floor)));
      total = hn::Add(total, e);
      hn::Store(e, d, s + r);
    }
    const float keep = partial->max[h] == kLowest ? 0.0f : std::exp(partial->max[h] - max);
    if (keep != 1.0f) Scale(partial->out + h * kHeadDim, kHeadDim, keep);
    partial->sum[h] = partial->sum[h] * keep + hn::GetLane(hn::SumOfLanes(d, total));
    partial->max[h] = max;
    for (int r = 0; r < rows; ++r) p[r][h] = s[r];
  }
  constexpr int kWidth = kValueBlock;
  for (int b = 0; b < kHeadDim / kWidth; ++b) {
    FetchAhead(next + kPageRows * kHeadDim + value_index(0, b * kWidth), kPageRows * kWidth);
    MixBlock(p, values + value_index(0, b * kWidth), rows, b, partial->out);
  }
}

void Reset(AttentionPartial* partial) {
  std::memset(partial->out, 0, sizeof(partial->out));
  std::fill(std::begin(partial->max), std::end(partial->max), -std::numeric_limits<float>::infinity());
  std::fill(std::begin(partial->sum), std::end(partial->sum), 0.0f);
}

void Merge(const AttentionPartial* from, AttentionPartial* into) {
  const FloatTag d;
  for (int h = 0; h < kHeads; ++h) {
    const float max = std::max(from->max[h], into->max[h]);
    const float a = std::exp(into->max[h] - max), b = std::exp(from->max[h] - max);
    into->max[h] = max;
    into->sum[h] = into->sum[h] * a + from->sum[h] * b;
    for (int i = h * kHeadDim; i < (h + 1) * kHeadDim; i += kLanes)
      hn::Store(
          hn::MulAdd(hn::Load(d, from->out + i), hn::Set(d, b), hn::Mul(hn::Load(d, into->out + i), hn::Set(d, a))), d,
          into->out + i);
  }
}

void Finish(const AttentionPartial* partial, float* out) {
  for (int h = 0; h < kHeads; ++h) {
    const float factor = 1 / partial->sum[h];
    for (int i = h * kHeadDim; i < (h + 1) * kHeadDim; ++i) out[i] = partial->out[i] * factor;
  }
}

AttentionKernels GetAttentionKernels() { return {Reset, Page<half>, Page<float>, Merge, Finish}; }

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace calla::cpu {
HWY_EXPORT(GetAttentionKernels);
AttentionKernels attention_kernels() { return HWY_DYNAMIC_DISPATCH(GetAttentionKernels)(); }
}  // namespace calla::cpu
#endif
