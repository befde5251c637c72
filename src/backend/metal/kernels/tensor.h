#pragma once
// The tensor operations that the kernels use, and what they assume of them. Files that include it begin with the same two
// system headers, which should not see `using namespace metal`.
#if !defined(__HAVE_TENSOR__)
#error "tensor operations need -std=metal4.0 or later"
#endif
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "common.h"

// One operation adds a product of 16 rows x 16 inputs and 16 inputs x 32 outputs to 16 x 32 sums. The right operand is
// stored [outputs][inputs] (NK: weights, keys) or [inputs][outputs] (KN: values). Written out: multiply_accumulate, on
// sums that start at zero. relaxed_precision: with bf16 operands it changes no product, but it selects the lane layout
// below.
constexpr mpp::tensor_ops::matmul2d_descriptor tile_operation(bool by_outputs) {
  return mpp::tensor_ops::matmul2d_descriptor(16, 32, 16, false, by_outputs, true,
                                              mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
}
using OperationNK = mpp::tensor_ops::matmul2d<tile_operation(true), execution_simdgroup>;
using OperationKN = mpp::tensor_ops::matmul2d<tile_operation(false), execution_simdgroup>;
// The types of the operands, from what the getters return: decltype of a variable carries its address space on some
// toolchains (hence metal::remove_addrspace_t in others' code), that of a returned value never does.
using LeftNK = decltype(OperationNK().get_left_input_cooperative_tensor<bfloat, bfloat, float>());
using RightNK = decltype(OperationNK().get_right_input_cooperative_tensor<bfloat, bfloat, float>());
using LeftKN = decltype(OperationKN().get_left_input_cooperative_tensor<bfloat, bfloat, float>());
using RightKN = decltype(OperationKN().get_right_input_cooperative_tensor<bfloat, bfloat, float>());

// Where a lane's elements lie in a 16 x 16 part, on GPUs of generation 17 and later: rows `row` and `row + 8`, columns
// column .. column + 3, four slots each; of a 16 x 32 operand the first eight slots are the first 16 x 16 part. The same
// for left, right (as it is stored) and sums. Not documented; the self check at start compares it with what the system says
// (tensor_layout_probe), and everything here is only used if they agree.
struct LanePlace {
  ushort row;
  ushort column;
};

inline LanePlace lane_place(ushort lane) {
  const ushort q = lane >> 2;
  return {ushort((q & 4) | ((lane >> 1) & 3)), ushort(((q & 2) | (lane & 1)) * 4)};
}
