// Copies and fills of sequence state, in 16-byte words: recorded like any other dispatch, so that they keep their place
// among the steps. And a probe of the memory itself.
#include "common.h"

// copy_pieces: `pieces` runs of words, `stride` words apart, from one place to another.
//   Launch    grid (ceil(words/256), pieces), threadgroup 256: a word a thread.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void copy_pieces(
    constant CopyParams& p [[buffer(0)]], const device uint4* from [[buffer(1)]], device uint4* to [[buffer(2)]],
    uint2 tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint word = tg.x * uint(kElementThreads) + thread_index;
  if (word >= p.words) return;
  const ulong at = ulong(tg.y) * ulong(p.stride) + ulong(word);
  to[at] = from[at];
}

// fill_words: the same 32-bit value everywhere.
//   Launch    grid (ceil(words/256)), threadgroup 256.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void fill_words(constant FillParams& p [[buffer(0)]],
                                                                              device uint4* to [[buffer(1)]],
                                                                              uint tg [[threadgroup_position_in_grid]],
                                                                              uint thread_index
                                                                              [[thread_index_in_threadgroup]]) {
  const uint word = tg * uint(kElementThreads) + thread_index;
  if (word < p.words) to[word] = uint4(p.value);
}

// sum_words: reads every word once and does nothing else worth naming: what the memory gives (bandwidth.cc).
//   Launch    grid (any), threadgroup 256: thread t of n takes words t, t + n, t + 2 n, ...
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void sum_words(constant SumParams& p [[buffer(0)]],
                                                                             const device uint4* from [[buffer(1)]],
                                                                             device uint4* sums [[buffer(2)]],
                                                                             uint at [[thread_position_in_grid]],
                                                                             uint threads [[threads_per_grid]]) {
  uint4 sum = uint4(0);
  for (uint word = at; word < p.words; word += threads) sum += from[word];
  sums[at] = sum;
}
