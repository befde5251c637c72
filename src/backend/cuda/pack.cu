// pack_tiles: codes, scales and biases of the checkpoint into the tile layout of layout.h.
//   Launch    grid (tiles x stack, groups / 4), block 128 = one warp a group. Reads and writes each byte once; runs at
//             upload only, hidden behind the copies over PCIe.
#include "backend/cuda/device.h"
#include "backend/cuda/pack.h"

namespace calla::cuda {
namespace {

struct SourceRow {
  const RawView* matrix;
  int row;  // < 0: padding
};

__device__ SourceRow source_row(TileRows kind, const RawView& source, const RawView& up, int tile, int fragment_row) {
  if (kind == TileRows::kSwiglu) {
    const int unit = tile * 8 + (fragment_row & 7);
    return {fragment_row < 8 ? &source : &up, unit < source.n ? unit : -1};
  }
  const int row = tile * kTileRows + 2 * (fragment_row & 7) + (fragment_row >> 3);
  return {&source, row < source.n ? row : -1};
}

__device__ uint32_t code_at(const SourceRow& at, int k) {
  if (at.row < 0) return 0;
  const RawView& m = *at.matrix;
  const int per_word = 32 / m.bits;
  const uint32_t word = m.codes[static_cast<size_t>(at.row) * (m.k / per_word) + k / per_word];
  return (word >> (k % per_word * m.bits)) & ((1u << m.bits) - 1);
}

__device__ uint32_t scale_and_bias(const SourceRow& at, int group) {
  if (at.row < 0) return 0;
  const size_t i = static_cast<size_t>(at.row) * (at.matrix->k / kGroup) + group;
  return at.matrix->scales[i] | static_cast<uint32_t>(at.matrix->biases[i]) << 16;
}

__global__ void pack_kernel(PackedView view, int first_tile, int tiles, TileRows kind, RawView source_stack,
                            RawView up_stack) {
  const int entry = static_cast<int>(blockIdx.x) / tiles, tile = static_cast<int>(blockIdx.x) % tiles;
  const int group = static_cast<int>(blockIdx.y * 4 + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (group >= view.padded_groups) return;
  const RawView source = source_stack.entry(entry);
  const RawView up = kind == TileRows::kSwiglu ? up_stack.entry(entry) : source;
  const PackedView to = view.entry(entry);
  const int r = lane / 4, q = lane % 4;
  SourceRow low = source_row(kind, source, up, tile, r), high = source_row(kind, source, up, tile, r + 8);
  if (group >= view.groups) low.row = high.row = -1;
  uint32_t words[8] = {};
  for (int j = 0; j < 4; ++j) {
    const int k = group * kGroup + 16 * j + 2 * q;
    if (view.bits == 4) {
      for (int odd = 0; odd < 2; ++odd)
        words[j] |= (code_at(low, k + odd) | code_at(high, k + odd) << 4 | code_at(low, k + 8 + odd) << 8 |
                     code_at(high, k + 8 + odd) << 12)
                    << (16 * odd);
    } else {
      for (int half = 0; half < 2; ++half)
        words[2 * j + half] = code_at(low, k + 8 * half) | code_at(low, k + 8 * half + 1) << 8 |
                              code_at(high, k + 8 * half) << 16 | code_at(high, k + 8 * half + 1) << 24;
    }
  }
  const size_t at = static_cast<size_t>(first_tile + tile) * view.padded_groups + group;
  auto* codes = const_cast<uint4*>(to.codes);
  if (view.bits == 4) {
    codes[at * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    codes[(at * 2) * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
    codes[(at * 2 + 1) * 32 + lane] = make_uint4(words[4], words[5], words[6], words[7]);
  }
  if (q == 0)
    const_cast<uint2*>(to.scales)[at * 8 + r] = make_uint2(scale_and_bias(low, group), scale_and_bias(high, group));
}

__device__ uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

__device__ uint16_t bf16_bits(float value) { return static_cast<uint16_t>((__float_as_uint(value) + 0x7fff) >> 16); }

// A scale of either sign around `step` and the bias that centres the codes.
__device__ uint32_t random_scale(uint64_t bits, float step, float largest) {
  const float spread = 1 + 0.4f * (static_cast<float>(bits & 0xffff) / 32768.0f - 1);
  const float scale = (bits & 0x10000 ? step : -step) * spread;
  return bf16_bits(scale) | static_cast<uint32_t>(bf16_bits(-scale * largest / 2)) << 16;
}

__global__ void random_words(uint64_t* words, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    words[i] = mix(seed + 0x9e3779b97f4a7c15u * (i + 1));
}

__global__ void random_scales(uint32_t* pairs, size_t count, float step, float largest, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x)
    pairs[i] = random_scale(mix(seed + 0x9e3779b97f4a7c15u * (i + 1)), step, largest);
}

__global__ void random_raw_scales(uint16_t* scales, uint16_t* biases, size_t count, float step, float largest,
                                  uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint32_t pair = random_scale(mix(seed + 0x9e3779b97f4a7c15u * (i + 1)), step, largest);
    scales[i] = static_cast<uint16_t>(pair);
    biases[i] = static_cast<uint16_t>(pair >> 16);
  }
}

constexpr int kFillBlocks = 1024, kFillThreads = 256;

// Uniform codes 0..largest have a standard deviation of about largest / 3.46.
float random_step(int bits, int k) {
  return 3.46f / (static_cast<float>((1 << bits) - 1) * sqrtf(static_cast<float>(k)));
}

}  // namespace

void pack_tiles(const PackedView& view, int stack, int first_tile, TileRows kind, const RawView& source,
                const RawView& up, cudaStream_t stream) {
  const int units = kind == TileRows::kSwiglu ? 8 : kTileRows;
  const int tiles = (source.n + units - 1) / units;
  check(first_tile + tiles <= view.tiles, "the packed matrix has room for all tiles");
  const dim3 grid(static_cast<unsigned>(tiles * stack), static_cast<unsigned>((view.padded_groups + 3) / 4));
  pack_kernel<<<grid, 128, 0, stream>>>(view, first_tile, tiles, kind, source, up);
  check_launch("pack_tiles");
}

void fill_random(const PackedView& view, int stack, uint64_t seed, cudaStream_t stream) {
  const size_t tiles = static_cast<size_t>(stack) * view.tiles;
  const float largest = static_cast<float>((1 << view.bits) - 1);
  random_words<<<kFillBlocks, kFillThreads, 0, stream>>>(reinterpret_cast<uint64_t*>(const_cast<uint4*>(view.codes)),
                                                         tiles * view.codes_per_tile() * 2, seed);
  random_scales<<<kFillBlocks, kFillThreads, 0, stream>>>(
      reinterpret_cast<uint32_t*>(const_cast<uint2*>(view.scales)), tiles * view.scales_per_tile() * 2,
      random_step(view.bits, view.groups * kGroup), largest, seed ^ 0x5ca1e);
  check_launch("fill_random");
}

void fill_random(const RawView& view, int stack, uint64_t seed, cudaStream_t stream) {
  check(view.codes != nullptr, "random contents are for quantised matrices");
  const size_t rows = static_cast<size_t>(stack) * view.n;
  random_words<<<kFillBlocks, kFillThreads, 0, stream>>>(reinterpret_cast<uint64_t*>(const_cast<uint32_t*>(view.codes)),
                                                         rows * view.k * view.bits / 64, seed);
  random_raw_scales<<<kFillBlocks, kFillThreads, 0, stream>>>(
      const_cast<uint16_t*>(view.scales), const_cast<uint16_t*>(view.biases), rows * (view.k / view.group),
      random_step(view.bits, view.k), static_cast<float>((1 << view.bits) - 1), seed ^ 0x5ca1e);
  check_launch("fill_random");
}

}  // namespace calla::cuda
