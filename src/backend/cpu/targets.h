#pragma once
// Which instruction sets the kernels are compiled for: AVX-512 with VNNI (Ice Lake, Zen 4 and later), AVX2,
// NEON, and plain 128-bit emulation for whatever else. Include before hwy/foreach_target.h.
#define HWY_WANT_AVX3_DL
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
