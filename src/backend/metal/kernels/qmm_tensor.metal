// The GEMMs with Metal 4 tensor operations: M5 and later, where they run on the GPU's matrix units.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "qmm_tile.h"
#include "tensor.h"

// 16 rows x 32 outputs.
struct TensorMma {
  float sums[16];  // slots 0..7: outputs 0..15, slots 8..15: outputs 16..31

  void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = 0;
  }
  void step(const threadgroup bfloat* a, const threadgroup bfloat* w, ushort lane) {
    OperationNK op;
    LeftNK left = op.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
    RightNK right = op.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
    auto out = op.get_destination_cooperative_tensor<LeftNK, RightNK, float>();
    const LanePlace at = lane_place(lane);
#pragma unroll
    for (ushort i = 0; i < 16; ++i) out[i] = sums[i];
    for (int k = 0; k < kTileK; k += 16) {
      // Four slots at a time are neighbours in a row.
#pragma unroll
      for (ushort part = 0; part < 2; ++part) {
        const bfloat4 four = *(const threadgroup bfloat4*)(a + (at.row + 8 * part) * kTilePitch + k + at.column);
#pragma unroll
        for (ushort i = 0; i < 4; ++i) left[part * 4 + i] = four[i];
      }
#pragma unroll
      for (ushort part = 0; part < 4; ++part) {
        const bfloat4 four = *(const threadgroup bfloat4*)(w + (at.row + 8 * part) * kTilePitch + k + at.column);
#pragma unroll
        for (ushort i = 0; i < 4; ++i) right[part * 4 + i] = four[i];
      }
      op.run(left, right, out);
    }
#pragma unroll
    for (ushort i = 0; i < 16; ++i) sums[i] = out[i];
  }
  void store(threadgroup float* out, ushort lane) {
    const LanePlace at = lane_place(lane);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      out[(at.row + 8 * (i % 8 / 4)) * kTileN + 16 * (i / 8) + at.column + i % 4] = sums[i];
    }
  }
};

// clang-format off
template [[host_name("affine_qmm_16_tensor")]] [[kernel]] decltype(affine_qmm<16, TensorMma>) affine_qmm<16, TensorMma>;
template [[host_name("affine_qmm_32_tensor")]] [[kernel]] decltype(affine_qmm<32, TensorMma>) affine_qmm<32, TensorMma>;
template [[host_name("experts_up_qmm_16_tensor")]] [[kernel]] decltype(experts_up_qmm<16, TensorMma>) experts_up_qmm<16, TensorMma>;
template [[host_name("experts_up_qmm_32_tensor")]] [[kernel]] decltype(experts_up_qmm<32, TensorMma>) experts_up_qmm<32, TensorMma>;
template [[host_name("experts_down_qmm_16_tensor")]] [[kernel]] decltype(experts_down_qmm<16, TensorMma>) experts_down_qmm<16, TensorMma>;
template [[host_name("experts_down_qmm_32_tensor")]] [[kernel]] decltype(experts_down_qmm<32, TensorMma>) experts_down_qmm<32, TensorMma>;
// clang-format on
