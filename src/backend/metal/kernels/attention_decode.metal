// Attention of single rows over the paged KV cache (decode, and any batch of few rows).
#include "kv.h"

// prepare_qkv: q and k RMSNorm with RoPE, k and v appended to the cache.
//   q_gate [R, Hq * 512]   k, v [R, Hkv * 256]   q_norm, k_norm [256] f32   frequencies [32] f32   q [R, Hq * 256]
//   Launch    grid (ceil((Hq + 2 Hkv)/4), R), threadgroup 128 = 4 simdgroups, one head each.
//   Moves     R * (Hq + 2 Hkv) * 1 KiB.
[[max_total_threads_per_threadgroup(kHeadThreads)]] kernel void prepare_qkv(
    constant AttentionParams& p [[buffer(0)]], const device bfloat* q_gate [[buffer(1)]],
    const device bfloat* k [[buffer(2)]], const device bfloat* v [[buffer(3)]],
    const device float* q_norm [[buffer(4)]], const device float* k_norm [[buffer(5)]],
    const device float* frequencies [[buffer(6)]], const device RowInfo* rows [[buffer(7)]],
    const device int* pages [[buffer(8)]], device bfloat* q [[buffer(9)]], device bfloat* kv [[buffer(10)]],
    uint2 tg [[threadgroup_position_in_grid]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const RowInfo row = rows[tg.y];
  const Rotation turn = rotation_of(frequencies, row.position, lane);
  int head = int(tg.x) * kGroupHeads + int(sg);
  if (head < p.q_heads) {
    if ((p.parts & 1) == 0) return;
    const HeadSlice h = expand(load_words(q_gate + (tg.y * uint(p.q_heads) + uint(head)) * uint(2 * kHeadSize), lane));
    store_words(q + (tg.y * uint(p.q_heads) + uint(head)) * uint(kHeadSize), lane,
                pack(norm_rope(h, q_norm, turn, p.eps, lane)));
    return;
  }
  head -= p.q_heads;
  const int page = pages[row.pages + row.position / kPageRows];
  if (head < p.kv_heads) {
    if ((p.parts & 2) == 0) return;
    const HeadSlice h = expand(load_words(k + (tg.y * uint(p.kv_heads) + uint(head)) * uint(kHeadSize), lane));
    store_words(kv + kv_row(p, page, 0, head, row.position % kPageRows), lane,
                pack(norm_rope(h, k_norm, turn, p.eps, lane)));
    return;
  }
  head -= p.kv_heads;
  if (head >= p.kv_heads || (p.parts & 4) == 0) return;
  store_words(kv + kv_row(p, page, 1, head, row.position % kPageRows), lane,
              load_words(v + (tg.y * uint(p.kv_heads) + uint(head)) * uint(kHeadSize), lane));
}

// A row of the cache, as it is stored: four registers each until its numbers are used.
struct KvRow {
  uint4 k;
  uint4 v;
};

// The rows of one KV head of a sequence.
struct KvHead {
  const device bfloat* keys;  // in page 0
  const device int* pages;
  uint page_elements;
  uint to_values;  // from a key to its value

  template <bool kApart>
  KvRow row(int key, ushort lane) const {
    const device bfloat* k =
        keys + ulong(uint(pages[key / kPageRows])) * ulong(page_elements) + uint(key % kPageRows * kHeadSize);
    const device bfloat* v = k + to_values;
    if (kApart) return {load_apart(k, lane), load_apart(v, lane)};
    return {load_words(k, lane), load_words(v, lane)};
  }
};

// sdpa_decode: softmax(q k / 16) v of one row and kHeads query heads over a range of keys.
//   q [R, Hq * 256]   kv pages   gate [R, Hq * 512] (second half of each head)   mixed [R, stride]
//   partials [R, Hq, splits, 256] f32, and sums [R, Hq, splits] float2 (maximum, sum) when there is more than one range
//   Launch    grid (splits, Hkv * 8 / kHeads, rows), threadgroup 256 = 8 simdgroups. General layout: simdgroup s takes
//             keys s, s + 8, ... of its range. Fixed blocks: 512 keys a threadgroup, 64 (one page) a simdgroup.
//   GQA       kHeads = 4 query heads share each load of a KV row; kHeads = 1 is the control of `gqa-packing`.
//   Coalesced a simdgroup reads a row as 32 x 16 bytes; with kApart (control of `coalesced-kv`) lane l reads elements
//             l, l + 32, ... two bytes at a time.
//   Fold      with kFoldPrepare q comes from q_gate and the row's own k and v are made here, appended, and used from
//             registers; needs one row per sequence.
//   Moves     (keys * 1 KiB + 2 KiB) per KV head and threadgroup.
template <int kHeads, bool kApart>
[[kernel, max_total_threads_per_threadgroup(kSdpaThreads)]] void sdpa_decode(
    constant AttentionParams& p [[buffer(0)]], const device bfloat* q_gate [[buffer(1)]],
    const device bfloat* k_row [[buffer(2)]], const device bfloat* v_row [[buffer(3)]],
    const device float* q_norm [[buffer(4)]], const device float* k_norm [[buffer(5)]],
    const device float* frequencies [[buffer(6)]], const device RowInfo* rows [[buffer(7)]],
    const device int* pages [[buffer(8)]], device bfloat* q [[buffer(9)]], device bfloat* kv [[buffer(10)]],
    device float* partials [[buffer(11)]], device float2* sums [[buffer(12)]], device bfloat* mixed [[buffer(13)]],
    uint3 tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float merged[kSdpaSimdgroups * kHeadSize];
  threadgroup float maxima[kSdpaSimdgroups * kHeads];
  threadgroup float totals[kSdpaSimdgroups * kHeads];
  const int per_kv_head = p.q_heads / p.kv_heads / kHeads;
  const int kv_head = int(tg.y) / per_kv_head;
  const int head0 = int(tg.y) * kHeads;
  const int split = int(tg.x);
  const uint row_index = tg.z + uint(p.first_row);
  const RowInfo row = rows[row_index];
  const int keys = row.position + 1;

  // The range of this threadgroup, and of this simdgroup in it.
  int begin, end, step;
  if (kFixedBlocks) {
    const int block = split * kFixedBlockKeys;
    begin = block + int(sg) * (kFixedBlockKeys / kSdpaSimdgroups);
    end = min(begin + kFixedBlockKeys / kSdpaSimdgroups, keys);
    step = 1;
  } else {
    const int length = (keys + p.splits - 1) / p.splits;
    begin = split * length + int(sg);
    end = min(split * length + length, keys);
    step = kSdpaSimdgroups;
  }

  // q in registers, times 1/sqrt(256), and the row's own k and v.
  Rotation turn;
  if (kFoldPrepare) turn = rotation_of(frequencies, row.position, lane);
  HeadSlice query[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const uint at = row_index * uint(p.q_heads) + uint(head0 + h);
    uint4 words;
    if (kFoldPrepare) {
      const HeadSlice raw = expand(load_words(q_gate + at * uint(2 * kHeadSize), lane));
      words = pack(norm_rope(raw, q_norm, turn, p.eps, lane));
      if (split == 0 && sg == 0) store_words(q + at * uint(kHeadSize), lane, words);
    } else {
      words = load_words(q + at * uint(kHeadSize), lane);
    }
    query[h] = expand(kApart ? spread(words, lane) : words);
    query[h].low *= 0.0625f;
    query[h].high *= 0.0625f;
  }
  KvRow own = {uint4(0), uint4(0)};
  if (kFoldPrepare) {
    const uint at = (row_index * uint(p.kv_heads) + uint(kv_head)) * uint(kHeadSize);
    own.k = pack(norm_rope(expand(load_words(k_row + at, lane)), k_norm, turn, p.eps, lane));
    own.v = load_words(v_row + at, lane);
    if (split == 0 && sg == 0 && int(tg.y) % per_kv_head == 0) {
      const int page = pages[row.pages + row.position / kPageRows];
      store_words(kv + kv_row(p, page, 0, kv_head, row.position % kPageRows), lane, own.k);
      store_words(kv + kv_row(p, page, 1, kv_head, row.position % kPageRows), lane, own.v);
    }
    if (kApart) own = {spread(own.k, lane), spread(own.v, lane)};
  }

  HeadSlice out[kHeads];
  float top[kHeads];
  float total[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    out[h] = {float4(0), float4(0)};
    top[h] = kNone;
    total[h] = 0;
  }
  const KvHead cache = {kv + kv_row(p, 0, 0, kv_head, 0), pages + row.pages, kv_page_elements(p),
                        uint(p.kv_heads) * uint(kPageRows * kHeadSize)};
  const int stored = kFoldPrepare ? row.position : keys;  // keys that are in memory
  KvRow next = own;
  if (begin < min(end, stored)) next = cache.row<kApart>(begin, lane);
  for (int key = begin; key < end; key += step) {
    // The next row is on its way while this one is used: a simdgroup alone would wait for memory at every key.
    const KvRow now = next;
    next = own;
    if (key + step < min(end, stored)) next = cache.row<kApart>(key + step, lane);
    const HeadSlice k = expand(now.k);
    const HeadSlice v = expand(now.v);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = simd_sum(dot_head(query[h], k));
      const float new_top = max(top[h], score);
      const float old_weight = fast::exp(top[h] - new_top);
      const float weight = fast::exp(score - new_top);
      top[h] = new_top;
      total[h] = total[h] * old_weight + weight;
      out[h].low = out[h].low * old_weight + v.low * weight;
      out[h].high = out[h].high * old_weight + v.high * weight;
    }
  }

  // Merge the simdgroups, one head at a time.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (lane == 0) {
      maxima[int(sg) * kHeads + h] = top[h];
      totals[int(sg) * kHeads + h] = total[h];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float all_top = kNone;
    for (int s = 0; s < kSdpaSimdgroups; ++s) all_top = max(all_top, maxima[s * kHeads + h]);
    float all_total = 0;
    for (int s = 0; s < kSdpaSimdgroups; ++s) {
      const float t = maxima[s * kHeads + h];
      all_total += totals[s * kHeads + h] * fast::exp(t - all_top);
    }
    const float weight = fast::exp(top[h] - all_top);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      merged[int(sg) * kHeadSize + (kApart ? int(lane) + 32 * i : int(lane) * 8 + i)] = out[h].low[i] * weight;
      merged[int(sg) * kHeadSize + (kApart ? int(lane) + 32 * (4 + i) : int(lane) * 8 + 4 + i)] =
          out[h].high[i] * weight;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float y = 0;
    for (int s = 0; s < kSdpaSimdgroups; ++s) y += merged[s * kHeadSize + int(thread_index)];
    const uint at = row_index * uint(p.q_heads) + uint(head0 + h);
    if (kSinglePass) {
      const float gate = float(q_gate[at * uint(2 * kHeadSize) + uint(kHeadSize) + thread_index]);
      mixed[row_index * uint(p.mixed_stride) + uint((head0 + h) * kHeadSize) + thread_index] =
          bfloat(y / all_total * sigmoid(gate));
    } else {
      const uint part = (tg.z * uint(p.q_heads) + uint(head0 + h)) * uint(p.splits) + uint(split);
      partials[part * uint(kHeadSize) + thread_index] = y;
      if (thread_index == 0) sums[part] = float2(all_top, all_total);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// clang-format off
template [[host_name("sdpa_decode")]] [[kernel]] decltype(sdpa_decode<kPackedHeads, false>) sdpa_decode<kPackedHeads, false>;
template [[host_name("sdpa_decode_unpacked")]] [[kernel]] decltype(sdpa_decode<1, false>) sdpa_decode<1, false>;
template [[host_name("sdpa_decode_apart")]] [[kernel]] decltype(sdpa_decode<kPackedHeads, true>) sdpa_decode<kPackedHeads, true>;
// clang-format on

// sdpa_merge: the ranges of sdpa_decode put together, and the output gate.
//   partials [R, Hq, splits, 256] f32   sums [R, Hq, splits] float2   gate as above   mixed [R, stride] bf16
//   Launch    grid (Hq, R), threadgroup 1024: four threads an element, each with every fourth range, so that a long
//             context's hundreds of ranges are not one long row of waits.
[[max_total_threads_per_threadgroup(kMergeThreads)]] kernel void sdpa_merge(
    constant AttentionParams& p [[buffer(0)]], const device float* partials [[buffer(1)]],
    const device float2* sums [[buffer(2)]], const device bfloat* q_gate [[buffer(3)]],
    device bfloat* mixed [[buffer(4)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kMergeThreads];
  const uint row = tg.y + uint(p.first_row);
  const uint at = tg.y * uint(p.q_heads) + tg.x;
  const device float2* s = sums + at * uint(p.splits);
  float top = kNone;
  for (int i = int(lane); i < p.splits; i += kLanes) top = max(top, s[i].x);
  top = simd_max(top);
  float total = 0;
  for (int i = int(lane); i < p.splits; i += kLanes) total += s[i].y * fast::exp(s[i].x - top);
  total = simd_sum(total);

  const uint element = thread_index % uint(kHeadSize);
  const device float* part = partials + at * uint(p.splits) * uint(kHeadSize) + element;
  float y = 0;
#pragma unroll(4)
  for (int i = int(thread_index) / kHeadSize; i < p.splits; i += kMergeParts) {
    y += fast::exp(s[i].x - top) * part[i * kHeadSize];
  }
  shares[thread_index] = y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= uint(kHeadSize)) return;
  y = 0;
#pragma unroll
  for (int i = 0; i < kMergeParts; ++i) y += shares[uint(i * kHeadSize) + element];
  const float gate = float(q_gate[(row * uint(p.q_heads) + tg.x) * uint(2 * kHeadSize) + uint(kHeadSize) + element]);
  mixed[row * uint(p.mixed_stride) + tg.x * uint(kHeadSize) + element] = bfloat(y / total * sigmoid(gate));
}
