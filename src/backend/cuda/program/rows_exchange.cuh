#pragma once
// The words of RowsWords: how they are tagged, sent and received.
#include "backend/cuda/program/program_parts.cuh"
#include "backend/cuda/program/rows_program.h"
#include "backend/cuda/program/token_exchange.cuh"

namespace calla::cuda::rows {

using token::peek;
using token::send;

// The tag of each kind of word: turned over exactly when words of the kind are sent. All blocks count alike.
enum class WordKind : uint32_t { kResidual, kMixed, kGdn, kExperts };
class RowsTags {
 public:
  __device__ __forceinline__ explicit RowsTags(uint32_t bits) : bits_(bits) {}
  __device__ __forceinline__ uint32_t bits() const { return bits_; }
  __device__ __forceinline__ uint32_t of(WordKind kind) const { return bits_ >> static_cast<uint32_t>(kind) & 1; }
  __device__ __forceinline__ void turn(WordKind kind) { bits_ ^= 1u << static_cast<uint32_t>(kind); }

 private:
  uint32_t bits_;
};

// The tag is no part of the value: the bit is zero in what is received, whatever was in it, and, where a word has numbers
// of several rows, in all of them. So neither the steps before nor a row's place change a result.
__device__ __forceinline__ uint32_t untagged(uint32_t part) { return part & ~1u; }
__device__ __forceinline__ uint32_t tagged(uint32_t part, uint32_t tag) { return untagged(part) | tag; }
__device__ __forceinline__ bool has(const WideWord& w, uint32_t tag) { return (w.part[3] & 1) == tag; }
__device__ __forceinline__ void send_tagged(WideWord* to, uint4 v, uint32_t tag) {
  send(to, WideWord{v.x, v.y, v.z, tagged(v.w, tag)});
}
__device__ __forceinline__ void send_tagged(WideWord* to, float4 v, uint32_t tag) {
  send_tagged(to,
              make_uint4(untagged(__float_as_uint(v.x)), untagged(__float_as_uint(v.y)), untagged(__float_as_uint(v.z)),
                         __float_as_uint(v.w)),
              tag);
}
__device__ __forceinline__ float4 as_floats(const WideWord& w) {
  return make_float4(__uint_as_float(w.part[0]), __uint_as_float(w.part[1]), __uint_as_float(w.part[2]),
                     __uint_as_float(w.part[3]));
}
__device__ __forceinline__ void send_tagged(uint32_t* to, float v, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(tagged(__float_as_uint(v), tag)) : "memory");
}
__device__ __forceinline__ uint32_t peek(const uint32_t* from) {
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// A block is missing, or has failed: ends the kernel with an error. (A trap would do, but where there is one the compiler
// keeps to the registers of the launch.)
__device__ __forceinline__ void give_up() {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(uint64_t{0}), "r"(0) : "memory");
}

// A thread's words on their way, kStride apart from `from` on, the first `count` of them: asked for all together, and again
// those that had not arrived, until all lanes' have. While the first is missing only that one is asked for again: whoever
// waits must not fill the way.
template <int kStride, int kMostWords>
__device__ __forceinline__ void receive(WideWord (&w)[kMostWords], const WideWord* from, int count, uint32_t tag) {
#pragma unroll
  for (int i = 0; i < kMostWords; ++i) {
    w[i] = {0, 0, 0, tag};
    if (i < count) w[i] = peek(from + i * kStride);
  }
  for (unsigned tries = 0;; ++tries) {
    bool arrived = true;
#pragma unroll
    for (int i = 0; i < kMostWords; ++i) arrived &= has(w[i], tag);
    if (__all_sync(0xffffffffu, arrived)) break;
    if (tries == token::kMostTries) give_up();
    const bool first = has(w[0], tag);
    if (!first) w[0] = peek(from);
#pragma unroll
    for (int i = 1; i < kMostWords; ++i)
      if (first && !has(w[i], tag)) w[i] = peek(from + i * kStride);
  }
#pragma unroll
  for (WideWord& word : w) word.part[3] = untagged(word.part[3]);
}
__device__ __forceinline__ WideWord receive(const WideWord* from, uint32_t tag) {
  WideWord w[1];
  receive<1>(w, from, 1, tag);
  return w[0];
}
// Single numbers, and words beside them.
template <int kCount, class At>
class Numbers {
 public:
  __device__ __forceinline__ Numbers(const At& at, uint32_t tag) : at_(at), tag_(tag) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) w_[i] = peek(at(i));
  }
  __device__ __forceinline__ void finish(float (&v)[kCount]) {
    for (unsigned tries = 0;; ++tries) {
      bool arrived = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) arrived &= (w_[i] & 1) == tag_;
      if (__all_sync(0xffffffffu, arrived)) break;
      if (tries == token::kMostTries) give_up();
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if ((w_[i] & 1) != tag_) w_[i] = peek(at_(i));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __uint_as_float(untagged(w_[i]));
  }

 private:
  const At& at_;
  uint32_t tag_;
  uint32_t w_[kCount];
};
template <int kCount, class At>
__device__ __forceinline__ void receive(float (&v)[kCount], const At& at, uint32_t tag) {
  Numbers<kCount, At>(at, tag).finish(v);
}
template <int kStride, int kMostWords, int kNumbers, class NumberAt>
__device__ __forceinline__ void receive(WideWord (&w)[kMostWords], const WideWord* from, int count,
                                        float (&v)[kNumbers], const NumberAt& number_at, uint32_t tag) {
  Numbers<kNumbers, NumberAt> numbers(number_at, tag);
  receive<kStride>(w, from, count, tag);
  numbers.finish(v);
}

}  // namespace calla::cuda::rows
