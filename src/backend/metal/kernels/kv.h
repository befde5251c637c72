#pragma once
// KV pages, and the q/k preparation that two kernels share.
//   kv [pages][attention layers][k, v][kv heads][64 rows][256] bf16: a row is 512 bytes, read by one simdgroup at once.
#include "common.h"

// Below every score: the maximum of no keys. Finite, so that fast::exp never sees an infinity.
constant constexpr float kNone = -1e30f;

inline uint kv_page_elements(constant AttentionParams& p) {
  return uint(p.layers) * 2 * uint(p.kv_heads) * uint(kPageRows * kHeadSize);
}

// Where a row lies: only the page needs 64 bits, and what belongs to the head does not change from key to key.
inline ulong kv_row(constant AttentionParams& p, int page, int which, int head, int row) {
  const uint in_page =
      ((uint(p.layer) * 2 + uint(which)) * uint(p.kv_heads) + uint(head)) * uint(kPageRows) + uint(row);
  return ulong(uint(page)) * ulong(kv_page_elements(p)) + ulong(in_page * uint(kHeadSize));
}

// A lane's share of a head's 256 elements as they are stored, bf16 in pairs: lane l has elements 8 l .. 8 l + 7, so
// that a simdgroup reads or writes the 512 bytes of a row at once.
inline uint4 load_words(const device bfloat* p, ushort lane) { return *((const device uint4*)p + lane); }
inline void store_words(device bfloat* p, ushort lane, uint4 words) { *((device uint4*)p + lane) = words; }

// The same as numbers.
struct HeadSlice {
  float4 low;
  float4 high;
};

inline HeadSlice expand(uint4 words) {  // a bf16 is the upper half of a float
  const float4 even = as_type<float4>(words << 16u);
  const float4 odd = as_type<float4>(words & 0xffff0000u);
  return {float4(even.x, odd.x, even.y, odd.y), float4(even.z, odd.z, even.w, odd.w)};
}

inline uint4 pack(HeadSlice h) { return uint4(as_type<uint2>(bfloat4(h.low)), as_type<uint2>(bfloat4(h.high))); }

// The other spread of a head, for the `coalesced-kv` control: lane l has elements l, l + 32, ..., l + 224.
inline uint4 load_apart(const device bfloat* p, ushort lane) {
  uint4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = uint(as_type<ushort>(p[lane + 64 * i])) | uint(as_type<ushort>(p[lane + 64 * i + 32])) << 16u;
  return words;
}

// From the first spread to the other: element l + 32 i is element l % 8 of lane (l + 32 i) / 8.
inline uint4 spread(uint4 words, ushort lane) {
  uint4 out = uint4(0);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 from = simd_shuffle(words, ushort((lane + 32 * i) / 8));
    const uint element = (from[lane % 8 / 2] >> uint(lane % 2 * 16)) & 0xffffu;
    out[i / 2] |= element << uint(i % 2 * 16);
  }
  return out;
}

inline float dot_head(HeadSlice a, HeadSlice b) { return dot(a.low, b.low) + dot(a.high, b.high); }

// What RoPE multiplies a lane's elements and their partners with: cosine, and sine with its sign. Element i < 32 turns
// with i + 32, so lanes 0..3 pair with lanes 4..7; the other elements stay (1 and 0).
struct Rotation {
  HeadSlice cosine;
  HeadSlice sine;
};

// Lane l computes pair l, once for all heads; precise:: because a position goes into the hundred thousands.
static_assert(kRotaryPairs == kLanes, "a rotary pair a lane");
inline Rotation rotation_of(const device float* frequencies, int position, ushort lane) {
  const float angle = float(position) * frequencies[lane];
  const float cosine = precise::cos(angle);
  const float sine = precise::sin(angle);
  Rotation r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const ushort low = ushort(lane % 4 * 8 + i);
    const ushort high = ushort(lane % 4 * 8 + 4 + i);
    r.cosine.low[i] = simd_shuffle(cosine, low);
    r.cosine.high[i] = simd_shuffle(cosine, high);
    r.sine.low[i] = simd_shuffle(sine, low);
    r.sine.high[i] = simd_shuffle(sine, high);
  }
  if (lane >= 8) return {{float4(1), float4(1)}, {float4(0), float4(0)}};
  const float sign = lane < 4 ? -1.0f : 1.0f;
  r.sine.low *= sign;
  r.sine.high *= sign;
  return r;
}

// RMSNorm of a head, then RoPE.
inline HeadSlice norm_rope(HeadSlice h, const device float* weight, Rotation r, float eps, ushort lane) {
  const float scale = rsqrt(simd_sum(dot_head(h, h)) / float(kHeadSize) + eps);
  h.low *= scale * load4(weight + lane * 8);
  h.high *= scale * load4(weight + lane * 8 + 4);
  const HeadSlice other = {simd_shuffle_xor(h.low, 4), simd_shuffle_xor(h.high, 4)};
  return {h.low * r.cosine.low + other.low * r.sine.low, h.high * r.cosine.high + other.high * r.sine.high};
}
