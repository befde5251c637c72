// Chooses the instruction set, once per backend.
#include <mutex>

#include "backend/cpu/kernels.h"
#include "backend/cpu/tables.h"
#include "backend/cpu/targets.h"
#include "hwy/highway.h"

namespace calla::cpu {
namespace {

std::string target_name(int64_t target) {
  switch (target) {
    case HWY_AVX3_DL:
      return "AVX-512 VNNI";
    case HWY_AVX2:
      return "AVX2";
    case HWY_NEON:
      return "NEON";
    default:
      return "portable";
  }
}

}  // namespace

Kernels choose_kernels(bool allow_avx512) {
  // Highway keeps its choice for the process; it is made afresh for each backend and read at once.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  hwy::SetSupportedTargetsForTest(0);
  int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  if (!allow_avx512) targets &= ~HWY_AVX3_DL;
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(targets);
  Kernels kernels;
  kernels.name = target_name(targets & -targets);  // the best target is the lowest bit
  kernels.matmul = matmul_kernels();
  kernels.row = row_kernels();
  kernels.gdn = gdn_kernels();
  kernels.attention = attention_kernels();
  hwy::SetSupportedTargetsForTest(0);
  return kernels;
}

}  // namespace calla::cpu
