// Causal attention of many rows over the paged KV cache (prefill).
#include "kv.h"

constant constexpr int kHeadPitch = kHeadSize + 8;

// Copies `count` rows of 256, `stride` apart, to threadgroup memory; the rest up to kRows become zero. By all threads.
template <int kRows>
void load_rows(const device bfloat* first, uint stride, int count, threadgroup bfloat* tile, int thread_index) {
#pragma unroll
  for (int i = 0; i < kRows * (kHeadSize / 4) / kAttnThreads; ++i) {
    const int four = i * kAttnThreads + thread_index;
    const int row = four / (kHeadSize / 4);
    const int column = four % (kHeadSize / 4) * 4;
    threadgroup bfloat4* out = (threadgroup bfloat4*)(tile + row * kHeadPitch + column);
    *out = row < count ? *(const device bfloat4*)(first + uint(row) * stride + uint(column)) : bfloat4(float4(0));
  }
}

// sdpa_tile: softmax(q k / 16) v * sigmoid(gate) for 32 rows of one sequence and one query head.
//   q [R, Hq * 256] bf16   kv pages   q_gate [R, Hq * 512]   mixed [R, stride] bf16
//   Launch    grid (tiles, Hq), threadgroup 128 = 4 simdgroups, each with 8 query rows and their 8 x 256 output in
//             registers; 16 keys at a time, K then V through the same threadgroup tile.
//   Moves     keys * 1 KiB a threadgroup.
//   Numerics  scores and sums fp32, weights rounded to bf16 before they meet V.
//   Relies on the lane layout of simdgroup_matrix (thread_elements), which all engines use and M1 to M5 share:
//             lane l has row (l & 16) / 4 + l / 2 % 4 and columns c, c + 1 with c = (l & 8) / 2 + l % 2 * 2.
[[max_total_threads_per_threadgroup(kAttnThreads)]] kernel void sdpa_tile(
    constant AttentionParams& p [[buffer(0)]], const device bfloat* q [[buffer(1)]],
    const device bfloat* q_gate [[buffer(2)]], const device bfloat* kv [[buffer(3)]],
    const device AttentionTile* tiles [[buffer(4)]], const device RowInfo* rows [[buffer(5)]],
    const device int* pages [[buffer(6)]], device bfloat* mixed [[buffer(7)]],
    uint2 tg [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    ushort sg [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup bfloat4 query_words[kAttnTileRows * kHeadPitch / 4];
  threadgroup bfloat4 kv_words[kAttnTileKeys * kHeadPitch / 4];
  threadgroup bfloat* query = (threadgroup bfloat*)query_words;
  threadgroup bfloat* tile_kv = (threadgroup bfloat*)kv_words;
  const AttentionTile tile = tiles[tg.x + uint(p.first_tile)];
  const RowInfo first = rows[tile.first_row];
  const int head = int(tg.y);
  const int kv_head = head / (p.q_heads / p.kv_heads);
  const int keys = first.position + tile.rows;  // visible to the last row

  load_rows<kAttnTileRows>(q + (uint(tile.first_row) * uint(p.q_heads) + uint(head)) * uint(kHeadSize),
                           uint(p.q_heads * kHeadSize), tile.rows, query, int(thread_index));

  const int my_row = int(lane & 16) / 4 + int(lane) / 2 % 4;    // of the simdgroup's eight
  const int my_column = int(lane & 8) / 2 + int(lane) % 2 * 2;  // of a matrix's eight, and the next
  const int my_position = first.position + int(sg) * 8 + my_row;
  simdgroup_matrix<float, 8, 8> out[kHeadSize / 8];
#pragma unroll
  for (int i = 0; i < kHeadSize / 8; ++i) out[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  float top = kNone;
  float total = 0;

  for (int key0 = 0; key0 < keys; key0 += kAttnTileKeys) {
    const int count = min(kAttnTileKeys, keys - key0);
    const device bfloat* k_rows = kv + kv_row(p, pages[first.pages + key0 / kPageRows], 0, kv_head, key0 % kPageRows);
    load_rows<kAttnTileKeys>(k_rows, uint(kHeadSize), count, tile_kv, int(thread_index));
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_matrix<float, 8, 8> scores[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) scores[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int d = 0; d < kHeadSize; d += 8) {
      simdgroup_matrix<bfloat, 8, 8> left, right;
      simdgroup_load(left, query + int(sg) * 8 * kHeadPitch + d, kHeadPitch);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        simdgroup_load(right, tile_kv + j * 8 * kHeadPitch + d, kHeadPitch, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(scores[j], left, right, scores[j]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const device bfloat* v_rows = k_rows + uint(p.kv_heads) * uint(kPageRows * kHeadSize);
    load_rows<kAttnTileKeys>(v_rows, uint(kHeadSize), count, tile_kv, int(thread_index));

    // Softmax of the lane's row: it has four of the 16 scores, the others are in lanes ^1, ^8 and ^9.
    float s[4];
    float new_top = top;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key0 + i / 2 * 8 + my_column + i % 2;
      s[i] = key <= my_position ? scores[i / 2].thread_elements()[i % 2] * 0.0625f : kNone;
      new_top = max(new_top, s[i]);
    }
    new_top = max(new_top, simd_shuffle_xor(new_top, 1));
    new_top = max(new_top, simd_shuffle_xor(new_top, 8));
    const float old_weight = fast::exp(top - new_top);
    simdgroup_matrix<bfloat, 8, 8> weights[2];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bfloat weight = bfloat(fast::exp(s[i] - new_top));
      weights[i / 2].thread_elements()[i % 2] = weight;
      sum += float(weight);
    }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 8);
    total = total * old_weight + sum;
    top = new_top;
    threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma unroll
    for (int d = 0; d < kHeadSize / 8; ++d) {
      out[d].thread_elements()[0] *= old_weight;
      out[d].thread_elements()[1] *= old_weight;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        simdgroup_matrix<bfloat, 8, 8> right;
        simdgroup_load(right, tile_kv + j * 8 * kHeadPitch + d * 8, kHeadPitch);
        simdgroup_multiply_accumulate(out[d], weights[j], right, out[d]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const int local = int(sg) * 8 + my_row;
  if (local >= tile.rows) return;
  const uint row = uint(tile.first_row + local);
  const device bfloat* gate =
      q_gate + (row * uint(p.q_heads) + uint(head)) * uint(2 * kHeadSize) + uint(kHeadSize + my_column);
  device bfloat* to = mixed + row * uint(p.mixed_stride) + uint(head * kHeadSize + my_column);
#pragma unroll
  for (int d = 0; d < kHeadSize / 8; ++d) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[d * 8 + i] = bfloat(out[d].thread_elements()[i] / total * sigmoid(float(gate[d * 8 + i])));
    }
  }
}
