#pragma once
// KV pages, and the q/k preparation that two kernels share.
//   kv [pages][attention layers][k, v][kv heads][64 rows][256] bf16: a row is 512 bytes, read by one simdgroup at once.
#include "common.h"

inline ulong kv_row(constant AttentionParams& p, int page, int which, int head, int row) {
  return ((((ulong(page) * ulong(p.layers) + ulong(p.layer)) * 2 + ulong(which)) * ulong(p.kv_heads) + ulong(head)) *
              ulong(kPageRows) +
          ulong(row)) *
         ulong(kHeadSize);
}

// A head's 256 elements over 32 lanes: lane l holds elements 8 l .. 8 l + 7.
struct HeadSlice {
  float4 low;
  float4 high;
};

// One load of 16 bytes: the simdgroup reads the row's 512 bytes at once. A bf16 is the upper half of a float.
inline HeadSlice load_head(const device bfloat* p, ushort lane) {
  const uint4 words = *((const device uint4*)p + lane);
  const float4 even = as_type<float4>(words << 16u);
  const float4 odd = as_type<float4>(words & 0xffff0000u);
  return {float4(even.x, odd.x, even.y, odd.y), float4(even.z, odd.z, even.w, odd.w)};
}

inline void store_head(device bfloat* p, ushort lane, HeadSlice h) {
  store4(p + lane * 8, h.low);
  store4(p + lane * 8 + 4, h.high);
}

// The other spread of a head, for the `coalesced-kv` control: lane l holds elements l, l + 32, ..., l + 224.
inline HeadSlice load_apart(const device bfloat* p, ushort lane) {
  HeadSlice h;
  for (int i = 0; i < 4; ++i) {
    h.low[i] = float(p[lane + 32 * i]);
    h.high[i] = float(p[lane + 32 * (4 + i)]);
  }
  return h;
}

// From the first spread to the other: element l + 32 i is element l % 8 of lane (l + 32 i) / 8.
inline HeadSlice spread(HeadSlice h, ushort lane) {
  HeadSlice out;
  for (int i = 0; i < 8; ++i) {
    const ushort from = ushort((lane + 32 * i) / 8);
    const float4 low = simd_shuffle(h.low, from);
    const float4 high = simd_shuffle(h.high, from);
    const int element = int(lane % 8);
    const float value = element < 4 ? low[element] : high[element - 4];
    if (i < 4) {
      out.low[i] = value;
    } else {
      out.high[i - 4] = value;
    }
  }
  return out;
}

inline float dot_head(HeadSlice a, HeadSlice b) { return dot(a.low, b.low) + dot(a.high, b.high); }

// bf16 and back: what a later step would read.
inline HeadSlice round_head(HeadSlice h) { return {float4(bfloat4(h.low)), float4(bfloat4(h.high))}; }

// RMSNorm of a head, then RoPE: element i < 32 turns with i + 32, so lanes 0..3 pair with lanes 4..7.
inline HeadSlice norm_rope(HeadSlice h, const device float* weight, const device float* frequencies, int position,
                           float eps, ushort lane) {
  const float scale = rsqrt(simd_sum(dot_head(h, h)) / float(kHeadSize) + eps);
  h.low *= scale * load4(weight + lane * 8);
  h.high *= scale * load4(weight + lane * 8 + 4);
  const HeadSlice other = {simd_shuffle_xor(h.low, 4), simd_shuffle_xor(h.high, 4)};
  if (lane < 8) {
    const int pair = int(lane % 4) * 8;
    const float sign = lane < 4 ? -1.0f : 1.0f;
    for (int i = 0; i < 4; ++i) {
      const float low = float(position) * frequencies[pair + i];
      const float high = float(position) * frequencies[pair + 4 + i];
      h.low[i] = h.low[i] * precise::cos(low) + sign * other.low[i] * precise::sin(low);
      h.high[i] = h.high[i] * precise::cos(high) + sign * other.high[i] * precise::sin(high);
    }
  }
  return h;
}
