// Which token comes next, decided where the next step reads it. The definition is backend/sampling.h.
//
// An element's weight is exp((logit - max) / temperature), 0 if the token is not allowed or below min_p. Weights order
// like their bits, so selection works on uint keys.
//   pick_max      the largest logit of each slice
//   pick_weights  the weights, if a head samples
//   pick_token    greedy: the largest of the slices'. Sampling: the top 1,024 weights, sorted on chip, answer nearly
//                 every request; a distribution so flat that they do not reach top_p or the draw is walked by bisection.
// The first two run on the whole GPU. pick_token is one threadgroup a head, so all that it does is read keys, four at a
// time to have enough loads in flight on one core.
#include "threadgroup_scan.h"

constant constexpr uint kInPromptBit = 0x8000;
constant constexpr int kNoToken = -1;
constant constexpr int kNotANumber = -2;
constant constexpr int kBeyond = 0x7fffffff;  // every token

// A head's logits after penalties and mask.
struct Logits {
  const device float* logits;
  const device ushort* counts;
  const device uint* mask;
  HeadInfo head;

  float at(int i) const {
    float x = logits[i];
    if (head.has_penalties != 0) {
      const uint count = counts[i];
      if (count != 0) {
        if (head.repetition_penalty != 1.0f) {
          x = x > 0.0f ? x / head.repetition_penalty : x * head.repetition_penalty;
        }
        const uint generated = count & ~kInPromptBit;
        if (generated != 0) x -= head.frequency_penalty * float(generated) + head.presence_penalty;
      }
    }
    if (head.mask >= 0 && ((mask[i / 32] >> (i % 32)) & 1u) == 0) x = -INFINITY;
    return x;
  }
};

inline Logits logits_of(constant PickParams& p, const device float* logits, const device ushort* counts,
                        const device uint* masks, const device HeadInfo* heads, uint index) {
  const HeadInfo head = heads[index];
  return {logits + index * uint(p.vocab), counts + ulong(head.slot) * ulong(p.count_stride), masks + max(head.mask, 0),
          head};
}

// pick_max: the largest logit of 4,096, ties to the lowest id.
//   logits [heads, V] f32   counts [slots, V]   masks   parts [heads, slices]
//   Launch    grid (slices, heads), threadgroup 256. Moves 4 V bytes a head, 6 V with penalties.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void pick_max(
    constant PickParams& p [[buffer(0)]], const device float* logits [[buffer(1)]],
    const device ushort* counts [[buffer(2)]], const device uint* masks [[buffer(3)]],
    const device HeadInfo* heads [[buffer(4)]], device SliceMax* parts [[buffer(5)]],
    uint2 tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[kElementThreads / kLanes];
  threadgroup int tokens[kElementThreads / kLanes];
  const Logits l = logits_of(p, logits, counts, masks, heads, tg.y);
  const int end = min(int(tg.x + 1) * kPickSlice, p.vocab);
  float best = -INFINITY;
  int token = p.vocab;
  bool nan = false;
  if (l.head.pick != 0) {
    for (int i = int(tg.x) * kPickSlice + int(thread_index); i < end; i += kElementThreads) {
      const float x = l.at(i);
      nan = nan || isnan(x);
      if (x > best) {
        best = x;
        token = i;
      }
    }
  }
  const float group_best = simd_max(best);
  const int group_token = simd_min(best == group_best ? token : p.vocab);
  const bool group_nan = simd_any(nan);
  if (lane == 0) {
    values[sg] = group_best;
    tokens[sg] = group_nan ? kNotANumber : group_token;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index != 0) return;
  for (int s = 1; s < kElementThreads / kLanes; ++s) {
    if (tokens[0] == kNotANumber) break;
    const bool better = values[s] > values[0] || (values[s] == values[0] && tokens[s] < tokens[0]);
    if (tokens[s] == kNotANumber || better) {
      values[0] = values[s];
      tokens[0] = tokens[s];
    }
  }
  parts[tg.y * uint(p.slices) + tg.x] = SliceMax{values[0], tokens[0] == p.vocab ? kNoToken : tokens[0]};
}

// The largest of a head's slices, ties to the lowest id. Called by all lanes.
inline SliceMax best_of(const device SliceMax* parts, int slices, ushort lane) {
  SliceMax best = {-INFINITY, kBeyond};
  bool nan = false;
  for (int i = int(lane); i < slices; i += kLanes) {
    const SliceMax part = parts[i];
    nan = nan || part.token == kNotANumber;
    if (part.token >= 0 && part.value > best.value) best = part;  // a lane's slices come in order of ids
  }
  const float value = simd_max(best.value);
  const int token = simd_min(best.value == value ? best.token : kBeyond);
  if (simd_any(nan)) return {value, kNotANumber};
  return {value, token == kBeyond ? kNoToken : token};
}

inline bool samples(HeadInfo head, SliceMax best) {
  return head.pick != 0 && best.token >= 0 && head.temperature > 0.0f && best.value < INFINITY;
}

// pick_weights: exp((logit - max) / temperature) of the heads that sample.
//   parts [heads, slices]   weights [heads, weight_stride] f32, 0 beyond the vocabulary   the rest as in pick_max
//   Launch    grid (slices, heads), threadgroup 256. Moves 8 V bytes a head.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void pick_weights(
    constant PickParams& p [[buffer(0)]], const device float* logits [[buffer(1)]],
    const device ushort* counts [[buffer(2)]], const device uint* masks [[buffer(3)]],
    const device HeadInfo* heads [[buffer(4)]], const device SliceMax* parts [[buffer(5)]],
    device float* weights [[buffer(6)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const Logits l = logits_of(p, logits, counts, masks, heads, tg.y);
  const SliceMax best = best_of(parts + tg.y * uint(p.slices), p.slices, lane);
  if (!samples(l.head, best)) return;
  const int end = min(int(tg.x + 1) * kPickSlice, p.weight_stride);
  for (int i = int(tg.x) * kPickSlice + int(thread_index); i < end; i += kElementThreads) {
    const float w = i < p.vocab ? precise::exp((l.at(i) - best.value) / l.head.temperature) : 0.0f;
    weights[tg.y * uint(p.weight_stride) + uint(i)] = w >= l.head.min_p ? w : 0.0f;
  }
}

// What one thread of pick_token knows of the distribution, and its place in the threadgroup.
struct Sampler {
  const device uint4* keys;
  int quads;  // of keys
  int me;
  ushort sg;
  ushort lane;
  threadgroup int* ints;      // 32, for sums
  threadgroup float* floats;  // 32

  // The quads of this simdgroup in passes that go by ids: a run for each simdgroup.
  int run() const { return (quads + kPickThreads - 1) / kPickThreads * kLanes; }
  int run_begin() const { return min(int(sg) * run(), quads); }
  int run_end() const { return min(int(sg) * run() + run(), quads); }
};

// The elements with a key above `key`, and `ties` of those with that key, lowest ids first.
struct Cut {
  uint key;
  int ties;
};

// The cut that holds the `wanted` largest weights, by a radix descent on the keys: 11, 11 and 10 bits. At least that
// many are positive and not below `least`.
inline Cut largest(thread const Sampler& s, int wanted, uint least, threadgroup atomic_int* bins,
                   threadgroup int* found) {
  Cut cut = {0, wanted};
  uint known = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const int digits = pass == 2 ? 1024 : 2048;
    for (int i = s.me; i < digits; i += kPickThreads) atomic_store_explicit(&bins[i], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = s.me; i < s.quads; i += kPickThreads) {
      const uint4 keys = s.keys[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint key = keys[j];
        if (key != 0 && key >= least && (key & known) == cut.key) {
          atomic_fetch_add_explicit(&bins[(key >> shift) & uint(digits - 1)], 1, memory_order_relaxed);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Two digits a thread, the largest first.
    const int high = digits - 1 - 2 * s.me;
    const int in_high = high >= 0 ? atomic_load_explicit(&bins[high], memory_order_relaxed) : 0;
    const int in_low = high >= 1 ? atomic_load_explicit(&bins[high - 1], memory_order_relaxed) : 0;
    int total;
    const int before = exclusive_sum(in_high + in_low, s.ints, s.sg, s.lane, total);
    if (before < cut.ties && cut.ties <= before + in_high + in_low) {
      const bool first = cut.ties <= before + in_high;
      found[0] = first ? high : high - 1;
      found[1] = cut.ties - before - (first ? 0 : in_high);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    cut.key |= uint(found[0]) << shift;
    cut.ties = found[1];
    known |= uint(digits - 1) << shift;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  return cut;
}

// The sum of the weights inside `cut` with a key of at least `least`.
inline float mass_from(thread const Sampler& s, Cut cut, uint least) {
  float sum = 0;
  for (int i = s.me; i < s.quads; i += kPickThreads) {
    const uint4 keys = s.keys[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint key = keys[j];
      if (key > cut.key && key >= least) sum += as_type<float>(key);
    }
  }
  sum = threadgroup_sum(sum, s.floats, s.sg, s.lane);
  return least <= cut.key ? sum + float(cut.ties) * as_type<float>(cut.key) : sum;
}

// The largest key from which on the mass inside `cut` is more than `target` (`or_equal`: at least). Bit by bit.
inline uint key_at_mass(thread const Sampler& s, Cut cut, float target, bool or_equal) {
  uint key = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint trial = key | (1u << bit);
    const float mass = mass_from(s, cut, trial);
    if (mass > target || (or_equal && mass == target)) key = trial;
  }
  return key;
}

// How many keys of this simdgroup's run are above `key`, and how many equal it.
inline int2 count_run(thread const Sampler& s, uint key) {
  int2 counts = int2(0);
  for (int i = s.run_begin() + int(s.lane); i < s.run_end(); i += kLanes) {
    const uint4 keys = s.keys[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) counts += int2(keys[j] > key ? 1 : 0, keys[j] == key ? 1 : 0);
  }
  return int2(simd_sum(counts.x), simd_sum(counts.y));
}

// The sum of `count`, which all lanes of a simdgroup share, over the simdgroups before this one.
inline int before_run(thread const Sampler& s, int count) {
  int total;
  return simd_broadcast_first(exclusive_sum(s.lane == 0 ? count : 0, s.ints, s.sg, s.lane, total));
}

// The token of the element `index` (from 0) among those whose key is `key` (not 0), in order of ids.
inline int tie(thread const Sampler& s, uint key, int index) {
  int before = before_run(s, count_run(s, key).y);
  int token = kBeyond;
  for (int base = s.run_begin(); base < s.run_end(); base += kLanes) {
    const int i = base + int(s.lane);
    const uint4 keys = i < s.run_end() ? s.keys[i] : uint4(0);
    int mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) mine += keys[j] == key ? 1 : 0;
    int rank = before + simd_prefix_exclusive_sum(mine);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (keys[j] == key && rank++ == index) token = 4 * i + j;
    }
    before += simd_sum(mine);
  }
  return threadgroup_min(token, s.ints, s.sg, s.lane);
}

// Writes the elements inside `cut` (its key not 0) to `keys` and `tokens`, in order of ids.
inline void collect(thread const Sampler& s, Cut cut, threadgroup uint* keys, threadgroup int* tokens) {
  const int2 counts = count_run(s, cut.key);
  const int above_before = before_run(s, counts.x);
  int equal_at = before_run(s, counts.y);
  int at = above_before + min(equal_at, cut.ties);
  for (int base = s.run_begin(); base < s.run_end(); base += kLanes) {
    const int i = base + int(s.lane);
    const uint4 four = i < s.run_end() ? s.keys[i] : uint4(0);
    int equal = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) equal += four[j] == cut.key ? 1 : 0;
    int rank = equal_at + simd_prefix_exclusive_sum(equal);
    bool kept[4];
    int keeps = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      kept[j] = four[j] > cut.key || (four[j] == cut.key && rank++ < cut.ties);
      keeps += kept[j] ? 1 : 0;
    }
    int place = at + simd_prefix_exclusive_sum(keeps);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!kept[j]) continue;
      keys[place] = four[j];
      tokens[place++] = 4 * i + j;
    }
    equal_at += simd_sum(equal);
    at += simd_sum(keeps);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Largest key first, ties by id: bitonic, one thread an element. `size` is a power of two.
inline void sort(threadgroup uint* keys, threadgroup int* tokens, int size, int me) {
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      const int other = me ^ step;
      if (other > me && other < size) {
        const bool before = keys[me] > keys[other] || (keys[me] == keys[other] && tokens[me] < tokens[other]);
        if (before != ((me & run) == 0)) {
          const uint key = keys[me];
          const int token = tokens[me];
          keys[me] = keys[other];
          tokens[me] = tokens[other];
          keys[other] = key;
          tokens[other] = token;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// The draw by bisection over all weights inside `cut`, of mass `mass`: first the cut that reaches top_p of it, then the
// element where the running sum passes u of that.
inline int draw_flat(thread const Sampler& s, Cut cut, float mass, float top_p, float u) {
  if (top_p < 1.0f) {
    const float target = top_p * mass;
    const uint key = key_at_mass(s, cut, target, true);
    const float above = mass_from(s, cut, key + 1);
    const float w = as_type<float>(key);
    const int ties = max(1, int(ceil((target - above) / w)));
    cut = {key, key == cut.key ? min(ties, cut.ties) : ties};
    mass = above + float(cut.ties) * w;
  }
  const float target = u * mass;
  const uint key = key_at_mass(s, cut, target, false);
  const float above = mass_from(s, cut, key + 1);
  const int index = max(0, int((target - above) / as_type<float>(key)));
  return tie(s, key, key == cut.key ? min(index, cut.ties - 1) : index);
}

// A uniform number in [0, 1): draw_uniform of sampling.h.
inline float draw_uniform(ulong seed, ulong position) {
  ulong x = seed + 0x9e3779b97f4a7c15ul * (position + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ul;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebul;
  x ^= x >> 31;
  return float(uint(x >> 40)) * 5.9604644775390625e-8f;  // 2^-24
}

// pick_token: the picked token of each head, counted, and left for the next step's embed_rows.
//   weights [heads, weight_stride] f32   counts [slots, V]   heads   parts [heads, slices]
//   picked [heads]   last_tokens [slots]
//   Launch    grid (heads), threadgroup 1024.
//   Moves     greedy: 8 bytes a slice. Sampling: six passes over the weights, about 1 MB each.
[[max_total_threads_per_threadgroup(kPickThreads)]] kernel void pick_token(
    constant PickParams& p [[buffer(0)]], const device float* weights [[buffer(1)]],
    device ushort* counts [[buffer(2)]], const device HeadInfo* heads [[buffer(3)]],
    const device SliceMax* parts [[buffer(4)]], device int* picked [[buffer(5)]], device int* last_tokens [[buffer(6)]],
    uint index [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_int bins[2048];
  threadgroup uint keys[kPickCandidates];
  threadgroup int tokens[kPickCandidates];
  threadgroup int ints[kLanes];
  threadgroup float floats[kLanes];
  threadgroup int found[2];
  const HeadInfo head = heads[index];
  const int me = int(thread_index);
  const SliceMax best = best_of(parts + index * uint(p.slices), p.slices, lane);
  int token = best.token < 0 ? kNoToken : best.token;

  if (samples(head, best)) {
    const device uint4* rows = (const device uint4*)(weights + index * uint(p.weight_stride));
    const Sampler s = {rows, p.weight_stride / 4, me, sg, lane, ints, floats};
    int positive = 0;
    uint most = 0;
    for (int i = me; i < s.quads; i += kPickThreads) {
      const uint4 four = s.keys[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        positive += four[j] != 0 ? 1 : 0;
        most = max(most, four[j]);
      }
    }
    positive = threadgroup_sum(positive, ints, sg, lane);
    // Each of the 1,024 threads has an element of this key or a larger one, so the largest 1,024 are there too: all that
    // lies below stays out of the histograms, whose bins are contended.
    const uint least = uint(threadgroup_min(int(most), ints, sg, lane));
    const int wanted = head.top_k > 0 ? min(head.top_k, positive) : positive;
    const int have = min(wanted, kPickCandidates);
    const Cut cut = largest(s, have, least, bins, found);
    keys[me] = 0;
    tokens[me] = p.vocab;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    collect(s, cut, keys, tokens);
    int size = 1;
    while (size < have) size *= 2;
    sort(keys, tokens, size, me);

    float candidates_mass;
    const float w = me < have ? as_type<float>(keys[me]) : 0.0f;
    const float running = exclusive_sum(w, floats, sg, lane, candidates_mass) + w;
    Cut all = cut;
    float mass = candidates_mass;
    if (wanted > have) {
      all = largest(s, wanted, 0, bins, found);
      mass = mass_from(s, all, 1);
    }
    int keep = wanted;
    float kept = mass;
    if (head.top_p < 1.0f) {
      const bool reaches = me < have && running >= head.top_p * mass;
      keep = threadgroup_min(reaches ? me + 1 : wanted, ints, sg, lane);
      if (keep <= have) {
        if (me == keep - 1) floats[0] = running;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        kept = floats[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
    const float u = draw_uniform(ulong(head.seed_low) | (ulong(head.seed_high) << 32), ulong(head.position));
    const int last = min(keep, have) - 1;
    const int place = threadgroup_min(me <= last && running > u * kept ? me : kPickCandidates, ints, sg, lane);
    if (place < kPickCandidates) {
      token = tokens[place];
    } else if (keep <= have) {
      token = tokens[last];
    } else {
      token = draw_flat(s, all, mass, head.top_p, u);
    }
  }

  if (me != 0) return;
  picked[index] = head.pick != 0 ? token : kNoToken;
  if (head.pick == 0 || token < 0) return;
  last_tokens[head.slot * kLastTokenStride] = token;
  device ushort* count = counts + ulong(head.slot) * ulong(p.count_stride) + ulong(token);
  if ((uint(*count) & ~kInPromptBit) != kInPromptBit - 1) *count = ushort(*count + 1);
}
