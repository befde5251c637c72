// affine_gemm (gemm.cuh) for the experts: down projections, bf16 out.
#include "backend/cuda/gemm.cuh"

namespace calla::cuda {

void gemm_bf16(const Launch& launch, const GemmParams& p) {
  check(p.w.bits == 4, "experts are packed in 4 bits");
  if (p.pairs != nullptr) return launch_gemm<4, 2, 2, true, GemmOutput::kBf16>(launch, p);
  launch_gemm<4, 2, 2, false, GemmOutput::kBf16>(launch, p);
}

}  // namespace calla::cuda
