// Which token comes next, decided where the next step reads it. The definition is backend/sampling.h.
//
// An element's weight is exp((logit - max) / temperature), 0 if the token is not allowed or below min_p. Weights order
// like their bits, so selection works on uint keys.
//   pick_max    the largest logit of each slice (all slices at once)
//   pick_token  greedy: the largest of those. Sampling: the top 1,024 weights, sorted on chip, answer nearly every
//               request; a distribution so flat that they do not reach top_p or the draw is walked by bisection.
#include "threadgroup_scan.h"

constant constexpr uint kInPromptBit = 0x8000;
constant constexpr int kNoToken = -1;
constant constexpr int kNotANumber = -2;

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

// What one thread of pick_token knows of the distribution, and its place in the threadgroup.
struct Sampler {
  Logits logits;
  float top;
  int vocab;
  int me;
  ushort sg;
  ushort lane;
  threadgroup int* ints;      // 32, for sums
  threadgroup float* floats;  // 32

  float weight(int i) const {
    const float w = precise::exp((logits.at(i) - top) / logits.head.temperature);
    return w >= logits.head.min_p ? w : 0.0f;
  }
  uint key(int i) const { return as_type<uint>(weight(i)); }
};

// The elements with a key above `key`, and `ties` of those with that key, lowest ids first.
struct Cut {
  uint key;
  int ties;
};

// The cut that holds the `wanted` largest weights, by a radix descent on the keys: 11, 11 and 10 bits.
inline Cut largest(thread const Sampler& s, int wanted, threadgroup atomic_int* bins, threadgroup int* found) {
  Cut cut = {0, wanted};
  uint known = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    const int digits = pass == 2 ? 1024 : 2048;
    for (int i = s.me; i < digits; i += kPickThreads) atomic_store_explicit(&bins[i], 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = s.me; i < s.vocab; i += kPickThreads) {
      const uint key = s.key(i);
      if (key != 0 && (key & known) == cut.key) {
        atomic_fetch_add_explicit(&bins[(key >> shift) & uint(digits - 1)], 1, memory_order_relaxed);
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
  for (int i = s.me; i < s.vocab; i += kPickThreads) {
    const float w = s.weight(i);
    const uint key = as_type<uint>(w);
    if (key > cut.key && key >= least) sum += w;
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

// The token of the element `index` (from 0) among those whose key is `key`, in order of ids: each simdgroup looks at a
// run of ids.
inline int tie(thread const Sampler& s, uint key, int index) {
  const int run = (s.vocab + kPickThreads - 1) / kPickThreads * kLanes;
  int count = 0;
  for (int i = int(s.sg) * run + int(s.lane); i < min((int(s.sg) + 1) * run, s.vocab); i += kLanes) {
    count += s.key(i) == key ? 1 : 0;
  }
  count = simd_sum(count);
  int total;
  int before = exclusive_sum(s.lane == 0 ? count : 0, s.ints, s.sg, s.lane, total);
  before = simd_broadcast_first(before);
  int token = s.vocab;
  for (int base = int(s.sg) * run; base < min((int(s.sg) + 1) * run, s.vocab); base += kLanes) {
    const int i = base + int(s.lane);
    const int hit = i < s.vocab && s.key(i) == key ? 1 : 0;
    const int rank = before + simd_prefix_exclusive_sum(hit);
    if (hit != 0 && rank == index) token = i;
    before += simd_sum(hit);
  }
  return threadgroup_min(token, s.ints, s.sg, s.lane);
}

// Writes the elements inside `cut` to `keys` and `tokens`, in order of ids.
inline void collect(thread const Sampler& s, Cut cut, threadgroup uint* keys, threadgroup int* tokens) {
  const int run = (s.vocab + kPickThreads - 1) / kPickThreads * kLanes;
  const int begin = int(s.sg) * run;
  const int end = min(begin + run, s.vocab);
  int above = 0;
  int equal = 0;
  for (int i = begin + int(s.lane); i < end; i += kLanes) {
    const uint key = s.key(i);
    above += key > cut.key ? 1 : 0;
    equal += key == cut.key ? 1 : 0;
  }
  above = simd_sum(above);
  equal = simd_sum(equal);
  int total;
  const int above_before = exclusive_sum(s.lane == 0 ? above : 0, s.ints, s.sg, s.lane, total);
  const int equal_before = exclusive_sum(s.lane == 0 ? equal : 0, s.ints, s.sg, s.lane, total);
  int equal_at = simd_broadcast_first(equal_before);
  int at = simd_broadcast_first(above_before) + min(equal_at, cut.ties);
  for (int base = begin; base < end; base += kLanes) {
    const int i = base + int(s.lane);
    const uint key = i < end ? s.key(i) : 0;
    const int is_equal = key == cut.key && i < end ? 1 : 0;
    const int rank = equal_at + simd_prefix_exclusive_sum(is_equal);
    const int kept = key > cut.key || (is_equal != 0 && rank < cut.ties) ? 1 : 0;
    const int place = at + simd_prefix_exclusive_sum(kept);
    if (kept != 0) {
      keys[place] = key;
      tokens[place] = i;
    }
    equal_at += simd_sum(is_equal);
    at += simd_sum(kept);
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
inline int draw_flat(thread const Sampler& s, Cut cut, float mass, float u) {
  if (s.logits.head.top_p < 1.0f) {
    const float target = s.logits.head.top_p * mass;
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
//   parts [heads, slices]   picked [heads]   last_tokens [slots]   the rest as in pick_max
//   Launch    grid (heads), threadgroup 1024.
//   Moves     greedy: 8 bytes a slice. Sampling: six or seven passes over the logits, about 1 MB each.
[[max_total_threads_per_threadgroup(kPickThreads)]] kernel void pick_token(
    constant PickParams& p [[buffer(0)]], const device float* logits [[buffer(1)]], device ushort* counts [[buffer(2)]],
    const device uint* masks [[buffer(3)]], const device HeadInfo* heads [[buffer(4)]],
    const device SliceMax* parts [[buffer(5)]], device int* picked [[buffer(6)]], device int* last_tokens [[buffer(7)]],
    uint index [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_int bins[2048];
  threadgroup uint keys[kPickCandidates];
  threadgroup int tokens[kPickCandidates];
  threadgroup int ints[kLanes];
  threadgroup float floats[kLanes];
  threadgroup int found[2];
  const Logits l = logits_of(p, logits, counts, masks, heads, index);
  const int me = int(thread_index);

  SliceMax best = {-INFINITY, kNoToken};
  for (int i = 0; i < p.slices; ++i) {
    const SliceMax part = parts[index * uint(p.slices) + uint(i)];
    if (best.token == kNotANumber || part.token == kNoToken) continue;
    if (part.token == kNotANumber || part.value > best.value) best = part;  // slices come in order of ids
  }
  int token = best.token < 0 ? kNoToken : best.token;

  if (l.head.pick != 0 && token >= 0 && l.head.temperature > 0.0f && best.value < INFINITY) {
    const Sampler s = {l, best.value, p.vocab, me, sg, lane, ints, floats};
    int positive = 0;
    for (int i = me; i < p.vocab; i += kPickThreads) positive += s.key(i) != 0 ? 1 : 0;
    positive = threadgroup_sum(positive, ints, sg, lane);
    const int wanted = l.head.top_k > 0 ? min(l.head.top_k, positive) : positive;
    const int have = min(wanted, kPickCandidates);
    const Cut cut = largest(s, have, bins, found);
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
      all = largest(s, wanted, bins, found);
      mass = mass_from(s, all, 1);
    }
    int keep = wanted;
    float kept = mass;
    if (l.head.top_p < 1.0f) {
      const bool reaches = me < have && running >= l.head.top_p * mass;
      keep = threadgroup_min(reaches ? me + 1 : wanted, ints, sg, lane);
      if (keep <= have) {
        if (me == keep - 1) floats[0] = running;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        kept = floats[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
    const float u = draw_uniform(ulong(l.head.seed_low) | (ulong(l.head.seed_high) << 32), ulong(l.head.position));
    const int last = min(keep, have) - 1;
    const int place = threadgroup_min(me <= last && running > u * kept ? me : kPickCandidates, ints, sg, lane);
    if (place < kPickCandidates) {
      token = tokens[place];
    } else if (keep <= have) {
      token = tokens[last];
    } else {
      token = draw_flat(s, all, mass, u);
    }
  }

  threadgroup_barrier(mem_flags::mem_device);  // the others have read the counts
  if (me != 0) return;
  picked[index] = l.head.pick != 0 ? token : kNoToken;
  if (l.head.pick == 0 || token < 0) return;
  last_tokens[l.head.slot * kLastTokenStride] = token;
  device ushort* count = counts + ulong(l.head.slot) * ulong(p.count_stride) + ulong(token);
  if ((uint(*count) & ~kInPromptBit) != kInPromptBit - 1) *count = ushort(*count + 1);
}
