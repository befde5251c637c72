// Kernels that are right: the tests run them under every check.
#include <metal_stdlib>
using namespace metal;

struct AddArgs {
  uint n;
  float scale;
};

constant bool has_bias [[function_constant(0)]];
constant int extra [[function_constant(1)]];
constant float offset = is_function_constant_defined(extra) ? float(extra) : 0.5;

// y[i] = scale * a[i] + b[i] (+ bias[i]) + offset
kernel void scaled_add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                       device float* y [[buffer(2)]], constant AddArgs& args [[buffer(3)]],
                       device const float* bias [[buffer(4), function_constant(has_bias)]],
                       uint i [[thread_position_in_grid]]) {
  if (i >= args.n) return;
  float v = args.scale * a[i] + b[i] + offset;
  if (has_bias) v += bias[i];
  y[i] = v;
}

// Sum of D elements, one threadgroup per row.
template <typename T, int D>
[[kernel]] void row_sum(device const T* x [[buffer(0)]], device float* out [[buffer(1)]],
                        uint3 row [[threadgroup_position_in_grid]], ushort lane [[thread_index_in_simdgroup]],
                        ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[D / 32];
  const float sum = simd_sum(float(x[row.x * D + simdgroup * 32 + lane]));
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    const float total = simd_sum(lane < D / 32 ? partial[lane] : 0.0);
    if (lane == 0) out[row.x] = total;
  }
}

#define INSTANTIATE_ROW_SUM(name, T, D) \
  template [[host_name(name)]] [[kernel]] decltype(row_sum<T, D>) row_sum<T, D>;
INSTANTIATE_ROW_SUM("row_sum_float_256", float, 256)
INSTANTIATE_ROW_SUM("row_sum_half_64", half, 64)
INSTANTIATE_ROW_SUM("row_sum_bfloat_1024", bfloat, 1024)
