#pragma once
// The decode kernels' second form, for GPUs with bulk copies (Hopper and later): weights wait in shared memory.
//
// A block lives on one multiprocessor, takes a share of the tiles and has one producer warp, which starts bulk copies of
// their codes and scales at once, before the activations exist: with programmatic dependent launch the weights of the
// next kernels stream in while this one still computes, at no cost in registers. The consumer warps wait for the
// activations, stage them once a multiprocessor, and share out the units: four groups of one tile each.
//
// Arithmetic as in gemv.cuh; see UnitInput for how one row fills the tensor cores' columns.
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/wgmma.cuh"

namespace calla::cuda {

inline constexpr int kStreamWarps = 16;
inline constexpr int kStreamConsumers = kStreamWarps * 32;
inline constexpr int kStreamThreads = kStreamConsumers + 32;  // and the producer warp
inline constexpr int kMaxSlots = 10;

// Tiles in flight: slot i holds a tile's codes, then its scales.
struct TileRing {
  uint64_t full[kMaxSlots];
  uint64_t empty[kMaxSlots];

  // One thread; a block barrier must follow. A slot is empty again when its `units` have been multiplied.
  __device__ void init(int units) {
    for (int i = 0; i < kMaxSlots; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], static_cast<uint32_t>(units));
    }
    fence_async_proxy();
  }
};

// The barrier of the consumer warps alone.
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kStreamConsumers) : "memory");
}

// Stores inputs [4 c, 4 c + 4) of a column; sixteen neighbouring lanes hold one group (see StagedInput).
template <int kCols>
__device__ __forceinline__ void store4(const StagedInput<kCols>& to, int c, int col, float4 v, bool valid) {
  const uint32_t low = pack_half2(v.x, v.y), high = pack_half2(v.z, v.w);
  const float2 a = unpack_half2(low), b = unpack_half2(high);
  const float sum = sum_lanes<16>((a.x + a.y) + (b.x + b.y));
  if (!valid) return;
  const auto u = static_cast<unsigned>(c);
  const unsigned group = u / 16, step = u % 16 / 4, upper = u % 4 / 2, q = u % 2 * 2;
  auto* words = reinterpret_cast<uint32_t*>(to.pieces + ((group * 2 + step / 2) * kCols + col) * 4);
  words[q * 4 + (step % 2) * 2 + upper] = low;
  words[(q + 1) * 4 + (step % 2) * 2 + upper] = high;
  if (u % 16 == 0) to.sums[group * kCols + col] = sum;
}

__device__ __forceinline__ float4 load_row4(const float* x) { return __ldcg(reinterpret_cast<const float4*>(x)); }
__device__ __forceinline__ float4 load_row4(const __half* x) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(x));
  const float2 a = unpack_half2(v.x), b = unpack_half2(v.y);
  return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ int padded_pieces(int k) {
  constexpr int kChunk = kChunkGroups * kGroup;
  return (k + kChunk - 1) / kChunk * (kChunk / 4);
}

// Staging of one row of k elements by all consumers, with zeros up to whole chunks of groups. The norm's weights are
// read before the activations exist: they come from memory and would cost a microsecond after the wait.
template <bool kNormed>
class RowStager {
 public:
  __device__ __forceinline__ RowStager(int k, const float* norm) : k_(k), norm_(norm) {
    if constexpr (kNormed) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        if (valid(i)) norm_weights_[i] = *reinterpret_cast<const float4*>(norm + piece(i) * 4);
    }
  }

  template <int kCols, class T>
  __device__ __forceinline__ void stage(const StagedInput<kCols>& to, int col, const T* x, float eps, float* scratch,
                                        __half* normed_out) {
    float4 v[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) v[i] = valid(i) ? load_row4(x + piece(i) * 4) : make_float4(0, 0, 0, 0);
    float scale = 1;
    if constexpr (kNormed) {
      float sum = 0;
#pragma unroll
      for (const float4& e : v) sum += e.x * e.x + e.y * e.y + e.z * e.z + e.w * e.w;
      for (int i = kRounds; valid(i); ++i) {
        const float4 e = load_row4(x + piece(i) * 4);
        sum += e.x * e.x + e.y * e.y + e.z * e.z + e.w * e.w;
      }
      sum = sum_lanes(sum);
      if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
      consumer_barrier();
      scale = rsqrtf(__fdividef(sum_lanes<kStreamWarps>(scratch[threadIdx.x % kStreamWarps]), static_cast<float>(k_)) +
                     eps);
    }
    const int padded = padded_pieces(k_);
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      if (i * kStreamConsumers < padded) finish(to, col, i, v[i], norm_weights_[i], scale, normed_out);
    for (int i = kRounds; i * kStreamConsumers < padded; ++i) {  // rows longer than 4096
      const float4 zero = make_float4(0, 0, 0, 0);
      finish(to, col, i, valid(i) ? load_row4(x + piece(i) * 4) : zero,
             kNormed && valid(i) ? *reinterpret_cast<const float4*>(norm_ + piece(i) * 4) : zero, scale, normed_out);
    }
  }

 private:
  static constexpr int kRounds = 1024 / kStreamConsumers;
  __device__ __forceinline__ int piece(int i) const { return static_cast<int>(threadIdx.x) + i * kStreamConsumers; }
  __device__ __forceinline__ bool valid(int i) const { return piece(i) * 4 < k_; }

  template <int kCols>
  __device__ __forceinline__ void finish(const StagedInput<kCols>& to, int col, int i, float4 v, float4 weight,
                                         float scale, __half* normed_out) const {
    if constexpr (kNormed)
      v = make_float4(v.x * scale * weight.x, v.y * scale * weight.y, v.z * scale * weight.z, v.w * scale * weight.w);
    if (!valid(i)) v = make_float4(0, 0, 0, 0);
    store4(to, piece(i), col, v, piece(i) < padded_pieces(k_));
    if (kNormed && normed_out != nullptr && valid(i))
      *reinterpret_cast<uint2*>(normed_out + piece(i) * 4) = make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w));
  }

  int k_;
  const float* norm_;
  float4 norm_weights_[kRounds];
};

// Staging of several fp16 rows: a column each, four rows' loads in flight a thread.
__device__ __forceinline__ void stage_rows(const StagedInput<8>& to, const __half* x, size_t stride, int rows, int k) {
  const int pieces = k / 4, padded = padded_pieces(k);
  for (int first = 0; first < padded; first += kStreamConsumers) {
    const int c = first + static_cast<int>(threadIdx.x);
#pragma unroll 4
    for (int row = 0; row < rows; ++row)
      store4(to, c, row, c < pieces ? load_row4(x + row * stride + c * 4) : make_float4(0, 0, 0, 0), c < padded);
  }
}

// The unit of work of a consumer warp: one chunk of four groups of one tile.
//
// One row of activations would use one of the eight columns of the product. Instead the four groups of a chunk take a
// column each (column 2 g; B is zero elsewhere), all 16 steps add up in one accumulator, and lane q finds the sum of group q
// in its registers 0 (row r) and 2 (row r + 8): every lane scales one group, and two exchanges add the four.
//
// One row: lanes of a column read their operand from the staged row, the others read zeros, by address.
struct OneRowInput {
  const uint4* from[kChunkGroups];
  float sum;  // S of group q

  __device__ __forceinline__ void load(const StagedInput<1>& x, const uint4* zeros, int chunk) {
    const unsigned lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) from[g] = r == 2 * g ? x.pieces + (chunk * kChunkGroups + g) * 8 + q : zeros;
    sum = x.sums[chunk * kChunkGroups + q];
  }
};
// Up to eight rows: a column each.
struct RowsInput {
  uint32_t b[kChunkGroups][8];  // B operands: registers 2 j and 2 j + 1 of step j
  float sum[2 * kChunkGroups];  // S of each group for columns 2q, 2q + 1

  __device__ __forceinline__ void load(const StagedInput<8>& x, const uint4* /*zeros*/, int chunk) {
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      const int group = chunk * kChunkGroups + g;
      x.load(group, b[g]);
      const float2 s = *reinterpret_cast<const float2*>(x.sums + group * 8 + 2 * (threadIdx.x % 4));
      sum[2 * g] = s.x;
      sum[2 * g + 1] = s.y;
    }
  }
};
template <int kCols>
struct UnitInputOf {
  using type = RowsInput;
};
template <>
struct UnitInputOf<1> {
  using type = OneRowInput;
};
template <int kCols>
using UnitInput = typename UnitInputOf<kCols>::type;
inline constexpr int kZeroPieces = 8;  // what OneRowInput reads where a column is not its own

// A warp's sums over a unit: fragment rows r (low) and r + 8 (high) of its columns.
template <int kCols>
struct UnitSums {
  static constexpr int kMine = kCols == 1 ? 1 : 2;
  float low[kMine] = {}, high[kMine] = {};
};

// The 16 x 64 weights of a group, step by step.
template <int kBits>
struct GroupWeights {
  uint32_t word[kBits];
  __device__ __forceinline__ explicit GroupWeights(const uint4* codes) {
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint4 v = codes[i * 32 + threadIdx.x % 32];
      word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
    }
  }
  __device__ __forceinline__ void step(int j, uint32_t (&a)[4]) const {
    if constexpr (kBits == 4) {
      expand_step(word[j], a);
    } else {
      expand_step(word[2 * j], word[2 * j + 1], a);
    }
  }
};

// `codes` and `scales` point to the unit's first group in shared memory.
template <int kBits, int kCols>
__device__ __forceinline__ UnitSums<kCols> multiply_unit(const uint4* codes, const uint2* scales,
                                                         const UnitInput<kCols>& x) {
  const int lane = static_cast<int>(threadIdx.x % 32), r = lane / 4, q = lane % 4;
  constexpr int kGroupCodes = 32 * kBits / 4;
  constexpr float kHighFactor = kBits == 4 ? 0.0625f : 1.0f;
  UnitSums<kCols> out;
  if constexpr (kCols == 1) {
    // The offset 1024 of the codes leaves through the start value; two accumulators halve the chain of products.
    const float start = -1024.0f * x.sum;
    float even[4] = {start, 0, start, 0}, odd[4] = {};
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      const GroupWeights<kBits> w(codes + g * kGroupCodes);
      const uint4 low = x.from[g][0], high = x.from[g][4];
      uint32_t a[4];
      w.step(0, a), mma_f16(even, a, low.x, low.y);
      w.step(1, a), mma_f16(odd, a, low.z, low.w);
      w.step(2, a), mma_f16(even, a, high.x, high.y);
      w.step(3, a), mma_f16(odd, a, high.z, high.w);
    }
    const uint2 scale = scales[q * 8 + r];
    float low = low_bf16(scale.x) * (even[0] + odd[0]) + high_bf16(scale.x) * x.sum;
    float high = kHighFactor * low_bf16(scale.y) * (even[2] + odd[2]) + high_bf16(scale.y) * x.sum;
    low += __shfl_xor_sync(0xffffffffu, low, 1);
    high += __shfl_xor_sync(0xffffffffu, high, 1);
    out.low[0] = low + __shfl_xor_sync(0xffffffffu, low, 2);
    out.high[0] = high + __shfl_xor_sync(0xffffffffu, high, 2);
  } else {
#pragma unroll
    for (int g = 0; g < kChunkGroups; ++g) {
      const GroupWeights<kBits> w(codes + g * kGroupCodes);
      const float s0 = x.sum[2 * g], s1 = x.sum[2 * g + 1];
      float c[4] = {-1024.0f * s0, -1024.0f * s1, -1024.0f * s0, -1024.0f * s1};
      uint32_t a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w.step(j, a);
        mma_f16(c, a, x.b[g][2 * j], x.b[g][2 * j + 1]);
      }
      const uint2 scale = scales[g * 8 + r];
      const float low = low_bf16(scale.x), low_bias = high_bf16(scale.x);
      const float high = kHighFactor * low_bf16(scale.y), high_bias = high_bf16(scale.y);
      out.low[0] += low * c[0] + low_bias * s0;
      out.low[1] += low * c[1] + low_bias * s1;
      out.high[0] += high * c[2] + high_bias * s0;
      out.high[1] += high * c[3] + high_bias * s1;
    }
  }
  return out;
}

// A unit's sums to [fragment pair][col], pairs (r, r + 8) adjacent.
template <int kCols>
__device__ __forceinline__ void store_unit(float* to, const UnitSums<kCols>& sums) {
  const int lane = static_cast<int>(threadIdx.x % 32), r = lane / 4, q = lane % 4;
  if constexpr (kCols == 8) {
    *reinterpret_cast<float2*>(to + (2 * r) * 8 + 2 * q) = make_float2(sums.low[0], sums.low[1]);
    *reinterpret_cast<float2*>(to + (2 * r + 1) * 8 + 2 * q) = make_float2(sums.high[0], sums.high[1]);
  } else if (q == 0) {
    *reinterpret_cast<float2*>(to + 2 * r) = make_float2(sums.low[0], sums.high[0]);
  }
}
// The total of element `i` of a tile over its `chunks` units.
template <int kCols>
__device__ __forceinline__ float total_of(const float* tile, int chunks, int i) {
  float total = 0;
#pragma unroll 8
  for (int c = 0; c < chunks; ++c) total += tile[c * kTileRows * kCols + i];
  return total;
}

// The consumers' way through the tiles of a ring, without a division: warp w takes units w, w + 16, ... of the tiles'
// chunks, in order. `Body(tile, slot, parity, chunk)`, tiles counted from 0.
class UnitWalk {
 public:
  __device__ UnitWalk(int chunks, int slots) : chunks_(chunks), slots_(slots) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    tile_ = warp / chunks;
    chunk_ = warp % chunks;
    tile_step_ = kStreamWarps / chunks;
    chunk_step_ = kStreamWarps % chunks;
    slot_ = tile_ % slots;
    parity_ = static_cast<uint32_t>(tile_ / slots) & 1;
    // Here, before the wait for the activations, and not where they are first used.
    asm volatile("" : "+r"(tile_), "+r"(chunk_), "+r"(tile_step_), "+r"(chunk_step_), "+r"(slot_), "+r"(parity_));
  }
  __device__ int tile() const { return tile_; }
  __device__ int chunk() const { return chunk_; }
  __device__ int slot() const { return slot_; }
  __device__ uint32_t parity() const { return parity_; }
  __device__ void next() {
    int step = tile_step_;
    chunk_ += chunk_step_;
    if (chunk_ >= chunks_) {
      chunk_ -= chunks_;
      ++step;
    }
    tile_ += step;
    slot_ += step;
    while (slot_ >= slots_) {
      slot_ -= slots_;
      parity_ ^= 1;
    }
  }

 private:
  int chunks_, slots_;
  int tile_, chunk_, tile_step_, chunk_step_, slot_;
  uint32_t parity_;
};

}  // namespace calla::cuda
