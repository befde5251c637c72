// What the conformance check must refuse, with words of its complaint; msl_check_test.py compares line by line.
#include <metal_stdlib>
using namespace metal;
constant int kA [[function_constant(3)]];
constant int kB [[function_constant(3)]];  // expect: has the index 3 of kA
struct P {
  int n;
};
inline float sum(const threadgroup float* p) { return p[0]; }
inline float lost(const float* p) { return p[0]; }                // expect: needs an address space
inline int again(int n) { return n < 2 ? 1 : again(n - 1) + kA + kB; }  // expect: calls itself
inline float from_device(const device float* p) { return p[0]; }

kernel void address_spaces(device float* y [[buffer(0)]], constant P& p [[buffer(1)]],
                           constant float* c [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  float mine[4] = {1, 2, 3, 4};
  y[i] = sum(mine);          // expect: no matching function for call to 'sum'
  y[i] += sum(y);            // expect: no matching function for call to 'sum'
  y[i] += from_device(c);    // expect: no matching function for call to 'from_device'
  device float* d = mine;    // expect: cannot initialize
  d[0] = lost(mine) + float(again(3));
  p.n = 3;  // expect: const-qualified
  c[0] = 1;  // expect: not assignable
}

kernel void types(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  bfloat b = 1.0f;            // expect: no viable conversion from 'float'
  y[i] = float(b * half(2));  // expect: ambiguous
  double d = y[i];            // expect: there is no double
  y[i] = float(d);
  float3 v = float3(1, 2);  // expect: as many components
  y[i] = v.x + std::sqrt(2.0);  // expect: no C++ standard library
  int* p = new int;  // expect: no new
  y[i] = float(*p);
}

kernel void too_much(device float* y [[buffer(31)]],  // expect: above 30
                     uint2 i [[thread_position_in_grid]]) {
  threadgroup float big[9000];  // expect: more threadgroup memory
  big[i.x] = 0;
  y[0] = big[0];
}

kernel void positions(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]],  // expect: one vector size
                      uint2 t [[threadgroup_position_in_grid]]) {
  y[i] = float(t.x);
}

[[max_total_threads_per_threadgroup(2048)]] kernel void wide(device float* y [[buffer(0)]],  // expect: more than 1024
                                                             uint i [[thread_position_in_grid]]) {
  y[i] = 0;
}
