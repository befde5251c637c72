// The GEMMs with Metal 4 tensor operations: M5 and later, where they run on the GPU's matrix units.
#if !defined(__HAVE_TENSOR__)
#error "qmm_tensor.metal needs -std=metal4.0 or later"
#endif
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "qmm_tile.h"

// One operation multiplies 16 rows x 16 inputs by 32 outputs x 16 inputs (stored by output, hence the transposition).
// Written out: multiply_accumulate, on sums that start at zero. relaxed_precision: with bf16 operands it changes no
// product, but it selects the lane layout below.
constexpr mpp::tensor_ops::matmul2d_descriptor tile_operation() {
  return mpp::tensor_ops::matmul2d_descriptor(16, 32, 16, false, true, true,
                                              mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
}
using TileOperation = mpp::tensor_ops::matmul2d<tile_operation(), execution_simdgroup>;
// The types of the operands, from what the getters return: decltype of a variable carries its address space on some
// toolchains (hence metal::remove_addrspace_t in others' code), that of a returned value never does.
using TileLeft = decltype(TileOperation().get_left_input_cooperative_tensor<bfloat, bfloat, float>());
using TileRight = decltype(TileOperation().get_right_input_cooperative_tensor<bfloat, bfloat, float>());

// Where a lane's elements lie in a 16 x 16 part, on GPUs of generation 17 and later: rows `row` and `row + 8`, columns
// column .. column + 3. Not documented; the self check at start compares it with what the system says
// (tensor_layout_probe), and everything here is only used if they agree.
struct LanePlace {
  ushort row;
  ushort column;
};

inline LanePlace lane_place(ushort lane) {
  const ushort q = lane >> 2;
  return {ushort((q & 4) | ((lane >> 1) & 3)), ushort(((q & 2) | (lane & 1)) * 4)};
}

// 16 rows x 32 outputs.
struct TensorMma {
  float sums[16];  // slots 0..7: outputs 0..15, slots 8..15: outputs 16..31

  void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = 0;
  }
  void step(const threadgroup bfloat* a, const threadgroup bfloat* w, ushort lane) {
    TileOperation op;
    TileLeft left = op.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
    TileRight right = op.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
    auto out = op.get_destination_cooperative_tensor<TileLeft, TileRight, float>();
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

template <typename Tensor>
int2 place_in(thread Tensor& t, ushort slot) {
  if (slot >= t.get_capacity() || !t.is_valid_element(slot)) return int2(-1);
  const auto at = t.get_multidimensional_index(slot);
  return int2(at[1], at[0]);
}

// tensor_layout_probe: where each lane's slots lie, as the system says: (row, column) of the left input [32][8],
// then of the right one [32][16], then of the sums [32][16]; (-1, -1) for a slot that is not valid.
//   Launch    grid (1), threadgroup 32.
[[max_total_threads_per_threadgroup(kLanes)]] kernel void tensor_layout_probe(constant CombineParams& p [[buffer(0)]],
                                                                              device int2* places [[buffer(1)]],
                                                                              ushort lane
                                                                              [[thread_index_in_simdgroup]]) {
  TileOperation op;
  TileLeft left = op.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
  TileRight right = op.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
  auto out = op.get_destination_cooperative_tensor<TileLeft, TileRight, float>();
#pragma unroll
  for (ushort i = 0; i < 8; ++i) places[lane * 8 + i] = place_in(left, i);
#pragma unroll
  for (ushort i = 0; i < 16; ++i) places[32 * 8 + lane * 16 + i] = place_in(right, i);
#pragma unroll
  for (ushort i = 0; i < 16; ++i) places[32 * 24 + lane * 16 + i] = place_in(out, i);
}
