#pragma once
// The rows kernel's GDN phase. A block has the same part of a layer as in the token program: 32 of a key head's 256 q and
// k channels, and for one of its two value heads 32 columns of the state with their rows of v and z; of every row.
//   Gates       a and b of all heads are four tiles of 32 groups: a block multiplies one group of one tile and sends the
//               sums; whoever needs a head's adds up its 32 groups.
//   Recurrence  a row's columns of the state come through the ring, a slot a row, and their log (state_log.h) behind them;
//               two warps a row take 64 keys each. Mostly the token goes into the log; else they leave the new state in the
//               slot, from where the storer warp sends it back while the blocks go on.
#include "backend/cuda/program/rows_linear.cuh"

namespace calla::cuda::rows {

inline constexpr uint32_t kStateBytes = kStatePartFloats * sizeof(float);
static_assert(kStateBytes + sizeof(StateLog) <= kSlotBytes);

// A block's group of the gates' tiles, in one warp's registers.
struct GateGroup {
  uint4 codes[1];
  uint2 scale;
  static constexpr int kTiles = 2 * token::kValueHeads / kTileRows;

  __device__ __forceinline__ static int tile() { return static_cast<int>(blockIdx.x) / kGroups; }
  __device__ __forceinline__ static int group() { return static_cast<int>(blockIdx.x) % kGroups; }
  __device__ __forceinline__ static size_t place(const TokenProgram& program) {
    const int column = (tile() < kTiles / 2 ? program.a_column : program.b_column) + tile() % (kTiles / 2) * kTileRows;
    return static_cast<size_t>(column / kTileRows * kGroups + group());
  }
  __device__ __forceinline__ void load(const TokenProgram& program, const TokenPhase& p, int lane) {
    codes[0] = load_stream(p.weights.codes + place(program) * 32 + lane);
    scale = load_stream(p.weights.scales + place(program) * 8 + lane / 4);
  }
  __device__ __forceinline__ void multiply_and_send(const Block& b, const std::byte* x, uint32_t tag) const {
    uint32_t columns[8];
    load_group(columns, operand_address(x + static_cast<uint32_t>(b.lane % 8) * row_bytes(kHidden), b.lane), group());
    float acc[4] = {};
    add_group<4>(acc, codes, scale, columns, sum_group(columns));
    const int r = b.lane / 4, q = b.lane % 4;
    if (2 * q < b.rows)
      send_tagged(&b.words.gates[tile()][r][q][group()], make_float4(acc[0], acc[2], acc[1], acc[3]), tag);
  }
};

// Warps 0..7: the head's a (warps 0..3) and b (4..7) of two rows each; decay and beta once all are there.
__device__ __forceinline__ void receive_gates(const Block& b, const TokenPhase& p, const GdnPart& at, uint32_t tag) {
  const int warp = b.warp, lane = b.lane, q = warp % 4;
  if (2 * q >= b.rows) return;
  const bool is_b = warp >= 4;
  const float rate = load_early(p.decay_rate + at.head), dt_bias = load_early(p.dt_bias + at.head);
  const int tile = (is_b ? GateGroup::kTiles / 2 : 0) + at.key_head / 8;
  const float4 w = as_floats(receive(&b.words.gates[tile][at.key_head % 8][q][lane], tag));
  const bool second = at.rank >= 4;  // head of the key head
  const float first_row = sum_lanes(second ? w.y : w.x), second_row = sum_lanes(second ? w.w : w.z);
  const int row = 2 * q + lane;
  if (lane >= 2 || row >= b.rows) return;
  const float gate = row_factor(b, row) * (lane == 0 ? first_row : second_row);
  GdnArea& area = b.s.area.gdn;
  if (is_b) {
    area.beta[row] = sigmoid(gate);
  } else {
    const float biased = gate + dt_bias, softplus = biased > 20 ? biased : log1pf(expf(biased));
    area.decay[row] = expf(-rate * softplus);
  }
  if (at.part == 0)
    b.program.a
        .projected[b.at(row, b.program.projected_width) + (is_b ? b.program.b_column : b.program.a_column) + at.head] =
        gate;
}

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// The delta rule on a row's columns of the state, by a pair of warps, in place: a slot is [key][32 columns]. Returns whether
// the state is to be written; else the token is in its log.
__device__ __forceinline__ bool recur(const Block& b, const TokenPhase& p, const GdnPart& at, std::byte* slot,
                                      bool last, uint32_t tag) {
  constexpr int kKeys = kGdnHeadDim / 2 / 4;  // of a thread, every fourth of its warp's
  const int warp = b.warp, lane = b.lane, row = warp / 2;
  const int quad = lane % 8, first_key = warp % 2 * (kGdnHeadDim / 2) + lane / 8;
  const int block = static_cast<int>(blockIdx.x);
  GdnArea& area = b.s.area.gdn;
  auto* const s = reinterpret_cast<float4*>(slot) + first_key * (kColumns / 4) + quad;
  const float4 norm = load_early(reinterpret_cast<const float4*>(p.gdn_norm + at.part * kColumns + quad * 4));
  const float* const q = area.qk[row];
  const float* const k = area.qk[row] + kGdnHeadDim;

  float4 memory_sum = make_float4(0, 0, 0, 0), out_sum = memory_sum;
#pragma unroll 4
  for (int i = 0; i < kKeys; ++i) {
    const float4 v = s[i * kColumns];
    memory_sum = fma4(v, k[first_key + i * 4], memory_sum);
    out_sum = fma4(v, q[first_key + i * 4], out_sum);
  }
#pragma unroll
  for (int offset = 8; offset < 32; offset *= 2) {
    memory_sum = add_lane(memory_sum, offset);
    out_sum = add_lane(out_sum, offset);
  }
  if (lane < 8) {
    area.columns[warp][quad * 2] = memory_sum;
    area.columns[warp][quad * 2 + 1] = out_sum;
  }
  const float4 x = reinterpret_cast<const float4*>(k)[lane], y = reinterpret_cast<const float4*>(q)[lane];
  const float kk = sum_lanes(dot4(x, x)), qq = sum_lanes(dot4(y, y)), kq = sum_lanes(dot4(x, y));
  // What the log adds to both sums, the last token first; `kept`: what is left since of a token's change, and at last of the
  // state in memory.
  const StateLog& log = *reinterpret_cast<const StateLog*>(slot + kStateBytes);
  const int count = b.program.keeps_logs ? log.entries[0].count : 0;
  float4 memory_log = make_float4(0, 0, 0, 0), out_log = memory_log;
  float kept = 1;
#pragma unroll 1
  for (int i = count - 1; i >= 0; --i) {
    const StateLogEntry& e = log.entries[i];
    const float4 logged_key = reinterpret_cast<const float4*>(e.key)[lane];
    const float4 logged_change = reinterpret_cast<const float4*>(e.change)[quad];
    memory_log = fma4(logged_change, kept * sum_lanes(dot4(logged_key, x)), memory_log);
    out_log = fma4(logged_change, kept * sum_lanes(dot4(logged_key, y)), out_log);
    kept *= e.decay;
  }
  pair_barrier(warp);
  const float4(&halves)[2][kColumns / 2] = *reinterpret_cast<const float4(*)[2][kColumns / 2]>(area.columns[row * 2]);
  memory_sum = fma4(add4(halves[0][quad * 2], halves[1][quad * 2]), kept, memory_log);
  out_sum = fma4(add4(halves[0][quad * 2 + 1], halves[1][quad * 2 + 1]), kept, out_log);

  const float k_scale = rsqrtf(kk + 1e-6f), q_scale = rsqrtf(qq + 1e-6f) * 0.08838834764831845f;  // 1 / sqrt(128)
  const float decay = area.decay[row], beta = area.beta[row];
  // The change of a column along k before its l2 norm, and its read-out.
  const float4 value = reinterpret_cast<const float4*>(area.values[row])[quad];
  const float step = k_scale * beta, keep = -decay * k_scale;
  const float4 change = make_float4(step * fmaf(keep, memory_sum.x, value.x), step * fmaf(keep, memory_sum.y, value.y),
                                    step * fmaf(keep, memory_sum.z, value.z), step * fmaf(keep, memory_sum.w, value.w));
  const float4 out =
      make_float4(q_scale * fmaf(decay, out_sum.x, kq * change.x), q_scale * fmaf(decay, out_sum.y, kq * change.y),
                  q_scale * fmaf(decay, out_sum.z, kq * change.z), q_scale * fmaf(decay, out_sum.w, kq * change.w));
  const float squares = sum_lanes<8>(out.x * out.x + out.y * out.y + out.z * out.z + out.w * out.w);
  const float scale = rsqrtf(squares / kColumns + kLocalEps);
  const float4 z = reinterpret_cast<const float4*>(area.z_gates[row])[quad];
  const uint32_t low = pack_half2(out.x * scale * norm.x * z.x, out.y * scale * norm.y * z.y);
  const uint32_t high = pack_half2(out.z * scale * norm.z * z.z, out.w * scale * norm.w * z.w);
  const uint32_t next_low = __shfl_down_sync(0xffffffffu, low, 1), next_high = __shfl_down_sync(0xffffffffu, high, 1);
  if (warp % 2 == 0) {
    // The tag's bit is zero for those who receive it; so it is in the slot.
    const uint4 word = make_uint4(low, high, next_low, untagged(next_high));
    if (lane < 8 && lane % 2 == 0) send_tagged(&b.words.mixed[row][block * 4 + lane / 2], word, tag);
    if (lane == 0) send_tagged(&b.words.mixed_squares[row][block], squares, tag);
    if (last) {
      float other[1];
      receive(
          other, [&](int) { return &b.words.mixed_squares[row][block / 4 * 4 + lane % 4]; }, tag);
      const __half2 factor = __float2half2_rn(scale_of_squares(squares, sum_lanes<4>(other[0]), b.program.eps));
      if (lane < 8 && lane % 2 == 0)
        *reinterpret_cast<uint4*>(b.program.a.mixed + b.at(row, kMixed) + block * kColumns + lane * 4) =
            make_uint4(multiply_halves(word.x, factor), multiply_halves(word.y, factor),
                       multiply_halves(word.z, factor), multiply_halves(word.w, factor));
    }
  }
  // The log or the state last: the exchange would queue up behind it.
  if (b.program.keeps_logs) {
    StateLog& to = p.log[b.s.log_at[row] + static_cast<size_t>(block)];
    if (count < kLogTokens) {
      if (warp % 2 == 0) {
        reinterpret_cast<float4*>(to.entries[count].key)[lane] = x;
        if (lane == 0) to.entries[count].decay = decay;
      } else {
        if (lane < 8) reinterpret_cast<float4*>(to.entries[count].change)[quad] = change;
        if (lane == 0) to.entries[0].count = count + 1;
      }
      return false;
    }
    if (warp % 2 == 0 && lane == 0) to.entries[0].count = 0;
    // In place: first what the log has, then this token.
    float4 logged_change[kLogTokens];
    float left = decay;
#pragma unroll
    for (int i = kLogTokens - 1; i >= 0; --i) {
      logged_change[i] =
          fma4(reinterpret_cast<const float4*>(log.entries[i].change)[quad], left, make_float4(0, 0, 0, 0));
      left *= log.entries[i].decay;
    }
#pragma unroll 2
    for (int i = 0; i < kKeys; ++i) {
      const int key = first_key + i * 4;
      float4 v = fma4(s[i * kColumns], left, make_float4(0, 0, 0, 0));
#pragma unroll
      for (int j = 0; j < kLogTokens; ++j) v = fma4(logged_change[j], log.entries[j].key[key], v);
      s[i * kColumns] = fma4(change, k[key], v);
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const float4 v = s[i * kColumns];
      const float4 rest = make_float4(decay * v.x, decay * v.y, decay * v.z, decay * v.w);
      s[i * kColumns] = fma4(change, k[first_key + i * 4], rest);
    }
  }
  fence_async_proxy();
  return true;
}

__device__ __forceinline__ void gdn_phase(const Block& b, const TokenPhase& p, RingPlace& ring, bool last,
                                          RowsTags& tags) {
  const int warp = b.warp, lane = b.lane, chunk = warp / 2;
  const GdnPart at;
  GdnArea& area = b.s.area.gdn;
  tags.turn(WordKind::kGdn);
  tags.turn(WordKind::kMixed);
  const bool has_gates = warp == GateGroup::group() / kChunkGroups * 2;
  GateGroup gates;
  if (has_gates) gates.load(b.program, p, lane);
  // A warp convolves a row's 32 channels of q or k (warps 0..7) or of v.
  const int row = warp % kMost, span = warp / kMost;
  const int column = at.first_column(span, b.program.z_column) + lane;
  float* const tail = p.state + b.s.state_at[row] + kStateFloats + column;
  // Before this phase's rows are handed to the storer (barriers lie between), it must have done with those of the GDN phase
  // in front, if there is one.
  if (b.tid == 0) barrier_wait(&b.s.stored, tags.of(WordKind::kGdn) ^ b.s.first_gdn_tag);
  stage_residual(b, area.x, tags.of(WordKind::kResidual));
  // What is needed later and comes from far.
  float old[3] = {};
  float4 taps = make_float4(0, 0, 0, 0);
  if (row < b.rows) {
#pragma unroll
    for (int i = 0; i < 3; ++i) old[i] = load_early(tail + i * kChannels);
    taps = load_early(reinterpret_cast<const float4*>(p.conv + column * 4));
  }
  pair_barrier(warp);
  if (has_gates) gates.multiply_and_send(b, area.x, tags.of(WordKind::kGdn));
  {
    ChunkColumns x;
    x.load(area.x + static_cast<uint32_t>(lane % 8) * row_bytes(kHidden), chunk, lane);
    pass_slots(b, ring, kGdnTiles, [&](int i, const std::byte* slot) {
      if (i % 2 == warp % 2) multiply_unit(area.units[i][chunk], slot, chunk, x, lane);
    });
  }
  consumer_barrier();

  // What follows from each output alone.
  if (row < b.rows) {
    const float factor = row_factor(b, row);
    const auto output = [&](int of) {
      return factor * sum_units<kChunks>(area.units[of * 2 + lane / kTileRows], row, lane % kTileRows);
    };
    float* const projected = b.program.a.projected + b.at(row, b.program.projected_width);
    const float out = output(span);
    const float c = silu(taps.x * old[0] + taps.y * old[1] + taps.z * old[2] + taps.w * out);
    if (span == 0) {
      float4 four;  // of lanes 4 l .. 4 l + 3
      four.x = __shfl_sync(0xffffffffu, c, lane * 4);
      four.y = __shfl_sync(0xffffffffu, c, lane * 4 + 1);
      four.z = __shfl_sync(0xffffffffu, c, lane * 4 + 2);
      four.w = __shfl_sync(0xffffffffu, c, lane * 4 + 3);
      if (lane < 8) send_tagged(&b.words.qk[at.key_head][row][at.rank * 8 + lane], four, tags.of(WordKind::kGdn));
    } else {
      area.values[row][lane] = c;
      const float z = output(2);
      area.z_gates[row][lane] = silu(z);
      projected[at.first_column(2, b.program.z_column) + lane] = z;
    }
    tail[0] = old[1];
    tail[kChannels] = old[2];
    tail[2 * kChannels] = out;
    projected[column] = out;
  }
  if (span == 0) {
    receive_gates(b, p, at, tags.of(WordKind::kGdn));
  } else if (row < b.rows) {
    WideWord w[2];
    receive<32>(w, &b.words.qk[at.key_head][row][lane], 2, tags.of(WordKind::kGdn));
#pragma unroll
    for (int i = 0; i < 2; ++i) reinterpret_cast<float4*>(area.qk[row])[i * 32 + lane] = as_floats(w[i]);
  }
  consumer_barrier();
#pragma unroll 1
  for (int i = 0; i < b.rows; ++i) {
    wait_full(b, ring);
    const bool mine = i == warp / 2;
    const bool written = mine && recur(b, p, at, b.slot(ring.slot), last, tags.of(WordKind::kMixed));
    __syncwarp();
    if (lane == 0) {
      if (mine) {
        b.s.state_slot[i] = written ? ring.slot : -1;  // both warps of the pair the same
        barrier_arrive(&b.s.updated[i]);
      }
      if (!written) barrier_arrive(&b.s.empty[ring.slot]);
    }
    ring.advance();
  }
}

}  // namespace calla::cuda::rows
