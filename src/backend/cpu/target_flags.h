// No include guard: included once per instruction set, after hwy/highway.h. Highway 1.0.3 compiles its widest
// x86 target without the AVX-512 form of VNNI, though it only chooses it where the processor has it.
#if HWY_TARGET == HWY_AVX3_DL && defined(HWY_TARGET_STR)
#undef HWY_TARGET_STR
#define HWY_TARGET_STR \
  HWY_TARGET_STR_AVX3  \
  ",vpclmulqdq,avx512vbmi,avx512vbmi2,vaes,avxvnni,avx512bitalg,avx512vpopcntdq,avx512vnni"
#endif
