#pragma once
// Function constants, small loads and stores, and the activation functions that several kernels use.
//
// A rule of all kernels: a loop that indexes an array of registers carries `#pragma unroll`. Registers have no index, so
// where the compiler leaves such a loop rolled, the array goes to memory.
#include <metal_stdlib>

#include "../params.h"

using namespace metal;
using namespace calla::mtl;

// One list for all kernels, so that an id means one thing. Set in plan.cc and metal_backend.cc.
// clang-format off
constant int kBits0 [[function_constant(0)]];          // 4, 8, or 16 for bf16: of the kernel's first matrix
constant int kBits1 [[function_constant(1)]];
constant int kBits2 [[function_constant(2)]];
constant int kBits3 [[function_constant(3)]];
constant bool kGatherRows [[function_constant(4)]];    // rmsnorm_qmv: the rows are those of the row list
constant bool kWriteNormed [[function_constant(5)]];   // rmsnorm_qmv: one more threadgroup stores the normed row
constant int kOutput [[function_constant(6)]];         // affine_qmm: 0 bf16, 1 fp32, 2 added to fp32
constant bool kSinglePass [[function_constant(7)]];    // sdpa_decode: one key range, so the result is final
constant bool kFoldPrepare [[function_constant(8)]];   // sdpa_decode: prepares q, k and v itself
constant bool kFixedBlocks [[function_constant(9)]];   // sdpa_decode: ranges of kFixedBlockKeys keys
// clang-format on

inline float4 load4(const device bfloat* p) { return float4(*(const device bfloat4*)p); }
inline float4 load4(const device float* p) { return *(const device float4*)p; }
inline float4 load4_shared(const threadgroup float* p) { return float4(p[0], p[1], p[2], p[3]); }
inline void store4(device bfloat* p, float4 v) { *(device bfloat4*)p = bfloat4(v); }

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }
// log(1 + exp(x)); beyond 20 the 1 is below fp32's last bit.
inline float softplus(float x) { return x > 20.0f ? x : precise::log(1.0f + precise::exp(x)); }
