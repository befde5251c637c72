// affine_gemm (gemm.cuh) with an added fp32 output: output projections.
#include "backend/cuda/gemm.cuh"

namespace calla::cuda {

void gemm_add(const Launch& launch, const GemmParams& p) {
  check(p.pairs == nullptr, "fp32 outputs are dense products");
  if (p.w.bits == 8) return launch_gemm<8, 1, 1, false, GemmOutput::kAdd>(launch, p);
  // Few rows: small blocks, so that enough of them read weights at once.
  if (p.rows <= 64) return launch_gemm<4, 1, 1, false, GemmOutput::kAdd>(launch, p);
  launch_gemm<4, 2, 2, false, GemmOutput::kAdd>(launch, p);
}

}  // namespace calla::cuda
