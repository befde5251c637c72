#pragma once
// The kernel tables of the instruction set chosen last (choose_kernels).
#include "backend/cpu/kernels.h"

namespace calla::cpu {

MatmulKernels matmul_kernels();
RowKernels row_kernels();
GdnKernels gdn_kernels();
AttentionKernels attention_kernels();

}  // namespace calla::cpu
