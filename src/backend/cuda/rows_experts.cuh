#pragma once
// The rows kernel's expert phase: RMSNorm, router, choice, gate and up projections with SwiGLU, down projections.
//   Router  a block computes two logits of every row, a warp 128 inputs. Every block chooses, a warp a row, and makes the
//           list of distinct experts, each with the rows that chose it.
//   Up      the tiles of all listed experts in a row, shared out evenly; two warps take a tile, half of its inputs each.
//   Down    a block takes the tile of its 16 outputs of all listed experts; a warp takes an expert.
#include "backend/cuda/rows_block.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda::rows {

inline constexpr int kUpTiles = token::kExpertWidth / 8;  // of an expert
inline constexpr int kSharedGateTile = token::kExperts / kTileRows;

// The block's share of the up projections' tiles.
struct UpShare {
  int first, end;
  __device__ __forceinline__ explicit UpShare(int items) {
    const int block = static_cast<int>(blockIdx.x);
    first = items * kUpTiles * block / kBlocks;
    end = items * kUpTiles * (block + 1) / kBlocks;
  }
};
__device__ __forceinline__ int down_slots(int items) { return (items + kDownItems - 1) / kDownItems; }

// A warp's two groups of the block's two logits (fragment row 0 and 8) and of the shared expert's gate (row 1).
struct RouterGroups {
  static constexpr int kCount = kGroups / kWarps;
  uint4 codes[kCount][2];
  uint2 scales[kCount];

  __device__ __forceinline__ void load(const TokenMatrix& w) {
    const int block = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32, lane = lane_id();
    const bool is_gate = lane >= 4;
    const int tile = is_gate ? kSharedGateTile : block / 8, pair = is_gate ? 0 : block % 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const size_t group = static_cast<size_t>(tile * kGroups + warp * kCount + i);
      codes[i][0] = codes[i][1] = make_uint4(0, 0, 0, 0);
      scales[i] = make_uint2(0, 0);
      if (lane >= 8) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        codes[i][half] = load_stream(w.codes + (group * 2 + half) * 32 + pair * 4 + lane % 4);
      scales[i] = load_stream(w.scales + group * 8 + pair);
    }
  }
};

// One warp: the list of experts from every row's choice, the shared expert first. A lane takes two choices.
__device__ __forceinline__ void list_items(const Block& b) {
  Items& items = b.s.items;
  const int lane = lane_id();
  int id[2], column[2], mask[2];
  bool valid[2], leads[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * 32 + lane, row = at / kExpertsPerToken;
    valid[i] = row < b.rows;
    id[i] = valid[i] ? b.s.ids[row][at % kExpertsPerToken] : 0;
    mask[i] = static_cast<int>(b.s.rows_of[id[i] / 4] >> (id[i] % 4 * 8) & 255);
    column[i] = __popc(mask[i] & ((1 << row) - 1));
    leads[i] = valid[i] && column[i] == 0;
  }
  const unsigned first = __ballot_sync(0xffffffffu, leads[0]), second = __ballot_sync(0xffffffffu, leads[1]);
  const unsigned before = (1u << lane) - 1;
  const int item[2] = {1 + __popc(first & before), 1 + __popc(first) + __popc(second & before)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!leads[i]) continue;
    items.expert[item[i]] = static_cast<int16_t>(id[i]);
    items.count[item[i]] = static_cast<uint8_t>(__popc(mask[i]));
    items.of[id[i]] = static_cast<uint8_t>(item[i]);
  }
  if (lane == 0) {
    items.expert[0] = -1;
    items.count[0] = static_cast<uint8_t>(b.rows);
    items.total = 1 + __popc(first) + __popc(second);
  }
  if (lane < b.rows) items.entries[0][lane] = static_cast<uint8_t>(lane * kChoices + kExpertsPerToken);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * 32 + lane;
    if (valid[i])
      items.entries[items.of[id[i]]][column[i]] =
          static_cast<uint8_t>(at / kExpertsPerToken * kChoices + at % kExpertsPerToken);
  }
  __syncwarp();
}

// A warp's half of a tile of gate and up units; then the pair's first warp has the hidden units and sends them.
__device__ __forceinline__ void multiply_up(const Block& b, int index, int turn, const std::byte* slot, uint32_t tag) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_id(), half = warp % 2, r = lane / 4, q = lane % 4;
  UpArea& area = b.s.area.up;
  const int item = index / kUpTiles, tile = index % kUpTiles, count = b.s.items.count[item];
  const uint8_t(&entries)[kMost] = b.s.items.entries[item];
  const auto row_of = [&](int column) { return entries[column < count ? column : 0] / kChoices; };
  const uint32_t address = operand_address(area.x + static_cast<uint32_t>(row_of(lane % 8)) * row_bytes(kHidden));
  const int rows[2] = {row_of(2 * q), row_of(2 * q + 1)};
  float acc[4] = {};
#pragma unroll 4
  for (int i = 0; i < kGroups / 2; ++i) {
    const int group = half * (kGroups / 2) + i;
    uint32_t columns[8];
    load_group(columns, address, group);
    const float2 sum = make_float2(area.group_sums[group][rows[0]], area.group_sums[group][rows[1]]);
    const uint4 codes[1] = {codes_of(slot, group)};
    add_group<4>(acc, codes, scale_of(slot + kSlotCodes, group), columns, sum);
  }
  float4& other = area.halves[turn % 2][warp / 2][lane];
  if (half == 1) other = make_float4(acc[0], acc[1], acc[2], acc[3]);
  pair_barrier(warp);
  if (half == 1) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float factor = row_factor(b, rows[c]);
    const float gate = factor * (acc[c] + (c == 0 ? other.x : other.y));
    const float up = factor * (acc[2 + c] + (c == 0 ? other.z : other.w));
    area.units[warp / 2][2 * q + c][r] = __float2half_rn(silu(gate) * up * kHiddenScale);
  }
  __syncwarp();
  if (lane < count)
    send_tagged(&b.words.hidden[entries[lane]][tile], *reinterpret_cast<const uint4*>(area.units[warp / 2][lane]), tag);
}

// The down projection's tile of one listed expert.
__device__ __forceinline__ void multiply_down(const Block& b, int item, const std::byte* codes,
                                              const std::byte* scales) {
  const int lane = lane_id(), r = lane / 4, q = lane % 4;
  DownArea& area = b.s.area.down;
  const int count = b.s.items.count[item];
  const uint8_t(&entries)[kMost] = b.s.items.entries[item];
  const int column = lane % 8;
  const uint32_t address = operand_address(
      area.h + static_cast<uint32_t>(entries[column < count ? column : 0]) * row_bytes(token::kExpertWidth));
  float acc[4] = {};
#pragma unroll 4
  for (int group = 0; group < kDownGroups; ++group) {
    uint32_t columns[8];
    load_group(columns, address, group);
    const uint4 words[1] = {codes_of(codes, group)};
    add_group<4>(acc, words, scale_of(scales, group), columns, sum_group(columns));
  }
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (2 * q + c < count)
      *reinterpret_cast<float2*>(&area.sums[entries[2 * q + c]][2 * r]) = make_float2(acc[c], acc[2 + c]);
}

__device__ __forceinline__ void experts_phase(const Block& b, const TokenPhase& p, RingPlace& ring, float norm,
                                              bool last, RowsTags& tags) {
  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int block = static_cast<int>(blockIdx.x);
  BlockMemory& s = b.s;
  UpArea& area = s.area.up;
  tags.experts ^= 1;

  RouterGroups router;
  router.load(p.router);
  const float own_norm = p.norm[block * kTileRows + tid % kTileRows];
  if (tid < token::kExperts / 4) s.rows_of[tid] = 0;
  stage_residual(b, area.x, tags.residual);
  pair_barrier(warp);
  {
    const uint32_t address = operand_address(area.x + static_cast<uint32_t>(lane % 8) * row_bytes(kHidden));
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < RouterGroups::kCount; ++i) {
      const int group = warp * RouterGroups::kCount + i;
      uint32_t columns[8];
      load_group(columns, address, group);
      const float2 sum = sum_group(columns);
      add_group<8>(acc, router.codes[i], router.scales[i], columns, sum);
      if (lane < 4) *reinterpret_cast<float2*>(&area.group_sums[group][2 * lane]) = sum;
    }
    if (lane < 8) {
      const int which = lane / 4 * 2, column = lane % 4 * 2;
      *reinterpret_cast<float2*>(&area.router[warp][which][column]) = make_float2(acc[0], acc[1]);
      *reinterpret_cast<float2*>(&area.router[warp][which + 1][column]) = make_float2(acc[2], acc[3]);
    }
  }
  consumer_barrier();
  if (warp == 0) {  // lane 8 j + row: logit j; from lane 16 on the shared expert's gate
    const int which = lane / 8, row = lane % 8;
    float total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += area.router[i][which][row];
    total *= row_factor(b, row);
    float4 four;
    four.x = __shfl_sync(0xffffffffu, total, lane * 4);
    four.y = __shfl_sync(0xffffffffu, total, lane * 4 + 1);
    four.z = __shfl_sync(0xffffffffu, total, lane * 4 + 2);
    four.w = __shfl_sync(0xffffffffu, total, lane * 4 + 3);
    if (lane < 4 && lane % 2 * 4 < b.rows)
      send_tagged(&b.words.logits[2 * block + lane / 2][lane % 2], four, tags.experts);
    if (which == 2 && row < b.rows) s.weights[row][kExpertsPerToken] = sigmoid(total);
  } else if (warp >= 4 && warp < 4 + kMost * kTileRows / 32) {
    const int row = tid / kTileRows - kMost, output = tid % kTileRows;
    if (row < b.rows)
      b.program.a.moe_input[row * kHidden + block * kTileRows + output] =
          __float2half_rn(s.residual[row][output] * own_norm * (row_factor(b, row) / kRowScale));
  }
  {
    const int expert = tid / 2, first_row = tid % 2 * 4;
    WideWord w[1];
    receive(
        w, [&](int) { return first_row < b.rows ? &b.words.logits[expert][tid % 2] : nullptr; }, tags.experts);
    const float4 v = as_floats(w[0]);
    area.logits[first_row][expert] = v.x;
    area.logits[first_row + 1][expert] = v.y;
    area.logits[first_row + 2][expert] = v.z;
    area.logits[first_row + 3][expert] = v.w;
  }
  consumer_barrier();
  if (warp < b.rows) {
    const float* logits = area.logits[warp];
    const int id = choose_ids([&](int i) { return logits[i]; }, token::kExperts);
    const float weight = expert_weight(lane < kExpertsPerToken ? logits[id] : -INFINITY);
    if (lane < kExpertsPerToken) {
      s.ids[warp][lane] = static_cast<int16_t>(id);
      s.weights[warp][lane] = weight;
      atomicOr(&s.rows_of[id / 4], 1u << (id % 4 * 8 + warp));
      if (block == 0) {
        b.program.a.expert_ids[warp * kExpertsPerToken + lane] = id;
        b.program.a.expert_weights[warp * kExpertsPerToken + lane] = weight;
        if (lane == 0) b.program.a.shared_gate[warp] = s.weights[warp][kExpertsPerToken];
      }
    }
  }
  consumer_barrier();
  if (warp == 0) {
    list_items(b);
    if (lane == 0) barrier_arrive(&s.listed);
  }
  consumer_barrier();

  const int items = s.items.total;
  const UpShare share(items);
  pass_slots(b, ring, share.end - share.first, [&](int i, const std::byte* slot) {
    if (i % (kWarps / 2) == warp / 2)
      multiply_up(b, share.first + i, i / (kWarps / 2), slot, tags.experts);
  });
  consumer_barrier();
  {
    constexpr int kPieces = token::kExpertWidth / 8, kRounds = kMost * kChoices * kPieces / kWorkers;
    const int count = b.rows * kChoices * kPieces;
    const WideWord* from = &b.words.hidden[0][0];
    WideWord w[kRounds];
    receive(
        w, [&](int i) { return i * kWorkers + tid < count ? from + i * kWorkers + tid : nullptr; }, tags.experts);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const uint32_t at = static_cast<uint32_t>(i * kWorkers + tid);
      *reinterpret_cast<uint4*>(s.area.down.h + at / kPieces * row_bytes(token::kExpertWidth) + at % kPieces * 16) =
          make_uint4(w[i].part[0], w[i].part[1], w[i].part[2], w[i].part[3]);
    }
  }
  consumer_barrier();
  pass_slots(b, ring, down_slots(items), [&](int i, const std::byte* slot) {
    const int part = warp % kDownItems, item = i * kDownItems + part;
    if (i % (kWarps / kDownItems) == warp / kDownItems && item < items)
      multiply_down(b, item, slot + static_cast<uint32_t>(part) * (kDownGroups * kGroupCodes),
                    slot + kSlotCodes + static_cast<uint32_t>(part) * (kDownGroups * kGroupScales));
  });
  consumer_barrier();
  if (!last) tags.residual ^= 1;
  if (warp < kMost * kTileRows / 32) {
    const ResidualPlace at;
    float total = 0;
#pragma unroll
    for (int i = 0; i < kChoices; ++i)
      total = fmaf(s.weights[at.row][i], s.area.down.sums[at.row * kChoices + i][at.output], total);
    send_residual(b, at, s.residual[at.row][at.output] + total / kHiddenScale, norm, last, tags.residual);
  }
}

}  // namespace calla::cuda::rows
