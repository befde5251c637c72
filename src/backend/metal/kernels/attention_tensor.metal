// Causal attention of many rows with tensor operations (prefill on M5 and later).
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

#include "kv.h"
#include "tensor.h"

constant constexpr int kTensorKeys = 32;  // a half page

// sdpa_tile_tensor: sdpa_tile (attention_tile.metal) with the same arguments.
//   Launch    grid (tiles, Hq), threadgroup 128 = 4 simdgroups: two for each 16 query rows, one for each half of the 256
//             columns. A simdgroup adds up its half of a score and hands it to the other; a thread holds its part of the
//             rows' outputs in 64 registers.
//   Moves     keys * 512 bytes a simdgroup, straight from the cache into the operands. The simdgroups of a threadgroup, and
//             those of a KV head's eight query heads, meet in the caches.
//   Numerics  scores and sums fp32, weights rounded to bf16 before they meet V.
//   Relies on lane_place: a lane holds two rows, and their rows' scores are in lanes ^1, ^8 and ^9; as sums and as left
//             operand an element is in the same slot.
[[max_total_threads_per_threadgroup(kAttnThreads)]] kernel void sdpa_tile_tensor(
    constant AttentionParams& p [[buffer(0)]], const device bfloat* q [[buffer(1)]],
    const device bfloat* q_gate [[buffer(2)]], const device bfloat* kv [[buffer(3)]],
    const device AttentionTile* tiles [[buffer(4)]], const device RowInfo* rows [[buffer(5)]],
    const device int* pages [[buffer(6)]], device bfloat* mixed [[buffer(7)]],
    uint2 tg [[threadgroup_position_in_grid]], ushort sg [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float halves[2 * kAttnThreads * 16];  // of the scores; in turn, so that a tile needs one barrier
  const AttentionTile tile = tiles[tg.x + uint(p.first_tile)];
  const RowInfo first = rows[tile.first_row];
  const int head = int(tg.y);
  const int kv_head = head / (p.q_heads / p.kv_heads);
  const int row0 = int(sg) / 2 * 16;  // of the tile
  const int column0 = int(sg) % 2 * (kHeadSize / 2);
  const LanePlace at = lane_place(lane);
  const int last = tile.rows - 1;
  const int keys = first.position + tile.rows;  // visible to the last row
  const uint to_values = uint(p.kv_heads) * uint(kPageRows * kHeadSize);

  // The lane's two rows; rows that are not there repeat the last one and are not stored.
  const device bfloat* query[2];
  int position[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int local = min(row0 + int(at.row) + 8 * r, last);
    query[r] = q + (uint(tile.first_row + local) * uint(p.q_heads) + uint(head)) * uint(kHeadSize) + at.column;
    position[r] = first.position + local;
  }

  float out[kHeadSize / 64][16];  // 32 columns each
#pragma unroll
  for (int n = 0; n < kHeadSize / 64; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) out[n][i] = 0;
  }
  float top[2] = {kNone, kNone};
  float total[2] = {0, 0};

  for (int key0 = 0; key0 < keys; key0 += kTensorKeys) {
    const device bfloat* k_rows = kv + kv_row(p, pages[first.pages + key0 / kPageRows], 0, kv_head, key0 % kPageRows);
    uint key_at[4];  // keys that are not there repeat the last one: numbers, whose weight is zero
#pragma unroll
    for (int part = 0; part < 4; ++part)
      key_at[part] = uint(min(int(at.row) + 8 * part, keys - 1 - key0)) * uint(kHeadSize) + uint(at.column);

    OperationNK score_op;
    LeftNK left = score_op.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
    RightNK right = score_op.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
    auto scores = score_op.get_destination_cooperative_tensor<LeftNK, RightNK, float>();
#pragma unroll
    for (ushort i = 0; i < 16; ++i) scores[i] = 0;
    for (int d = column0; d < column0 + kHeadSize / 2; d += 16) {
#pragma unroll
      for (ushort part = 0; part < 2; ++part) {
        const bfloat4 four = *(const device bfloat4*)(query[part] + d);
#pragma unroll
        for (ushort i = 0; i < 4; ++i) left[part * 4 + i] = four[i];
      }
#pragma unroll
      for (ushort part = 0; part < 4; ++part) {
        const bfloat4 four = *(const device bfloat4*)(k_rows + key_at[part] + uint(d));
#pragma unroll
        for (ushort i = 0; i < 4; ++i) right[part * 4 + i] = four[i];
      }
      score_op.run(left, right, scores);
    }

    threadgroup float* share = halves + key0 / kTensorKeys % 2 * (kAttnThreads * 16);
#pragma unroll
    for (ushort i = 0; i < 16; ++i) share[(sg * 16 + i) * kLanes + lane] = scores[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax of the two rows: eight scores each here.
    float s[16];
    float new_top[2] = {top[0], top[1]};
#pragma unroll
    for (ushort i = 0; i < 16; ++i) {
      const int r = i % 8 / 4;
      const int key = key0 + i / 8 * 16 + int(at.column) + i % 4;
      const float score = scores[i] + share[((sg ^ 1) * 16 + i) * kLanes + lane];
      s[i] = key <= position[r] ? score * 0.0625f : kNone;
      new_top[r] = max(new_top[r], s[i]);
    }
    float old_weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      new_top[r] = max(new_top[r], simd_shuffle_xor(new_top[r], 1));
      new_top[r] = max(new_top[r], simd_shuffle_xor(new_top[r], 8));
      old_weight[r] = fast::exp(top[r] - new_top[r]);
      top[r] = new_top[r];
    }
    bfloat weights[16];
    float sum[2] = {0, 0};
#pragma unroll
    for (ushort i = 0; i < 16; ++i) {
      const float weight = fast::exp(s[i] - top[i % 8 / 4]);
      weights[i] = bfloat(weight);
      sum[i % 8 / 4] += weight;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += simd_shuffle_xor(sum[r], 1);
      sum[r] += simd_shuffle_xor(sum[r], 8);
      total[r] = total[r] * old_weight[r] + sum[r];
    }

    // The weights' two 16 x 16 parts times 16 values each.
    const device bfloat* v_rows = k_rows + to_values + column0;
#pragma unroll
    for (int n = 0; n < kHeadSize / 64; ++n) {
      OperationKN value_op;
      LeftKN weight = value_op.get_left_input_cooperative_tensor<bfloat, bfloat, float>();
      RightKN value = value_op.get_right_input_cooperative_tensor<bfloat, bfloat, float>();
      auto sums = value_op.get_destination_cooperative_tensor<LeftKN, RightKN, float>();
#pragma unroll
      for (ushort i = 0; i < 16; ++i) sums[i] = out[n][i] * old_weight[i % 8 / 4];
#pragma unroll
      for (ushort part = 0; part < 2; ++part) {
#pragma unroll
        for (ushort i = 0; i < 8; ++i) weight[i] = weights[part * 8 + i];
#pragma unroll
        for (ushort j = 0; j < 4; ++j) {  // columns 0..15 of two rows, then 16..31
          const uint from = key_at[part * 2 + j % 2] + uint(n * 32 + j / 2 * 16);
          const bfloat4 four = *(const device bfloat4*)(v_rows + from);
#pragma unroll
          for (ushort i = 0; i < 4; ++i) value[j * 4 + i] = four[i];
        }
        value_op.run(weight, value, sums);
      }
#pragma unroll
      for (ushort i = 0; i < 16; ++i) out[n][i] = sums[i];
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int local = row0 + int(at.row) + 8 * r;
    if (local > last) continue;
    const uint row = uint(tile.first_row + local);
    const uint column = uint(column0) + at.column;
    const device bfloat* gate =
        q_gate + (row * uint(p.q_heads) + uint(head)) * uint(2 * kHeadSize) + uint(kHeadSize) + column;
    device bfloat* to = mixed + row * uint(p.mixed_stride) + uint(head * kHeadSize) + column;
#pragma unroll
    for (int n = 0; n < kHeadSize / 64; ++n) {
#pragma unroll
      for (int half_part = 0; half_part < 2; ++half_part) {
        const int offset = n * 32 + half_part * 16;
        const int slot = half_part * 8 + r * 4;
        const float4 g = load4(gate + offset);
        const float4 y = float4(out[n][slot], out[n][slot + 1], out[n][slot + 2], out[n][slot + 3]) / total[r];
        store4(to + offset, y * float4(sigmoid(g.x), sigmoid(g.y), sigmoid(g.z), sigmoid(g.w)));
      }
    }
  }
}
