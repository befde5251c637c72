// Copies and fills of sequence state, in 16-byte words: recorded like any other dispatch, so that they keep their place
// among the steps.
#include "common.h"

// copy_pieces: `pieces` runs of words, `stride` words apart, from one place to another.
//   Launch    grid (ceil(words/256), pieces), threadgroup 256: a word a thread.
kernel void copy_pieces(constant CopyParams& p [[buffer(0)]], const device uint4* from [[buffer(1)]],
                        device uint4* to [[buffer(2)]], uint2 tg [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
  const uint word = tg.x * 256 + thread_index;
  if (word >= p.words) return;
  const ulong at = ulong(tg.y) * ulong(p.stride) + ulong(word);
  to[at] = from[at];
}

// fill_words: the same 32-bit value everywhere.
//   Launch    grid (ceil(words/256)), threadgroup 256.
kernel void fill_words(constant FillParams& p [[buffer(0)]], device uint4* to [[buffer(1)]],
                       uint tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
  const uint word = tg * 256 + thread_index;
  if (word < p.words) to[word] = uint4(p.value);
}
