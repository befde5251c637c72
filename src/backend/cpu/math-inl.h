// Vector arithmetic that several kernels share, for one instruction set.
#if defined(CALLA_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CALLA_CPU_MATH_INL_H_
#undef CALLA_CPU_MATH_INL_H_
#else
#define CALLA_CPU_MATH_INL_H_
#endif

#include "backend/cpu/kernels.h"
#include "hwy/highway.h"
//
#include "hwy/contrib/math/math-inl.h"
//
#include "backend/cpu/target_flags.h"

HWY_BEFORE_NAMESPACE();
namespace calla::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;

template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const auto one = hn::Set(d, 1.0f);
  // Beyond +-88 the exponential leaves fp32's range; the result is 0 or 1 to fp32 there anyway.
  const auto clamped = hn::Min(hn::Max(x, hn::Set(d, -87.0f)), hn::Set(d, 87.0f));
  return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Neg(clamped))));
}

template <class D, class V>
HWY_INLINE V Silu(D d, V x) {
  return hn::Mul(x, Sigmoid(d, x));
}

// n is a multiple of 16.
HWY_INLINE float SumOfSquares(const float* x, int n) {
  const FloatTag d;
  constexpr int kParts = 4;
  hn::VFromD<FloatTag> sum[kParts] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  const int lanes = static_cast<int>(hn::Lanes(d));
  int part = 0;
  for (int i = 0; i < n; i += lanes, part = (part + 1) % kParts) {
    const auto v = hn::LoadU(d, x + i);
    sum[part] = hn::MulAdd(v, v, sum[part]);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
}

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#endif
