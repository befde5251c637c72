#include <metal_stdlib>
using namespace metal;

// partial[g] = the sum of a threadgroup's 64 values. Launch: threadgroups of 64.
kernel void sum(device const float* values [[buffer(0)]], device float* partial [[buffer(1)]],
                constant uint& count [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float part[64];
  const uint i = group * 64 + thread_index;
  part[thread_index] = i < count ? values[i] : 0.0f;
  for (uint width = 32; width > 0; width /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < width) part[thread_index] += part[thread_index + width];
  }
  if (thread_index == 0) partial[group] = part[0];
}

// The same with a fault: the last threadgroup reads past the end.
kernel void sum_past_the_end(device const float* values [[buffer(0)]], device float* partial [[buffer(1)]],
                             constant uint& count [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float part[64];
  part[thread_index] = values[group * 64 + thread_index];
  for (uint width = 32; width > 0; width /= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < width) part[thread_index] += part[thread_index + width];
  }
  if (thread_index == 0) partial[group] = part[0];
}
