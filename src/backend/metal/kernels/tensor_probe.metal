// Where the elements of cooperative tensors lie: compared at start with what tensor.h assumes (tensor_check.cc).
#include "tensor.h"

template <typename Tensor>
int2 place_in(thread Tensor& t, ushort slot) {
  if (slot >= t.get_capacity() || !t.is_valid_element(slot)) return int2(-1);
  const auto at = t.get_multidimensional_index(slot);
  return int2(at[1], at[0]);
}

// tensor_layout_probe: where each lane's slots lie, as the system says: (row, column) in each operand as it is stored,
// (-1, -1) for a slot that is not valid.
//   places    NK: left [32][8], right [32][16], sums [32][16]; then the same for KN
//   Launch    grid (1), threadgroup 32.
[[max_total_threads_per_threadgroup(kLanes)]] kernel void tensor_layout_probe(constant ProbeParams& p [[buffer(0)]],
                                                                              device int2* places [[buffer(1)]],
                                                                              ushort lane
                                                                              [[thread_index_in_simdgroup]]) {
  OperationNK nk;
  LeftNK left_nk = nk.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
  RightNK right_nk = nk.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
  auto sums_nk = nk.get_destination_cooperative_tensor<LeftNK, RightNK, float>();
  OperationKN kn;
  LeftKN left_kn = kn.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
  RightKN right_kn = kn.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
  auto sums_kn = kn.get_destination_cooperative_tensor<LeftKN, RightKN, float>();
  device int2* of_kn = places + p.places;
#pragma unroll
  for (ushort i = 0; i < 8; ++i) {
    places[lane * 8 + i] = place_in(left_nk, i);
    of_kn[lane * 8 + i] = place_in(left_kn, i);
  }
#pragma unroll
  for (ushort i = 0; i < 16; ++i) {
    places[32 * 8 + lane * 16 + i] = place_in(right_nk, i);
    places[32 * 24 + lane * 16 + i] = place_in(sums_nk, i);
    of_kn[32 * 8 + lane * 16 + i] = place_in(right_kn, i);
    of_kn[32 * 24 + lane * 16 + i] = place_in(sums_kn, i);
  }
}
