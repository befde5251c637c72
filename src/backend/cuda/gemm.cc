#include "backend/cuda/gemm.h"

namespace calla::cuda {

void gemm(const Launch& launch, const GemmParams& p, GemmOutput output) {
  switch (output) {
    case GemmOutput::kStore:
      return gemm_store(launch, p);
    case GemmOutput::kAdd:
      return gemm_add(launch, p);
    case GemmOutput::kSwiglu:
      return gemm_swiglu(launch, p);
    case GemmOutput::kBf16:
      return gemm_bf16(launch, p);
  }
}

}  // namespace calla::cuda
