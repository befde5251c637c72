#pragma once
// The words of TokenWords: how they are packed, sent and received.
#include "backend/cuda/fixed_row.cuh"
#include "backend/cuda/program/program_parts.cuh"

namespace calla::cuda::token {

// A word that never comes means that a block is missing: after some seconds the kernel fails instead of hanging.
inline constexpr unsigned kMostTries = 1u << 24;

__device__ __forceinline__ void send(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint64_t peek(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
struct TwoWords {
  uint64_t a, b;
};
__device__ __forceinline__ TwoWords peek_two(const uint64_t* from) {
  TwoWords w;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(w.a), "=l"(w.b) : "l"(from) : "memory");
  return w;
}
__device__ __forceinline__ void send(WideWord* to, const WideWord& w) {
  const uint64_t low = static_cast<uint64_t>(w.part[1]) << 32 | w.part[0];
  const uint64_t high = static_cast<uint64_t>(w.part[3]) << 32 | w.part[2];
  asm volatile("{\n.reg .b128 word;\nmov.b128 word, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}
__device__ __forceinline__ WideWord peek(const WideWord* from) {
  uint64_t low, high;
  asm volatile("{\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%2];\nmov.b128 {%0, %1}, word;\n}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

// ---- words with 32 bits of contents --------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t pack_word(uint32_t contents, uint32_t generation) {
  return static_cast<uint64_t>(generation) << 32 | contents;
}
__device__ __forceinline__ bool is_of(uint64_t word, uint32_t generation) {
  return static_cast<uint32_t>(word >> 32) == generation;
}
// Reads again until every lane's word has arrived. The whole warp stays together: lanes that left the loop one by one
// would make every exchange between lanes that follows an execution for each group of them.
template <class Word, class Peek, class Arrived>
__device__ __forceinline__ void wait_for(Word& word, const Peek& peek_again, const Arrived& arrived) {
  for (unsigned tries = 0; !__all_sync(0xffffffffu, arrived(word)); ++tries) {
    if (tries == kMostTries) __trap();
    word = peek_again();
  }
}
// All lanes of a warp call these, with a word each.
__device__ __forceinline__ void finish_receiving(uint64_t& word, const uint64_t* from, uint32_t generation) {
  wait_for(
      word, [&] { return peek(from); }, [&](uint64_t w) { return is_of(w, generation); });
}
__device__ __forceinline__ void finish_receiving(TwoWords& words, const uint64_t* from, uint32_t generation) {
  wait_for(
      words, [&] { return peek_two(from); },
      [&](const TwoWords& w) { return is_of(w.a, generation) && is_of(w.b, generation); });
}
__device__ __forceinline__ float receive_float(const uint64_t* from, uint32_t generation) {
  uint64_t word = peek(from);
  finish_receiving(word, from, generation);
  return __uint_as_float(static_cast<uint32_t>(word));
}

// ---- the shared expert's hidden units -------------------------------------------------------------------------------
// Where the pair (2 p, 2 p + 1) lies: a thread that stages the four of FixedInputs finds both its pairs side by side.
__host__ __device__ constexpr int pair_place(int p) { return p / 8 * 8 + p % 4 * 2 + p % 8 / 4; }

// ---- the residual row ----------------------------------------------------------------------------------------------
// Thread t stages inputs 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of the 16 from 16 (t / 4) on, q = t % 4 (FixedInputs), which are
// one word: numbers of 24 bits (2^-17 relative; each block keeps its own part in fp32), and the generation.
__device__ __forceinline__ WideWord pack_residual(const FixedInputs& v, uint32_t generation) {
  constexpr float kHalfUnit = 1.0f / (1 << 17);
  const auto bits = [](float x) { return __float_as_uint(fmaf(x, kHalfUnit, x)) >> 8; };
  const uint32_t a = bits(v.low.x), b = bits(v.low.y), c = bits(v.high.x), d = bits(v.high.y);
  return {a | b << 24, b >> 8 | c << 16, c >> 16 | d << 8, generation};
}
__device__ __forceinline__ FixedInputs unpack_residual(const WideWord& w) {
  constexpr uint32_t kBits = 0xffffff00u;
  return {
      make_float2(__uint_as_float(w.part[0] << 8), __uint_as_float(__byte_perm(w.part[0], w.part[1], 0x5430) & kBits)),
      make_float2(__uint_as_float(__byte_perm(w.part[1], w.part[2], 0x4320) & kBits),
                  __uint_as_float(w.part[2] & kBits))};
}
__device__ __forceinline__ FixedInputs receive_residual(const TokenWords& words, uint32_t generation) {
  const WideWord* from = words.residual + threadIdx.x;
  WideWord w = peek(from);
  wait_for(
      w, [&] { return peek(from); }, [&](const WideWord& v) { return v.part[3] == generation; });
  return unpack_residual(w);
}

// ---- rows of eight numbers a word ------------------------------------------------------------------------------------
// Word 4 b + q: inputs 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of the 16 from 32 b on, and of the 16 behind them. 13 bits a number,
// two in each part, with an exponent in common (2^-12 of the largest); in the parts' upper six bits 16 bits of generation
// and the exponent.
struct EightInputs {
  FixedInputs half[2];
};
inline constexpr int kNumberBits = 13, kUpperBits = 2 * kNumberBits;
inline constexpr uint32_t kNumberMask = (1u << kNumberBits) - 1;

__device__ __forceinline__ WideWord tag_of(uint32_t generation) {
  return {(generation & 63) << kUpperBits, (generation >> 6 & 63) << kUpperBits, (generation >> 12 & 15) << kUpperBits,
          0};
}
__device__ __forceinline__ bool has_tag(const WideWord& w, const WideWord& tag) {
  constexpr uint32_t kSix = 63u << kUpperBits, kFour = 15u << kUpperBits;
  return (((w.part[0] ^ tag.part[0]) & kSix) | ((w.part[1] ^ tag.part[1]) & kSix) |
          ((w.part[2] ^ tag.part[2]) & kFour)) == 0;
}
__device__ __forceinline__ float largest_of(const EightInputs& v) {
  float top = 0;
#pragma unroll
  for (const FixedInputs& h : v.half)
    top = max_or_nan(max_or_nan(top, max_or_nan(fabsf(h.low.x), fabsf(h.low.y))),
                     max_or_nan(fabsf(h.high.x), fabsf(h.high.y)));
  return top;
}
__device__ __forceinline__ WideWord pack_eight(const EightInputs& v, uint32_t generation) {
  const uint32_t exponent = __float_as_uint(largest_of(v)) >> 23;  // 255: infinite, or NaN
  // 2^(11 - e): a number below 2^(e + 1) becomes one below 4096.
  const float factor = exponent < 12 || exponent == 255 ? 0.0f : __uint_as_float((265 - exponent) << 23);
  constexpr float kInteger = 12582912.0f;  // 1.5 x 2^23: the rounded number in the low bits
  const auto bits = [&](float x) {
    return __float_as_uint(fminf(x * factor, static_cast<float>(kNumberMask / 2)) + kInteger) & kNumberMask;
  };
  const auto two = [&](float2 x) { return bits(x.x) | bits(x.y) << kNumberBits; };
  const WideWord tag = tag_of(generation);
  return {two(v.half[0].low) | tag.part[0], two(v.half[0].high) | tag.part[1],
          two(v.half[1].low) | tag.part[2] | exponent >> 6 << 30, two(v.half[1].high) | exponent << kUpperBits};
}
// The numbers as integers; times unpacked_factor() they are what was sent.
__device__ __forceinline__ EightInputs unpack_eight(const WideWord& w) {
  // The sign's bit turned over, in the mantissa of 2^23.
  constexpr uint32_t kFloat = 0x4b000000u, kSign = 1u << (kNumberBits - 1);
  constexpr float kOffset = 8388608.0f + kSign;
  const auto number = [](uint32_t bits) { return __uint_as_float(((bits & kNumberMask) ^ kSign) | kFloat) - kOffset; };
  const auto two = [&](uint32_t part) { return make_float2(number(part), number(part >> kNumberBits)); };
  return {{{two(w.part[0]), two(w.part[1])}, {two(w.part[2]), two(w.part[3])}}};
}
__device__ __forceinline__ float unpacked_factor(const WideWord& w) {
  const uint32_t exponent = w.part[3] >> kUpperBits | w.part[2] >> 30 << 6;
  if (exponent == 255) return __uint_as_float(0x7fffffffu);
  return exponent < 12 ? 0.0f : __uint_as_float((exponent - 11) << 23);
}
// The word of a thread.
__device__ __forceinline__ void finish_receiving(WideWord& w, const WideWord* from, uint32_t generation) {
  const WideWord tag = tag_of(generation);
  wait_for(
      w, [&] { return peek(from); }, [&](const WideWord& v) { return has_tag(v, tag); });
}
// Stores a thread's eight inputs, times `factor`; eight neighbouring lanes hold one group.
__device__ __forceinline__ void store_eight(const FixedRow& to, const EightInputs& v, float factor) {
  float top = largest_of(v) * fabsf(factor);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) top = max_or_nan(top, __shfl_xor_sync(0xffffffffu, top, offset));
  const float inverse = factor * __fdividef(kLargestFixed, top);
  const int tid = static_cast<int>(threadIdx.x), group = tid / 8, step = tid / 4 % 2 * 2, q = tid % 4;
  uint2 high, low;
  split_fixed(v.half[0], inverse, high.x, low.x);
  split_fixed(v.half[1], inverse, high.y, low.y);
  auto* words = reinterpret_cast<uint32_t*>(to.operands) + group * 32 + q * 4 + step;
  *reinterpret_cast<uint2*>(words) = high;
  *reinterpret_cast<uint2*>(words + 16) = low;
  if (tid % 8 == 0) to.factors[group] = top * (1 / kLargestFixed);
}

}  // namespace calla::cuda::token
