#pragma once
// The rows kernel's expert phase: RMSNorm, router, choice, gate and up projections with SwiGLU, down projections.
//   Router  a block computes two logits of every row, a warp 128 inputs. Every block chooses, a warp a row, and makes the
//           list of distinct experts, each with the rows that chose it.
//   Shared  meanwhile the other half of the warps multiplies a tile of the shared expert.
//   Up      the tiles of all listed experts in a row, each to the block that is ready for it; two warps have a chunk of
//           inputs.
//   Down    a block takes the tile of its 16 outputs of all listed experts; a warp takes half of an expert's inputs.
#include "backend/cuda/program/rows_block.cuh"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda::rows {

inline constexpr int kUpTiles = token::kExpertWidth / 8;  // of an expert

// The chosen experts' up tiles, counted from the second item on (the first is the shared expert). A block takes its first
// tiles by its place; the others go one by one to whoever is ready, since some processors have a slower way to memory:
// `next_tile` counts on by one for each of these, and by one for each block that finds none left.
struct UpTiles {
  static constexpr int kGiven = 4;  // tiles of a block by its place
  int total, shared_out;
  __device__ __forceinline__ explicit UpTiles(int items)
      : total((items - 1) * kUpTiles), shared_out(max(0, total - kGiven * kBlocks)) {}
  __device__ __forceinline__ uint32_t counted() const { return static_cast<uint32_t>(shared_out + kBlocks); }
};
inline constexpr int kNoTile = -1;  // in tile_of: there is none any more
// Two blocks have a tile of the shared expert's up projection, and send the hidden units of half of the rows each.
__device__ __forceinline__ int shared_up_tile() { return static_cast<int>(blockIdx.x) / 2; }
static_assert(kUpTiles * 2 == kBlocks);
__device__ __forceinline__ int down_slots(int items) { return (items + kDownItems - 1) / kDownItems; }

// A warp's two groups of the block's two logits (fragment row 0 and 8) and of the shared expert's gate (row 1).
struct RouterGroups {
  static constexpr int kCount = kGroups / kWarps;
  uint4 codes[kCount][2];
  uint2 scales[kCount];

  __device__ __forceinline__ void load(const TokenMatrix& w, int warp, int lane) {
    const int block = static_cast<int>(blockIdx.x);
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

// Stores a thread's eight neighbouring fp16 inputs, of piece `piece` of a row, as fixed point (fixed_row.cuh). All lanes of
// a warp call it.
__device__ __forceinline__ void store_fixed(const FixedRow& to, int piece, uint4 v) {
  const __half2 h[4] = {*reinterpret_cast<const __half2*>(&v.x), *reinterpret_cast<const __half2*>(&v.y),
                        *reinterpret_cast<const __half2*>(&v.z), *reinterpret_cast<const __half2*>(&v.w)};
  const __half2 most =
      __hmax2_nan(__hmax2_nan(__habs2(h[0]), __habs2(h[1])), __hmax2_nan(__habs2(h[2]), __habs2(h[3])));
  float top = __half2float(__hmax_nan(__low2half(most), __high2half(most)));
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) top = max_or_nan(top, __shfl_xor_sync(0xffffffffu, top, offset));
  const float inverse = __fdividef(kLargestFixed, top);
  // Sixteen inputs are two neighbours' eight: pair q of each is one operand word. An even thread makes those of q = 0 and
  // 1, an odd one of 2 and 3.
  const bool odd = piece % 2 != 0;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.z, 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? v.y : v.w, 1);
  const FixedInputs inputs[2] = {{unpack_half2(odd ? a : v.x), unpack_half2(odd ? v.z : a)},
                                 {unpack_half2(odd ? b : v.y), unpack_half2(odd ? v.w : b)}};
  auto* words = reinterpret_cast<uint32_t*>(to.operands) + piece / 8 * 32 + (odd ? 8 : 0) + piece / 2 % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t high, low;
    split_fixed(inputs[i], inverse, high, low);
    words[i * 4] = high;
    words[i * 4 + 16] = low;
  }
  if (piece % 8 == 0) to.factors[piece / 8] = top * (1 / kLargestFixed);
}

// One warp: the list of experts from every row's choice, the shared expert first. A lane takes two choices.
__device__ __forceinline__ void list_items(const Block& b) {
  Items& items = b.s.items;
  const int lane = b.lane;
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

__device__ __forceinline__ float hidden_unit(float gate, float up, float factor) {
  return silu(factor * gate) * (factor * up) * kHiddenScale;
}

// Warps 8..15: the shared expert's tile, while the others choose.
__device__ __forceinline__ void shared_up(const Block& b, RingPlace& ring, uint32_t tag) {
  constexpr int kHalf = kWarps / 2;
  const auto half_barrier = [] { asm volatile("bar.sync 10, %0;" ::"n"(kHalf * 32) : "memory"); };
  const int warp = b.warp - kHalf, lane = b.lane, block = static_cast<int>(blockIdx.x);
  UpArea& area = b.s.area.up;
  {
    ChunkColumns x;
    x.load(area.x + static_cast<uint32_t>(lane % 8) * row_bytes(kHidden), warp, lane);
    pass_slots(b, ring, 1,
               [&](int, const std::byte* slot) { multiply_unit(area.shared_units[warp], slot, warp, x, lane); });
  }
  half_barrier();  // all chunks' sums are there
  if (warp != 0) return;
  const int row = block % 2 * (kMost / 2) + lane / 8, r = lane % 8;
  float gate = 0, up = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const float2 sum = *reinterpret_cast<const float2*>(&area.shared_units[c][row * kUnitStride + 2 * r]);
    gate += sum.x;
    up += sum.y;
  }
  area.hidden[b.warp][lane / 8][r] = __float2half_rn(hidden_unit(gate, up, row_factor(b, row)));
  __syncwarp();
  if (r == 0 && row < b.rows)
    send_tagged(&b.words.hidden[row * kChoices + kExpertsPerToken][shared_up_tile()],
                *reinterpret_cast<const uint4*>(area.hidden[b.warp][lane / 8]), tag);
}

// The rows as fixed point, in the place of x, while the first tiles come: a thread takes eight inputs of four rows;
// eight neighbours hold a group. Begins and ends with a barrier.
__device__ __forceinline__ void make_fixed(const Block& b) {
  UpArea& area = b.s.area.up;
  constexpr int kEach = kMost / 2;
  const int piece = b.tid % (kHidden / 8), first = b.tid / (kHidden / 8) * kEach;
  uint4 v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    v[i] = *reinterpret_cast<const uint4*>(area.x + static_cast<uint32_t>(first + i) * row_bytes(kHidden) +
                                           static_cast<uint32_t>(piece) * 16);
  consumer_barrier();  // x has been read
#pragma unroll
  for (int i = 0; i < kEach; ++i) store_fixed(area.row(first + i), piece, v[i]);
  consumer_barrier();
}

// A batch's hidden units: a warp has one column of its tiles (the batches take turns with the warps), a lane a unit; from
// the sums of the units of work, to all blocks.
__device__ __forceinline__ void send_hidden(const Block& b, const float (*units)[kChunks][kMost][kTileRows],
                                            const int* tiles, int column, uint32_t tag) {
  const int lane = b.lane, r = lane % 8;
  UpArea& area = b.s.area.up;
  const Items& items = b.s.items;
  const auto entry_of = [&](int tile) {  // or -1
    const int item = 1 + tile / kUpTiles;
    return tile != kNoTile && column < items.count[item] ? items.entries[item][column] : -1;
  };
  const int entry = entry_of(tiles[lane / 8]);
  if (entry >= 0) {
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 v = *reinterpret_cast<const float2*>(&units[lane / 8][c][column][2 * r]);
      sum.x += v.x;
      sum.y += v.y;
    }
    area.hidden[b.warp][lane / 8][r] = __float2half_rn(hidden_unit(sum.x, sum.y, row_factor(b, entry / kChoices)));
  }
  __syncwarp();
  if (lane >= kUpBatch) return;
  const int tile = tiles[lane], to = entry_of(tile);
  if (to >= 0)
    send_tagged(&b.words.hidden[to][tile % kUpTiles], *reinterpret_cast<const uint4*>(area.hidden[b.warp][lane]), tag);
}

// Gate and up projections of the block's tiles: a warp has one chunk of every second tile. Most experts have one row, of
// which fixed_row.cuh makes the least work; several come one after the other.
__device__ __forceinline__ void up_products(const Block& b, RingPlace& ring, uint32_t tag) {
  UpArea& area = b.s.area.up;
  const Items& items = b.s.items;
  const int chunk = b.warp / 2;
  bool more = true;
#pragma unroll 1
  for (int batch = 0; more; ++batch) {
    auto* const units = area.units[batch % 2];
    int* const tiles = area.tiles[batch % 2];
#pragma unroll 1
    for (int i = 0; i < kUpBatch; ++i) {
      int tile = kNoTile;
      if (more) {
        pass_slots(b, ring, 1, [&](int, const std::byte* slot) {
          tile = b.s.tile_of[ring.slot];
          if (tile == kNoTile || i % 2 != b.warp % 2) return;
          const int item = 1 + tile / kUpTiles, count = items.count[item];
          FixedUnit unit;
          unit.load(slot + static_cast<uint32_t>(chunk * kChunkGroups) * kGroupCodes,
                    slot + kSlotCodes + static_cast<uint32_t>(chunk * kChunkGroups) * kGroupScales);
#pragma unroll 1
          for (int column = 0; column < count; ++column) {
            const FixedChunk x(area.row(items.entries[item][column] / kChoices), chunk);
            store_fixed_unit(units[i][chunk][column], scale_fixed(multiply_fixed(unit, x), unit.scale, x));
          }
        });
        more = tile != kNoTile;
      }
      if (b.tid == 0) tiles[i] = tile;
    }
    consumer_barrier();
    const int column = (b.warp - batch) & (kWarps - 1);
    if (column < kMost) send_hidden(b, units, tiles, column, tag);
  }
}

// A half of the down projection's tile of one listed expert, for one or two rows: one row would use one of the product's
// eight columns. Instead a column has one of the chunk's four groups of one of the two rows, so the operand is loaded once;
// of the sums of group g only columns 2 g and 2 g + 1 mean something, and lane 4 r + q keeps those of group q.
__device__ __forceinline__ void multiply_down_two(const Block& b, int first, int second, int chunk,
                                                  const std::byte* codes, const std::byte* scales) {
  const int lane = b.lane, r = lane / 4, q = lane % 4;
  HiddenRow(&h)[kMost * kChoices] = b.s.area.down.h;
  // The lane names the row and group of column lane % 8; ldmatrix gives it column lane / 4.
  uint32_t columns[8];
  load_group(columns, operand_address(h[lane % 2 == 0 ? first : second].units, lane),
             chunk * kChunkGroups + lane % 8 / 2);
  float c[kChunkGroups][4] = {};
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const uint4 words = codes_of(codes, chunk * kChunkGroups + g, lane);
    uint32_t a[4];
    expand_step(words.x, a), mma_f16(c[g], a, columns[0], columns[1]);
    expand_step(words.y, a), mma_f16(c[g], a, columns[2], columns[3]);
    expand_step(words.z, a), mma_f16(c[g], a, columns[4], columns[5]);
    expand_step(words.w, a), mma_f16(c[g], a, columns[6], columns[7]);
  }
  const int group = chunk * kChunkGroups + q;
  const uint2 scale = scale_of(scales, group, r);
  const float low = low_bf16(scale.x), low_bias = fmaf(-1024.0f, low, high_bf16(scale.x));
  const float high = 0.0625f * low_bf16(scale.y), high_bias = fmaf(-1024.0f, high, high_bf16(scale.y));
  const float2 row_sum = sum_group(columns);  // of group q
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float own = q < 2 ? (q == 0 ? c[0][i] : c[1][i]) : (q == 2 ? c[2][i] : c[3][i]);
    sums[i] = sum_lanes<4>(
        fmaf(i < 2 ? low : high, own, (i < 2 ? low_bias : high_bias) * (i % 2 == 0 ? row_sum.x : row_sum.y)));
  }
  __syncwarp();  // this half of the rows has been read
  if (q == 0) {
    *reinterpret_cast<float2*>(h[first].sums[chunk] + 2 * r) = make_float2(sums[0], sums[2]);
    if (second != first) *reinterpret_cast<float2*>(h[second].sums[chunk] + 2 * r) = make_float2(sums[1], sums[3]);
  }
}
// For up to eight rows: a column each.
__device__ __forceinline__ void multiply_down_many(const Block& b, const uint8_t (&entries)[kMost], int count,
                                                   int chunk, const std::byte* codes, const std::byte* scales) {
  const int lane = b.lane, r = lane / 4, q = lane % 4;
  HiddenRow(&h)[kMost * kChoices] = b.s.area.down.h;
  const auto entry = [&](int column) { return entries[column < count ? column : 0]; };
  const uint32_t address = operand_address(h[entry(lane % 8)].units, lane);
  float acc[4] = {};
#pragma unroll
  for (int g = 0; g < kChunkGroups; ++g) {
    const int group = chunk * kChunkGroups + g;
    uint32_t x[8];
    load_group(x, address, group);
    const uint4 words[1] = {codes_of(codes, group, lane)};
    add_group<4>(acc, words, scale_of(scales, group, r), x, sum_group(x));
  }
  __syncwarp();
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (2 * q + c < count)
      *reinterpret_cast<float2*>(h[entry(2 * q + c)].sums[chunk] + 2 * r) = make_float2(acc[c], acc[2 + c]);
}
__device__ __forceinline__ void multiply_down(const Block& b, int item, int chunk, const std::byte* codes,
                                              const std::byte* scales) {
  const int count = b.s.items.count[item];
  const uint8_t(&entries)[kMost] = b.s.items.entries[item];
  if (count <= 2) {
    multiply_down_two(b, entries[0], entries[count - 1], chunk, codes, scales);
  } else {
    multiply_down_many(b, entries, count, chunk, codes, scales);
  }
}

// Receives all rows' hidden units. Ends with a barrier.
__device__ __forceinline__ void stage_hidden(const Block& b, uint32_t tag) {
  constexpr int kPieces = token::kExpertWidth / 8, kRounds = kMost * kChoices * kPieces / kWorkers;
  HiddenRow(&h)[kMost * kChoices] = b.s.area.down.h;
  const int count = b.rows * kChoices * kPieces;
  const WideWord* from = &b.words.hidden[0][0];
  WideWord w[kRounds];
  receive<kWorkers>(w, from + b.tid, (count - b.tid + kWorkers - 1) / kWorkers, tag);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int at = i * kWorkers + b.tid;
    reinterpret_cast<uint4*>(h[at / kPieces].units)[at % kPieces] =
        make_uint4(w[i].part[0], w[i].part[1], w[i].part[2], w[i].part[3]);
  }
  consumer_barrier();
}

// Warps 0..7: receive the logits, choose a row's experts each, and make the list.
__device__ __forceinline__ void choose(const Block& b, uint32_t tag) {
  constexpr int kHalf = kWarps / 2;
  const auto half_barrier = [] { asm volatile("bar.sync 11, %0;" ::"n"(kHalf * 32) : "memory"); };
  const int warp = b.warp, lane = b.lane;
  BlockMemory& s = b.s;
  UpArea& area = s.area.up;
  WideWord w[2];  // rows 0..3 and 4..7 of an expert
  receive<1>(w, b.words.logits[b.tid], (b.rows + 3) / 4, tag);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 v = as_floats(w[i]);
    area.logits[4 * i][b.tid] = v.x;
    area.logits[4 * i + 1][b.tid] = v.y;
    area.logits[4 * i + 2][b.tid] = v.z;
    area.logits[4 * i + 3][b.tid] = v.w;
  }
  half_barrier();
  if (warp < b.rows) {
    const float* logits = area.logits[warp];
    const int id = choose_ids([&](int i) { return logits[i]; }, token::kExperts);
    const float weight = expert_weight(lane < kExpertsPerToken ? logits[id] : -INFINITY);
    if (lane < kExpertsPerToken) {
      s.ids[warp][lane] = static_cast<int16_t>(id);
      s.weights[warp][lane] = weight;
      atomicOr(&s.rows_of[id / 4], 1u << (id % 4 * 8 + warp));
      if (blockIdx.x == 0) {
        b.program.a.expert_ids[b.at(warp, kExpertsPerToken) + lane] = id;
        b.program.a.expert_weights[b.at(warp, kExpertsPerToken) + lane] = weight;
        if (lane == 0) b.program.a.shared_gate[b.at(warp, 1)] = s.weights[warp][kExpertsPerToken];
      }
    }
  }
  half_barrier();
  if (warp == 0) {
    list_items(b);
    if (lane == 0) barrier_arrive(&s.listed);
  }
}

__device__ __forceinline__ void experts_phase(const Block& b, const TokenPhase& p, RingPlace& ring, bool last,
                                              RowsTags& tags) {
  const int tid = b.tid, warp = b.warp, lane = b.lane;
  const int block = static_cast<int>(blockIdx.x);
  BlockMemory& s = b.s;
  UpArea& area = s.area.up;
  tags.turn(WordKind::kExperts);

  RouterGroups router;
  router.load(p.router, warp, lane);
  const float own_norm = load_early(p.norm + block * kTileRows + tid % kTileRows);
  if (tid < token::kExperts / 4) s.rows_of[tid] = 0;
  stage_residual(b, area.x, tags.of(WordKind::kResidual));
  pair_barrier(warp);
  {
    const uint32_t address = operand_address(area.x + static_cast<uint32_t>(lane % 8) * row_bytes(kHidden), lane);
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < RouterGroups::kCount; ++i) {
      const int group = warp * RouterGroups::kCount + i;
      uint32_t columns[8];
      load_group(columns, address, group);
      add_group<8>(acc, router.codes[i], router.scales[i], columns, sum_group(columns));
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
      send_tagged(&b.words.logits[2 * block + lane / 2][lane % 2], four, tags.of(WordKind::kExperts));
    if (which == 2 && row < b.rows) s.weights[row][kExpertsPerToken] = sigmoid(total);
  } else if (warp >= 4 && warp < 4 + kMost * kTileRows / 32) {
    const int row = tid / kTileRows - kMost, output = tid % kTileRows;
    if (row < b.rows)
      b.program.a.moe_input[b.at(row, kHidden) + block * kTileRows + output] =
          __float2half_rn(s.residual[row][output] * own_norm * (row_factor(b, row) / kRowScale));
  }
  if (b.tid == 0) barrier_arrive(&s.calm);
  if (warp >= kWarps / 2) {
    shared_up(b, ring, tags.of(WordKind::kExperts));
  } else {
    choose(b, tags.of(WordKind::kExperts));
    pass_slots(b, ring, 1, [](int, const std::byte*) {});
  }
  make_fixed(b);
  up_products(b, ring, tags.of(WordKind::kExperts));
  consumer_barrier();
  stage_hidden(b, tags.of(WordKind::kExperts));
  const int items = s.items.total;
  pass_slots(b, ring, down_slots(items), [&](int i, const std::byte* slot) {
    const int part = warp / kDownChunks % kDownItems, item = i * kDownItems + part;
    if (i % 2 == warp / (kWarps / 2) && item < items)
      multiply_down(b, item, warp % kDownChunks, slot + static_cast<uint32_t>(part) * (kDownGroups * kGroupCodes),
                    slot + kSlotCodes + static_cast<uint32_t>(part) * (kDownGroups * kGroupScales));
  });
  consumer_barrier();
  if (b.tid == 0) s.first_tile += UpTiles(items).counted();  // the producer has read it, else there were no down slots
  if (!last) tags.turn(WordKind::kResidual);
  if (warp < kMost * kTileRows / 32) {
    const ResidualPlace at(b.tid);
    float total = 0;
#pragma unroll
    for (int i = 0; i < kChoices; ++i) {
      const auto& sums = s.area.down.h[at.row * kChoices + i].sums;
      total = fmaf(s.weights[at.row][i], sums[0][at.output] + sums[1][at.output], total);
    }
    send_residual(b, at, s.residual[at.row][at.output] + total / kHiddenScale, last, tags.of(WordKind::kResidual));
  }
}

}  // namespace calla::cuda::rows
