// Prefill routing that never leaves the GPU: which rows each expert gets, cut in blocks of a tile's rows, and how many
// threadgroups the grouped GEMMs need.
#include "threadgroup_scan.h"

// moe_group_rows: histogram, prefix scan, block map and scatter of R * 8 assignments, and the shared expert's R rows
// behind them.
//   ids [R, 8]   sorted [R * 9]: pair numbers row * 9 + choice, by expert   blocks: see ExpertBlock
//   groups [6]: threadgroups of experts_up_qmm (x, y, z) and of experts_down_qmm
//   Launch    one threadgroup of 1024: 16 assignments a thread at 2,048 rows, some 20 us of one core a layer.
//   Requires  experts <= 1024. The order of an expert's rows is arbitrary: no result depends on it.
[[max_total_threads_per_threadgroup(kGroupThreads)]] kernel void moe_group_rows(
    constant GroupParams& p [[buffer(0)]], const device int* ids [[buffer(1)]], device int* sorted [[buffer(2)]],
    device ExpertBlock* blocks [[buffer(3)]], device uint* groups [[buffer(4)]],
    uint thread_index [[thread_index_in_threadgroup]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_int counts[kMaxExperts];
  threadgroup int scratch[kLanes];
  const int me = int(thread_index);
  const int assignments = p.rows * kTopExperts;
  atomic_store_explicit(&counts[me], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = me; i < assignments; i += kGroupThreads) {
    atomic_fetch_add_explicit(&counts[ids[i]], 1, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Thread e is expert e.
  const int count = atomic_load_explicit(&counts[me], memory_order_relaxed);
  const int tiles = (count + p.tile_rows - 1) / p.tile_rows;
  int all_rows, all_tiles;
  const int first = exclusive_sum(count, scratch, sg, lane, all_rows);
  const int first_tile = exclusive_sum(tiles, scratch, sg, lane, all_tiles);
  for (int i = 0; i < tiles; ++i) {
    blocks[first_tile + i] = ExpertBlock{me, first + i * p.tile_rows, min(p.tile_rows, count - i * p.tile_rows)};
  }
  const int shared_tiles = (p.rows + p.tile_rows - 1) / p.tile_rows;
  for (int i = me; i < shared_tiles; i += kGroupThreads) {
    blocks[all_tiles + i] =
        ExpertBlock{p.experts, assignments + i * p.tile_rows, min(p.tile_rows, p.rows - i * p.tile_rows)};
  }
  if (me < 2) {  // x, y and z of each grid
    groups[3 * me] = uint(me == 0 ? p.up_tiles : p.down_tiles);
    groups[3 * me + 1] = uint(all_tiles + shared_tiles);
    groups[3 * me + 2] = 1;
  }
  atomic_store_explicit(&counts[me], first, memory_order_relaxed);  // from now on: where the next row goes
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = me; i < assignments; i += kGroupThreads) {
    const int at = atomic_fetch_add_explicit(&counts[ids[i]], 1, memory_order_relaxed);
    sorted[at] = i / kTopExperts * kPairs + i % kTopExperts;
  }
  for (int i = me; i < p.rows; i += kGroupThreads) sorted[assignments + i] = i * kPairs + kTopExperts;
}

// experts_combine: residual += sum_i weight_i * y_i + shared_gate * y_shared.
//   y [R, 9, H] bf16   weights [R, 8]   shared_gate [R]   residual [R, H] f32
//   Launch    grid (ceil(H/1024), R), threadgroup 256: four elements a thread. Moves 26 bytes an element.
[[max_total_threads_per_threadgroup(kElementThreads)]] kernel void experts_combine(
    constant CombineParams& p [[buffer(0)]], const device bfloat* y [[buffer(1)]],
    const device float* weights [[buffer(2)]], const device float* shared_gate [[buffer(3)]],
    device float* residual [[buffer(4)]], uint2 tg [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int n = (int(tg.x) * kElementThreads + int(thread_index)) * 4;
  if (n >= p.hidden) return;
  const device bfloat* in = y + tg.y * uint(kPairs * p.hidden) + uint(n);
  float4 sum = shared_gate[tg.y] * load4(in + kTopExperts * p.hidden);
#pragma unroll
  for (int i = 0; i < kTopExperts; ++i) sum += weights[tg.y * uint(kTopExperts) + uint(i)] * load4(in + i * p.hidden);
  device float4* to = (device float4*)(residual + tg.y * uint(p.hidden) + uint(n));
  *to = *to + sum;
}
