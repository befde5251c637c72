// The panel kernels of one instruction set; see matmul_kernels.cc for what they compute.
#if defined(CALLA_CPU_MATMUL_KERNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CALLA_CPU_MATMUL_KERNELS_INL_H_
#undef CALLA_CPU_MATMUL_KERNELS_INL_H_
#else
#define CALLA_CPU_MATMUL_KERNELS_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
//
#include "backend/cpu/target_flags.h"

HWY_BEFORE_NAMESPACE();
namespace calla::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int kScaleBlock = 16;  // weight groups whose scales are transposed at once
inline constexpr int kStepBytes = 64;   // of each row that are transposed at once

using FloatTag = hn::CappedTag<float, kPanel>;
using IntTag = hn::RebindToSigned<FloatTag>;
using WordTag = hn::RebindToUnsigned<FloatTag>;

// The 16 rows of a panel; lanes beyond the last valid row repeat it.
struct PanelRows {
  explicit PanelRows(const PanelArgs& a) {
    for (int n = 0; n < kPanel; ++n) {
      const auto row = static_cast<size_t>(std::min(n, a.valid - 1));
      codes[n] = a.codes + row * a.row_bytes;
      scales[n] = a.scales + row * a.groups;
      biases[n] = a.biases + row * a.groups;
    }
  }
  const std::byte* codes[kPanel];
  const bf16* scales[kPanel];
  const bf16* biases[kPanel];
};

// Asks for the lines of the next panel, an equal share at each step of this one, in the order in which they lie in
// memory: the 16 rows of a panel are one run of bytes, and one run is what DRAM likes.
class CodePrefetcher {
 public:
  CodePrefetcher(const PanelArgs& a, size_t steps)
      : next_(a.next_codes), per_step_(next_ == nullptr ? 0 : (a.row_bytes * kPanel / 64 + steps - 1) / steps) {}
  HWY_INLINE void Step() {
    if (per_step_ == 16) {
      HWY_UNROLL(16)
      for (size_t i = 0; i < 16; ++i) hwy::Prefetch(next_ + i * 64);
    } else {
      for (size_t i = 0; i < per_step_; ++i) hwy::Prefetch(next_ + i * 64);
    }
    next_ += per_step_ * 64;
  }

 private:
  const std::byte* next_;
  size_t per_step_;
};

HWY_INLINE void PrefetchScales(const PanelArgs& a, int first_group) {
  if (a.next_scales == nullptr) return;
  const int count = std::min(kScaleBlock, a.groups - first_group);
  const size_t bytes = static_cast<size_t>(count) * kPanel * sizeof(bf16);
  const size_t from = static_cast<size_t>(first_group) * kPanel * sizeof(bf16);
  const auto* scales = reinterpret_cast<const std::byte*>(a.next_scales) + from;
  const auto* biases = reinterpret_cast<const std::byte*>(a.next_biases) + from;
  for (size_t i = 0; i < bytes; i += 64) {
    hwy::Prefetch(scales + i);
    hwy::Prefetch(biases + i);
  }
}

#if HWY_TARGET == HWY_AVX3_DL

// r[i] lane j <-> r[j] lane i.
HWY_INLINE void Transpose16x16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // r[i + c]: column c (of each 128-bit lane) of rows i .. i+3
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

// t[j] = dword j of bytes [offset, offset + 64) of each row; bytes beyond the row's end read as zero.
HWY_INLINE void LoadTransposed(const std::byte* const (&rows)[kPanel], size_t offset, size_t row_bytes,
                               __m512i (&t)[16]) {
  if (offset + kStepBytes <= row_bytes) {
    for (int n = 0; n < kPanel; ++n) t[n] = _mm512_loadu_si512(rows[n] + offset);
  } else {
    const auto mask = static_cast<__mmask16>((1u << ((row_bytes - offset) / 4)) - 1);
    for (int n = 0; n < kPanel; ++n) t[n] = _mm512_maskz_loadu_epi32(mask, rows[n] + offset);
  }
  Transpose16x16(t);
}

// packed[g][n] = scale (upper half) and bias (lower half) of group first + g of row n.
template <class ScaleRow, class BiasRow>
HWY_INLINE void LoadScales(ScaleRow scale_row, BiasRow bias_row, int first, int groups,
                           uint32_t (&packed)[kScaleBlock][kPanel]) {
  const int count = std::min(kScaleBlock, groups - first);
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  __m512i t[16];
  for (int n = 0; n < kPanel; ++n) {
    const __m256i scale = _mm256_maskz_loadu_epi16(mask, scale_row(n) + first);
    const __m256i bias = _mm256_maskz_loadu_epi16(mask, bias_row(n) + first);
    t[n] = _mm512_or_si512(_mm512_slli_epi32(_mm512_cvtepu16_epi32(scale), 16), _mm512_cvtepu16_epi32(bias));
  }
  Transpose16x16(t);
  for (int g = 0; g < kScaleBlock; ++g) _mm512_store_si512(packed[g], t[g]);
}
HWY_INLINE void LoadScales(const PanelRows& rows, int first, int groups, uint32_t (&packed)[kScaleBlock][kPanel]) {
  LoadScales([&](int n) { return rows.scales[n]; }, [&](int n) { return rows.biases[n]; }, first, groups, packed);
}

HWY_INLINE __m512i Broadcast4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return _mm512_set1_epi32(word);
}

// Adds one group to all rows. w[j]: 4 codes per lane; planes: the group's first byte in the row's block; the
// second half of the codes meets the bytes at +kSecond.
template <int kWords, int kSecond>
HWY_INLINE void MultiplyGroup(const PanelArgs& a, const __m512i (&w)[kWords], size_t plane_offset, size_t group,
                              __m512 scale, __m512 bias) {
  // Locals: the stores below could alias the fields of `a`.
  const int32_t* rows = a.rows;
  const int8_t* planes = a.planes + plane_offset;
  const ActivationScale* scales = a.act_scales + group;
  const size_t plane_stride = a.plane_stride, scale_stride = a.act_scale_stride;
  float* out = a.out;
  const int m = a.m;
  // A row's address is worked out while the row before it is multiplied: 34 loads wait for it.
  size_t next_row = static_cast<size_t>(rows != nullptr ? rows[0] : 0);
  for (int i = 0; i < m; ++i, out += kPanel) {
    const size_t row = next_row;
    const int following = i + 1 < m ? i + 1 : i;
    next_row = static_cast<size_t>(rows != nullptr ? rows[following] : following);
    const int8_t* p = planes + row * plane_stride;
    __m512i hi = _mm512_setzero_si512(), lo = hi, hi2 = hi, lo2 = hi;
    HWY_UNROLL(16)
    for (int j = 0; j < kWords / 2; ++j) {
      hi = _mm512_dpbusd_epi32(hi, w[j], Broadcast4(p + 4 * j));
      lo = _mm512_dpbusd_epi32(lo, w[j], Broadcast4(p + kActivationBlock + 4 * j));
      hi2 = _mm512_dpbusd_epi32(hi2, w[kWords / 2 + j], Broadcast4(p + kSecond + 4 * j));
      lo2 = _mm512_dpbusd_epi32(lo2, w[kWords / 2 + j], Broadcast4(p + kActivationBlock + kSecond + 4 * j));
    }
    hi = _mm512_add_epi32(hi, hi2);
    lo = _mm512_add_epi32(lo, lo2);
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 8), lo));
    const ActivationScale& s = scales[row * scale_stride];
    __m512 acc = _mm512_load_ps(out);
    acc = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(s.d)), acc);
    acc = _mm512_fmadd_ps(bias, _mm512_set1_ps(s.sum), acc);
    _mm512_store_ps(out, acc);
  }
}

// w[j] of group q within a step of transposed dwords.
template <int kBits, int kGroup>
HWY_INLINE void UnpackGroup(const __m512i (&t)[16], int q, __m512i (&w)[kGroup / 4]) {
  constexpr int kDwords = kGroup * kBits / 32;
  for (int j = 0; j < kDwords; ++j) {
    const __m512i word = t[q * kDwords + j];
    if constexpr (kBits == 4) {
      const __m512i nibble = _mm512_set1_epi8(0x0f);
      w[j] = _mm512_and_si512(word, nibble);
      w[kDwords + j] = _mm512_and_si512(_mm512_srli_epi16(word, 4), nibble);
    } else {
      w[j] = word;
    }
  }
}

template <int kBits, int kGroup>
HWY_INLINE void MultiplyStepGroup(const PanelArgs& a, const __m512i (&t)[16], int q, size_t plane_offset, size_t group,
                                  const uint32_t* packed) {
  __m512i w[kGroup / 4];
  UnpackGroup<kBits, kGroup>(t, q, w);
  const __m512i words = _mm512_load_si512(packed);
  const __m512 scale = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  const __m512 bias = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  MultiplyGroup<kGroup / 4, kBits == 4 ? kActivationBlock / 2 : kGroup / 2>(a, w, plane_offset, group, scale, bias);
}

// For one row the transposition costs more than it saves. Each row of the weights is multiplied as it lies (64
// bytes of codes with 64 bytes of each plane), and the lanes of a group are added afterwards, for all 16 rows at once.
// The sums are the same integers.

// sums[n]: partial sums of row n; out[g] lane n = the sum over the lanes of group g (kGroups equal runs of lanes).
template <int kGroups>
HWY_INLINE void ReduceGroups(__m512i (&sums)[kPanel], __m512i (&out)[kGroups]) {
  __m512i t[8], u[4];  // u[i]: rows 4i .. 4i + 3 side by side in each 128-bit part
  for (int i = 0; i < 8; ++i)
    t[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2 * i], sums[2 * i + 1]),
                            _mm512_unpackhi_epi32(sums[2 * i], sums[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    u[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi64(t[2 * i], t[2 * i + 1]), _mm512_unpackhi_epi64(t[2 * i], t[2 * i + 1]));
  if constexpr (kGroups == 4) {
    const __m512i a = _mm512_shuffle_i32x4(u[0], u[1], 0x88), b = _mm512_shuffle_i32x4(u[2], u[3], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(u[0], u[1], 0xdd), d = _mm512_shuffle_i32x4(u[2], u[3], 0xdd);
    out[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    out[2] = _mm512_shuffle_i32x4(a, b, 0xdd);
    out[1] = _mm512_shuffle_i32x4(c, d, 0x88);
    out[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
  } else {
    const __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(u[0], u[1], 0x88), _mm512_shuffle_i32x4(u[0], u[1], 0xdd));
    const __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(u[2], u[3], 0x88), _mm512_shuffle_i32x4(u[2], u[3], 0xdd));
    const __m512i low = _mm512_shuffle_i32x4(a, b, 0x88), high = _mm512_shuffle_i32x4(a, b, 0xdd);
    if constexpr (kGroups == 2) {
      out[0] = low;
      out[1] = high;
    } else {
      out[0] = _mm512_add_epi32(low, high);
    }
  }
}

template <int kBits>
HWY_INLINE __m512i DotBytes(__m512i codes, const int8_t* p) {
  const auto plane = [&](int at) { return _mm512_loadu_si512(p + at); };
  if constexpr (kBits == 4) {
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    const __m512i even = _mm512_and_si512(codes, nibble);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    constexpr int kHalf = kActivationBlock / 2;
    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, plane(0));
    sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, odd, plane(kHalf)), 8);
    sum = _mm512_dpbusd_epi32(sum, even, plane(kActivationBlock));
    return _mm512_dpbusd_epi32(sum, odd, plane(kActivationBlock + kHalf));
  } else {
    const __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, plane(0));
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 8), codes, plane(kActivationBlock));
  }
}

template <int kBits, int kGroup>
HWY_INLINE void AffineOneRow(const PanelArgs& a) {
  constexpr int kStep = kStepBytes * 8 / kBits;
  constexpr int kGroupsPerStep = kStep / kGroup;
  const int groups = a.k / kGroup, shift = a.group / kGroup / 2;  // weight group = g >> shift (ratio 1, 2 or 4)
  CodePrefetcher prefetch(a, static_cast<size_t>((a.k + kStep - 1) / kStep));
  const auto row = static_cast<size_t>(a.rows != nullptr ? a.rows[0] : 0);
  const int8_t* planes = a.planes + row * a.plane_stride;
  const ActivationScale* scales = a.act_scales + row * a.act_scale_stride;
  const size_t row_bytes = a.row_bytes;
  __m512 acc = _mm512_setzero_ps();
  alignas(64) uint32_t packed[kScaleBlock][kPanel];
  for (int first = 0; first < a.groups; first += kScaleBlock) {
    PrefetchScales(a, first);
    LoadScales([&](int n) { return a.scales + n * a.groups; }, [&](int n) { return a.biases + n * a.groups; }, first,
               a.groups, packed);
    const int end = std::min(groups, (first + kScaleBlock) << shift);
    for (int g = first << shift; g < end; g += kGroupsPerStep) {
      const auto step = static_cast<size_t>(g / kGroupsPerStep);
      prefetch.Step();
      const size_t offset = step * kStepBytes;
      const int8_t* p =
          planes + step * kStep / kActivationBlock * (2 * kActivationBlock) + step * kStep % kActivationBlock;
      __m512i sums[kPanel], group_sums[kGroupsPerStep];
      const std::byte* codes = a.codes + offset;
      if (offset + kStepBytes <= row_bytes) {
        HWY_UNROLL(16)
        for (int n = 0; n < kPanel; ++n, codes += row_bytes) sums[n] = DotBytes<kBits>(_mm512_loadu_si512(codes), p);
      } else {
        const auto mask = static_cast<__mmask16>((1u << ((row_bytes - offset) / 4)) - 1);
        for (int n = 0; n < kPanel; ++n, codes += row_bytes)
          sums[n] = DotBytes<kBits>(_mm512_maskz_loadu_epi32(mask, codes), p);
      }
      ReduceGroups<kGroupsPerStep>(sums, group_sums);
      HWY_UNROLL(4)
      for (int q = 0; q < kGroupsPerStep; ++q) {
        if (g + q >= end) break;
        const __m512i words = _mm512_load_si512(packed[((g + q) >> shift) - first]);
        const __m512 scale =
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
        const __m512 bias = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
        const ActivationScale& s = scales[g + q];
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(group_sums[q]), _mm512_mul_ps(scale, _mm512_set1_ps(s.d)), acc);
        acc = _mm512_fmadd_ps(bias, _mm512_set1_ps(s.sum), acc);
      }
    }
  }
  _mm512_store_ps(a.out, acc);
}

#else  // AVX2, NEON, emulation: weights pass through a scratch in L1

// t[j][n] = dword j of bytes [offset, offset + 64) of row n; bytes beyond the row's end read as zero.
inline void LoadTransposed(const std::byte* const (&rows)[kPanel], size_t offset, size_t row_bytes,
                           uint32_t (&t)[16][kPanel]) {
  alignas(16) std::byte tail[kPanel][kStepBytes];
  const std::byte* from[kPanel];
  const size_t bytes = std::min<size_t>(kStepBytes, row_bytes - offset);
  for (int n = 0; n < kPanel; ++n) {
    from[n] = rows[n] + offset;
    if (bytes == kStepBytes) continue;
    std::memset(tail[n], 0, kStepBytes);
    std::memcpy(tail[n], from[n], bytes);
    from[n] = tail[n];
  }
#if HWY_TARGET == HWY_SCALAR
  for (int n = 0; n < kPanel; ++n)
    for (int j = 0; j < 16; ++j) std::memcpy(&t[j][n], from[n] + 4 * j, sizeof(uint32_t));
#else
  const hn::FixedTag<uint32_t, 4> d32;
  const hn::FixedTag<uint64_t, 2> d64;
  for (int n = 0; n < kPanel; n += 4)
    for (int j = 0; j < 16; j += 4) {
      const auto load = [&](int i) { return hn::LoadU(d32, reinterpret_cast<const uint32_t*>(from[n + i] + j * 4)); };
      const auto r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
      const auto a0 = hn::BitCast(d64, hn::InterleaveLower(d32, r0, r1));
      const auto a1 = hn::BitCast(d64, hn::InterleaveUpper(d32, r0, r1));
      const auto b0 = hn::BitCast(d64, hn::InterleaveLower(d32, r2, r3));
      const auto b1 = hn::BitCast(d64, hn::InterleaveUpper(d32, r2, r3));
      hn::Store(hn::BitCast(d32, hn::InterleaveLower(d64, a0, b0)), d32, &t[j][n]);
      hn::Store(hn::BitCast(d32, hn::InterleaveUpper(d64, a0, b0)), d32, &t[j + 1][n]);
      hn::Store(hn::BitCast(d32, hn::InterleaveLower(d64, a1, b1)), d32, &t[j + 2][n]);
      hn::Store(hn::BitCast(d32, hn::InterleaveUpper(d64, a1, b1)), d32, &t[j + 3][n]);
    }
#endif
}

inline void LoadScales(const PanelRows& rows, int first, int groups, uint32_t (&packed)[kScaleBlock][kPanel]) {
  const int count = std::min(kScaleBlock, groups - first);
  for (int n = 0; n < kPanel; ++n)
    for (int g = 0; g < count; ++g)
      packed[g][n] = (static_cast<uint32_t>(rows.scales[n][first + g].bits) << 16) | rows.biases[n][first + g].bits;
}

HWY_INLINE int32_t Load4(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

#if HWY_TARGET == HWY_AVX2

// Sum over kWords dwords per lane of codes * plane, 8 lanes. Codes of 4 bits: pairs fit 16 bits, and so do
// 8 of them (8 * 2 * 15 * 128 < 2^15); codes of 8 bits are widened first.
template <int kBits, int kWords>
HWY_INLINE __m256i DotPlane(const uint8_t* w, const int8_t* p) {
  static_assert(kWords <= 8);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256();
  for (int j = 0; j < kWords; ++j) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + j * kPanel * 4));
    const __m256i x = _mm256_set1_epi32(Load4(p + 4 * j));
    if constexpr (kBits == 4) {
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
    } else {
      const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0xff)),
                                             _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
      const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(x, 8));
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
    }
  }
  return kBits == 4 ? _mm256_madd_epi16(sum, ones) : sum;
}

template <int kBits, int kWords>
HWY_INLINE hn::VFromD<IntTag> DotGroup(const uint8_t* w, const int8_t* p, int second) {
  constexpr int kHalf = kWords / 2;
  const uint8_t* w2 = w + kHalf * kPanel * 4;
  const __m256i hi = _mm256_add_epi32(DotPlane<kBits, kHalf>(w, p), DotPlane<kBits, kHalf>(w2, p + second));
  const __m256i lo = _mm256_add_epi32(DotPlane<kBits, kHalf>(w, p + kActivationBlock),
                                      DotPlane<kBits, kHalf>(w2, p + kActivationBlock + second));
  return hn::VFromD<IntTag>{_mm256_add_epi32(_mm256_slli_epi32(hi, 8), lo)};
}

#elif HWY_TARGET == HWY_NEON && defined(__ARM_FEATURE_DOTPROD)

// 4 lanes. sdot takes signed bytes: codes of 8 bits are taken as code - 128, and 128 * sum(x) is added.
template <int kBits, int kWords>
HWY_INLINE hn::VFromD<IntTag> DotGroup(const uint8_t* w, const int8_t* p, int second) {
  int32x4_t sum[2] = {vdupq_n_s32(0), vdupq_n_s32(0)}, half[2] = {sum[0], sum[0]};
  for (int j = 0; j < kWords; ++j) {
    uint8x16_t codes = vld1q_u8(w + j * kPanel * 4);
    if (kBits == 8) codes = veorq_u8(codes, vdupq_n_u8(0x80));
    const int8_t* x = j < kWords / 2 ? p + 4 * j : p + second + 4 * (j - kWords / 2);
    for (int plane = 0; plane < 2; ++plane) {
      const int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(Load4(x + plane * kActivationBlock)));
      sum[plane] = vdotq_s32(sum[plane], vreinterpretq_s8_u8(codes), v);
      if (kBits == 8) half[plane] = vdotq_s32(half[plane], vdupq_n_s8(64), v);
    }
  }
  for (int plane = 0; plane < 2; ++plane) sum[plane] = vaddq_s32(sum[plane], vaddq_s32(half[plane], half[plane]));
  return hn::VFromD<IntTag>(vaddq_s32(vshlq_n_s32(sum[0], 8), sum[1]));
}

#elif HWY_TARGET == HWY_NEON

// 4 lanes, without sdot: products are added up in 16 bits, and pairs of them in 32. Products of 4-bit codes fit 16 bits
// for a whole group (16 * 15 * 128 < 2^15); codes of 8 bits are taken as code - 128, and widened after each dword.
template <int kBits, int kWords>
HWY_INLINE hn::VFromD<IntTag> DotGroup(const uint8_t* w, const int8_t* p, int second) {
  int32x4_t total[2];
  for (int plane = 0; plane < 2; ++plane) {
    int16x8_t low16 = vdupq_n_s16(0), high16 = low16;
    int32x4_t low32 = vdupq_n_s32(0), high32 = low32, x_sum = low32;
    for (int j = 0; j < kWords; ++j) {
      const int8_t* x = j < kWords / 2 ? p + 4 * j : p + second + 4 * (j - kWords / 2);
      const int8x8_t v = vreinterpret_s8_s32(vdup_n_s32(Load4(x + plane * kActivationBlock)));
      uint8x16_t codes = vld1q_u8(w + j * kPanel * 4);
      if constexpr (kBits == 4) {
        low16 = vmlal_s8(low16, vreinterpret_s8_u8(vget_low_u8(codes)), v);
        high16 = vmlal_s8(high16, vreinterpret_s8_u8(vget_high_u8(codes)), v);
      } else {
        codes = veorq_u8(codes, vdupq_n_u8(0x80));
        low32 = vpadalq_s16(low32, vmull_s8(vreinterpret_s8_u8(vget_low_u8(codes)), v));
        high32 = vpadalq_s16(high32, vmull_s8(vreinterpret_s8_u8(vget_high_u8(codes)), v));
        x_sum = vpadalq_s16(x_sum, vmovl_s8(v));
      }
    }
    if constexpr (kBits == 4) {
      low32 = vpaddlq_s16(low16);
      high32 = vpaddlq_s16(high16);
    }
    total[plane] = vpaddq_s32(low32, high32);
    if constexpr (kBits == 8) total[plane] = vaddq_s32(total[plane], vshlq_n_s32(vpaddq_s32(x_sum, x_sum), 7));
  }
  return hn::VFromD<IntTag>(vaddq_s32(vshlq_n_s32(total[0], 8), total[1]));
}

#else

template <int kBits, int kWords>
HWY_INLINE hn::VFromD<IntTag> DotGroup(const uint8_t* w, const int8_t* p, int second) {
  const IntTag d;
  HWY_ALIGN int32_t sum[hn::MaxLanes(d)] = {};
  for (int j = 0; j < kWords; ++j) {
    const int8_t* x = j < kWords / 2 ? p + 4 * j : p + second + 4 * (j - kWords / 2);
    for (size_t n = 0; n < hn::Lanes(d); ++n)
      for (int b = 0; b < 4; ++b)
        sum[n] += w[(static_cast<size_t>(j) * kPanel + n) * 4 + b] * (x[b] * 256 + x[kActivationBlock + b]);
  }
  return hn::Load(d, sum);
}

#endif

template <int kBits, int kGroup>
inline void MultiplyStepGroup(const PanelArgs& a, const uint32_t (&t)[16][kPanel], int q, size_t plane_offset,
                              size_t group, const uint32_t* packed) {
  constexpr int kDwords = kGroup * kBits / 32, kWords = kGroup / 4;
  constexpr int kSecond = kBits == 4 ? kActivationBlock / 2 : kGroup / 2;
  const FloatTag df;
  const WordTag dw;
  alignas(64) uint32_t w[kWords][kPanel];
  for (int j = 0; j < kDwords; ++j)
    for (size_t n = 0; n < kPanel; n += hn::Lanes(dw)) {
      const auto word = hn::Load(dw, &t[q * kDwords + j][n]);
      if constexpr (kBits == 4) {
        const auto nibbles = hn::Set(dw, 0x0f0f0f0fu);
        hn::Store(hn::And(word, nibbles), dw, &w[j][n]);
        hn::Store(hn::And(hn::ShiftRight<4>(word), nibbles), dw, &w[kDwords + j][n]);
      } else {
        hn::Store(word, dw, &w[j][n]);
      }
    }
  for (int i = 0; i < a.m; ++i) {
    const auto row = static_cast<size_t>(a.rows != nullptr ? a.rows[i] : i);
    const int8_t* p = a.planes + row * a.plane_stride + plane_offset;
    const ActivationScale& s = a.act_scales[row * a.act_scale_stride + group];
    float* out = a.out + static_cast<size_t>(i) * kPanel;
    for (size_t n = 0; n < kPanel; n += hn::Lanes(df)) {
      const auto sum =
          hn::ConvertTo(df, DotGroup<kBits, kWords>(reinterpret_cast<const uint8_t*>(&w[0][n]), p, kSecond));
      const auto words = hn::Load(dw, packed + n);
      const auto scale = hn::BitCast(df, hn::And(words, hn::Set(dw, 0xffff0000u)));
      const auto bias = hn::BitCast(df, hn::ShiftLeft<16>(words));
      auto acc = hn::Load(df, out + n);
      acc = hn::MulAdd(sum, hn::Mul(scale, hn::Set(df, s.d)), acc);
      acc = hn::MulAdd(bias, hn::Set(df, s.sum), acc);
      hn::Store(acc, df, out + n);
    }
  }
}

#endif

// Quantised rows times affine codes of kBits; kGroup inputs per activation scale. The weights' own group is a
// multiple.
template <int kBits, int kGroup>
void AffinePanel(const PanelArgs& a) {
  constexpr int kStep = kStepBytes * 8 / kBits;  // inputs per step: 128 or 64
  constexpr int kGroupsPerStep = kStep / kGroup;
#if HWY_TARGET == HWY_AVX3_DL
  if (a.m == 1 && a.valid == kPanel) return AffineOneRow<kBits, kGroup>(a);
#endif
  const PanelRows rows(a);
  const int groups = a.k / kGroup, shift = a.group / kGroup / 2;  // weight group = g >> shift (ratio 1, 2 or 4)
  CodePrefetcher prefetch(a, static_cast<size_t>((a.k + kStep - 1) / kStep));
  std::memset(a.out, 0, static_cast<size_t>(a.m) * kPanel * sizeof(float));
  alignas(64) uint32_t packed[kScaleBlock][kPanel];
  for (int first = 0; first < a.groups; first += kScaleBlock) {
    PrefetchScales(a, first);
    LoadScales(rows, first, a.groups, packed);
    const int end = std::min(groups, (first + kScaleBlock) << shift);
    for (int g = first << shift; g < end; g += kGroupsPerStep) {
      const auto step = static_cast<size_t>(g / kGroupsPerStep);
      prefetch.Step();
#if HWY_TARGET == HWY_AVX3_DL
      __m512i t[16];
#else
      alignas(64) uint32_t t[16][kPanel];
#endif
      LoadTransposed(rows.codes, step * kStepBytes, a.row_bytes, t);
      const size_t block = step * kStep / kActivationBlock * (2 * kActivationBlock) + step * kStep % kActivationBlock;
      HWY_UNROLL(4)
      for (int q = 0; q < kGroupsPerStep; ++q) {
        if (g + q >= end) break;
        constexpr int kBytes = kBits == 4 ? kGroup / 2 : kGroup;
        MultiplyStepGroup<kBits, kGroup>(a, t, q, block + static_cast<size_t>(q) * kBytes, static_cast<size_t>(g + q),
                                         packed[((g + q) >> shift) - first]);
      }
    }
  }
}

// fp32 rows times exactly de-quantised weights (kBits 4 or 8) or bf16 values (kBits 16).
template <int kBits>
void FloatPanel(const PanelArgs& a) {
  constexpr int kPerDword = 32 / kBits;
  constexpr int kChunk = 4;  // dwords of a row that are expanded at once
  const FloatTag df;
  const IntTag di;
  const WordTag dw;
  const PanelRows rows(a);
  std::memset(a.out, 0, static_cast<size_t>(a.m) * kPanel * sizeof(float));
  alignas(64) float w[kChunk * kPerDword][kPanel];
  alignas(64) uint32_t t[16][kPanel];
  alignas(64) uint32_t packed[kScaleBlock][kPanel];
  const auto steps = (a.row_bytes + kStepBytes - 1) / kStepBytes;
  CodePrefetcher prefetch(a, steps);
  int scales_from = -1;
  for (size_t step = 0; step < steps; ++step) {
    prefetch.Step();
#if HWY_TARGET == HWY_AVX3_DL
    __m512i words[16];
    LoadTransposed(rows.codes, step * kStepBytes, a.row_bytes, words);
    for (int j = 0; j < 16; ++j) _mm512_store_si512(t[j], words[j]);
#else
    LoadTransposed(rows.codes, step * kStepBytes, a.row_bytes, t);
#endif
    const int first_k = static_cast<int>(step) * 16 * kPerDword;
    for (int j0 = 0; j0 < 16; j0 += kChunk) {
      const int k0 = first_k + j0 * kPerDword;
      if (k0 >= a.k) break;
      const uint32_t* scale_words = nullptr;
      if constexpr (kBits != 16) {
        const int group = k0 / a.group, first = group / kScaleBlock * kScaleBlock;
        if (first != scales_from) {
          PrefetchScales(a, first);
          LoadScales(rows, first, a.groups, packed);
          scales_from = first;
        }
        scale_words = packed[group - first];
      }
      for (size_t n = 0; n < kPanel; n += hn::Lanes(df)) {
        for (int j = 0; j < kChunk; ++j) {
          const auto word = hn::Load(dw, &t[j0 + j][n]);
          if constexpr (kBits == 16) {
            hn::Store(hn::BitCast(df, hn::ShiftLeft<16>(word)), df, &w[2 * j][n]);
            hn::Store(hn::BitCast(df, hn::And(word, hn::Set(dw, 0xffff0000u))), df, &w[2 * j + 1][n]);
          } else {
            const auto pair = hn::Load(dw, scale_words + n);
            const auto scale = hn::BitCast(df, hn::And(pair, hn::Set(dw, 0xffff0000u)));
            const auto bias = hn::BitCast(df, hn::ShiftLeft<16>(pair));
            auto rest = word;
            for (int i = 0; i < kPerDword; ++i) {
              const auto code = hn::ConvertTo(df, hn::BitCast(di, hn::And(rest, hn::Set(dw, (1u << kBits) - 1))));
              hn::Store(hn::MulAdd(scale, code, bias), df, &w[j * kPerDword + i][n]);
              rest = hn::ShiftRight<kBits>(rest);
            }
          }
        }
      }
      for (int i = 0; i < a.m; ++i) {
        const auto row = static_cast<size_t>(a.rows != nullptr ? a.rows[i] : i);
        const float* x = a.x + row * a.x_stride + k0;
        float* out = a.out + static_cast<size_t>(i) * kPanel;
        for (size_t n = 0; n < kPanel; n += hn::Lanes(df)) {
          auto even = hn::Zero(df), odd = hn::Zero(df);
          for (int k = 0; k < kChunk * kPerDword; k += 2) {
            even = hn::MulAdd(hn::Load(df, &w[k][n]), hn::Set(df, x[k]), even);
            odd = hn::MulAdd(hn::Load(df, &w[k + 1][n]), hn::Set(df, x[k + 1]), odd);
          }
          hn::Store(hn::Add(hn::Load(df, out + n), hn::Add(even, odd)), df, out + n);
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace calla::cpu
HWY_AFTER_NAMESPACE();

#endif
