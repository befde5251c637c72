// affine_panel: out[m][16] = W[16, K] x[m, K] for one panel of 16 weight rows, one row per lane.
//   weights  4- or 8-bit codes as they lie in the file, bf16 scale and bias per group: w = scale * q + bias
//   rows     quantised to 16 bits in two int8 planes (kernels.h), any number of them, one at a time
//   How      64 bytes of each of the 16 rows are transposed to 16 vectors of one dword per row; the codes of
//   a group
//            then sit in 16 registers while all rows of activations pass (their dwords broadcast). The
//            integer sum of a group is exact; per group one fma adds (hi * 256 + lo) * (scale * d), one adds
//            bias * sum.
//   Moves    16 * K / 2 (or K) bytes of codes, 64 bytes per group of scales and biases; reads next_* ahead.
//   Numerics the order of the float additions is the same for every target and every m.
// float_panel: the same product from fp32 rows and exactly de-quantised (or bf16) weights.
#include "backend/cpu/kernels.h"
#include "base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/matmul_kernels.cc"
#include "backend/cpu/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "backend/cpu/matmul_kernels-inl.h"
#include "backend/cpu/target_flags.h"

#if HWY_ONCE
#include "backend/cpu/tables.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace calla::cpu {
namespace HWY_NAMESPACE {

MatmulKernels GetMatmulKernels() {
  return {AffinePanel<4, 64>, AffinePanel<4, 32>, AffinePanel<8, 64>, AffinePanel<8, 32>,
          FloatPanel<4>,      FloatPanel<8>,      FloatPanel<16>};
}

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace calla::cpu {
HWY_EXPORT(GetMatmulKernels);
MatmulKernels matmul_kernels() { return HWY_DYNAMIC_DISPATCH(GetMatmulKernels)(); }
}  // namespace calla::cpu
#endif
