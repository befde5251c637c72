#pragma once
// Before the tensor-op GEMMs are trusted, at every start: compilers and GPUs have been seen to get them wrong,
// silently, and only at real sizes. A failure is no error: the simdgroup GEMMs take over, and the description says why.
#include <string>

#include "backend/metal/plan.h"

namespace calla::metal {

// Scratch memory that the check may overwrite.
struct TensorCheckMemory {
  BufferSpan input;     // rows * k bf16
  BufferSpan expected;  // rows * n f32
  BufferSpan result;    // rows * n f32
};

// Compiles the tensor-op library, compares the lane layout that its kernels assume with what the system reports, and
// runs a GEMM of `rows` rows over a real weight matrix, and a small attention, in both forms. Returns "" if all is well,
// else what is wrong.
std::string check_tensor_ops(Device& device, const BoundMatrix& matrix, int rows, const TensorCheckMemory& memory);

}  // namespace calla::metal
