// gqa_page: the 8 query heads of one KV head against up to 64 cached positions, for one row; online softmax.
//   q [8][256] fp32, already scaled     keys, values: one page of one KV head (layouts in kernels.h)
//   Each key and value is loaded once for all 8 heads. Scores: 16 positions in the lanes, no horizontal sums.
//   Values: 32 (bf16) or 16 (fp32) dimensions at a time over all positions.
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

// Two bf16 per lane.
struct EvenOdd {
  hn::VFromD<FloatTag> even, odd;
};
HWY_INLINE EvenOdd LoadPairs(const bf16* p) {
  const FloatTag d;
  const WordTag dw;
  const auto words = hn::LoadU(dw, reinterpret_cast<const uint32_t*>(p));
  return {hn::BitCast(d, hn::ShiftLeft<16>(words)), hn::BitCast(d, hn::And(words, hn::Set(dw, 0xffff0000u)))};
}

// scores[h][0..16) of one block of 16 positions.
HWY_INLINE void ScoreBlock(const float* q, const bf16* keys, float (*scores)[kPageRows]) {
  const FloatTag d;
  for (int n = 0; n < 16; n += kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> acc[kHeadsAtOnce];
      for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::Zero(d);
      for (int pair = 0; pair < kHeadDim / 2; ++pair) {
        const EvenOdd k = LoadPairs(keys + (pair * 16 + n) * 2);
        const float* x = q + h0 * kHeadDim + pair * 2;
        HWY_UNROLL(8)
        for (int h = 0; h < kHeadsAtOnce; ++h) {
          acc[h] = hn::MulAdd(k.even, hn::Set(d, x[h * kHeadDim]), acc[h]);
          acc[h] = hn::MulAdd(k.odd, hn::Set(d, x[h * kHeadDim + 1]), acc[h]);
        }
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) hn::Store(acc[h], d, scores[h0 + h] + n);
    }
}

HWY_INLINE void ScoreBlock(const float* q, const float* keys, float (*scores)[kPageRows]) {
  const FloatTag d;
  for (int n = 0; n < 16; n += kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> acc[kHeadsAtOnce];
      for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::Zero(d);
      for (int i = 0; i < kHeadDim; ++i) {
        const auto k = hn::LoadU(d, keys + i * 16 + n);
        for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::MulAdd(k, hn::Set(d, q[(h0 + h) * kHeadDim + i]), acc[h]);
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) hn::Store(acc[h], d, scores[h0 + h] + n);
    }
}

// out[h][32 dims of `block`] += sum_r p[r][h] * values[r]: 16 even dims, then 16 odd ones.
HWY_INLINE void MixBlock(const float (*p)[kHeads], const bf16* values, int rows, int block, float* out) {
  const FloatTag d;
  for (int n = 0; n < 16; n += kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> even[kHeadsAtOnce], odd[kHeadsAtOnce];
      float* o = out + h0 * kHeadDim + block * 32 + n;
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        even[h] = hn::Load(d, o + h * kHeadDim);
        odd[h] = hn::Load(d, o + h * kHeadDim + 16);
      }
      for (int r = 0; r < rows; ++r) {
        const EvenOdd v = LoadPairs(values + r * 32 + n * 2);
        HWY_UNROLL(8)
        for (int h = 0; h < kHeadsAtOnce; ++h) {
          const auto weight = hn::Set(d, p[r][h0 + h]);
          even[h] = hn::MulAdd(v.even, weight, even[h]);
          odd[h] = hn::MulAdd(v.odd, weight, odd[h]);
        }
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        hn::Store(even[h], d, o + h * kHeadDim);
        hn::Store(odd[h], d, o + h * kHeadDim + 16);
      }
    }
}

HWY_INLINE void MixBlock(const float (*p)[kHeads], const float* values, int rows, int block, float* out) {
  const FloatTag d;
  for (int n = 0; n < 16; n += kLanes)
    for (int h0 = 0; h0 < kHeads; h0 += kHeadsAtOnce) {
      hn::VFromD<FloatTag> acc[kHeadsAtOnce];
      float* o = out + h0 * kHeadDim + block * 16 + n;
      for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::Load(d, o + h * kHeadDim);
      for (int r = 0; r < rows; ++r) {
        const auto v = hn::LoadU(d, values + r * 16 + n);
        for (int h = 0; h < kHeadsAtOnce; ++h) acc[h] = hn::MulAdd(v, hn::Set(d, p[r][h0 + h]), acc[h]);
      }
      for (int h = 0; h < kHeadsAtOnce; ++h) hn::Store(acc[h], d, o + h * kHeadDim);
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
  constexpr int kBlock = 16;
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  alignas(64) float scores[kHeads][kPageRows];
  alignas(64) float p[kPageRows][kHeads];
  const int blocks = (rows + kBlock - 1) / kBlock;
  for (int b = 0; b < blocks; ++b) {
    float(*out)[kPageRows] = reinterpret_cast<float(*)[kPageRows]>(&scores[0][b * kBlock]);
    ScoreBlock(q, keys + key_index<T>(b * kBlock, 0), out);
    FetchAhead(next + key_index<T>(b * kBlock, 0), kBlock * kHeadDim);
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
  constexpr int kWidth = sizeof(T) == 2 ? 32 : 16;
  for (int b = 0; b < kHeadDim / kWidth; ++b) {
    FetchAhead(next + kPageRows * kHeadDim + value_index<T>(0, b * kWidth), kPageRows * kWidth);
    MixBlock(p, values + value_index<T>(0, b * kWidth), rows, b, partial->out);
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

// The order within `partial`: bf16 keeps, per 32 dims, the even ones before the odd ones.
template <class T>
void Finish(const AttentionPartial* partial, float* out) {
  for (int h = 0; h < kHeads; ++h) {
    const float factor = 1 / partial->sum[h];
    const float* from = partial->out + h * kHeadDim;
    float* to = out + h * kHeadDim;
    if constexpr (sizeof(T) == 2) {
      for (int b = 0; b < kHeadDim; b += 32)
        for (int i = 0; i < 16; ++i) {
          to[b + 2 * i] = from[b + i] * factor;
          to[b + 2 * i + 1] = from[b + 16 + i] * factor;
        }
    } else {
      for (int i = 0; i < kHeadDim; ++i) to[i] = from[i] * factor;
    }
  }
}

AttentionKernels GetAttentionKernels() { return {Reset, Page<bf16>, Page<float>, Merge, Finish<bf16>, Finish<float>}; }

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace calla::cpu {
HWY_EXPORT(GetAttentionKernels);
AttentionKernels attention_kernels() { return HWY_DYNAMIC_DISPATCH(GetAttentionKernels)(); }
}  // namespace calla::cpu
#endif
