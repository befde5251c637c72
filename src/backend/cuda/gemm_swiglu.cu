// affine_gemm (gemm.cuh) for the experts: gate and up projections with SwiGLU.
#include "backend/cuda/gemm.cuh"

namespace calla::cuda {

void gemm_swiglu(const Launch& launch, const GemmParams& p) {
  check(p.w.bits == 4, "experts are packed in 4 bits");
  if (p.pairs != nullptr) return launch_gemm<4, 2, 2, true, GemmOutput::kSwiglu>(launch, p);
  launch_gemm<4, 2, 2, false, GemmOutput::kSwiglu>(launch, p);
}

}  // namespace calla::cuda
