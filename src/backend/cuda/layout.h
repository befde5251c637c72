#pragma once
// How weights lie in device memory: structs shared by host and kernels.
//
// Packed ("tile") layout, for 4- and 8-bit matrices with groups of 64. A tile is 16 outputs x 64 inputs (one
// quantisation group), stored in the order in which the 32 lanes of a warp hold the A operand of
// mma.m16n8k16 / wgmma.m64nNk16: a lane's 16-byte load is a complete operand for four k16 steps and a warp's load is
// one contiguous 512-byte (8 bits: 1024-byte) run. Nothing is expanded: the bytes are those of the checkpoint.
//   codes  [stack][tile][group][lane] uint4 (4 bits), [stack][tile][group][half][lane] uint4 (8 bits)
//   scales [stack][tile][group][r = 0..7] uint2: (scale, bias) bf16 pairs of fragment rows r and r + 8
// Lane l = 4 r + q holds fragment rows r and r + 8 at inputs k = 64 g + 16 j + {2q, 2q+1, 2q+8, 2q+9}, step j = 0..3.
//   4 bits: word j, from bit 0: (r, 2q) (r+8, 2q) (r, 2q+8) (r+8, 2q+8) and, 16 bits up, the same for odd k, so that
//           one AND and one OR make a half2 of 1024 + code (rows r) or 1024 + 16 code (rows r + 8).
//   8 bits: words 2j, 2j+1: bytes (r, 2q) (r, 2q+1) (r+8, 2q) (r+8, 2q+1), then the same for k + 8.
// Which matrix rows a tile's fragment rows are:
//   plain    fragment row r -> output 16 t + 2 r, r + 8 -> 16 t + 2 r + 1: a lane's pair is adjacent in memory
//   swiglu   fragment row r -> gate unit 8 t + r, r + 8 -> up unit 8 t + r: SwiGLU needs no exchange
// Outputs are padded to whole tiles with zero scales; a padded output is exactly 0.
#include <cstdint>

#include <cuda_runtime.h>

namespace calla::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kGroup = 64;       // inputs per scale in the packed layout
inline constexpr int kChunkGroups = 4;  // groups that a warp of the decode kernels takes at a time

struct PackedView {
  const uint4* codes = nullptr;
  const uint2* scales = nullptr;
  int tiles = 0;          // per stack entry
  int groups = 0;         // K / 64
  int padded_groups = 0;  // stored: a multiple of kChunkGroups, the rest with zero codes, scales and biases
  int bits = 4;

  __host__ __device__ size_t codes_per_tile() const {  // uint4s
    return static_cast<size_t>(padded_groups) * 32 * static_cast<size_t>(bits / 4);
  }
  __host__ __device__ size_t scales_per_tile() const { return static_cast<size_t>(padded_groups) * 8; }
  __host__ __device__ PackedView entry(int index) const {
    PackedView v = *this;
    v.codes += static_cast<size_t>(index) * tiles * codes_per_tile();
    v.scales += static_cast<size_t>(index) * tiles * scales_per_tile();
    return v;
  }
};

// A matrix as it lies in the checkpoint, for formats that the packed layout does not cover.
struct RawView {
  const uint32_t* codes = nullptr;
  const uint16_t* scales = nullptr;  // bf16
  const uint16_t* biases = nullptr;
  const uint16_t* values = nullptr;  // bf16; then codes is null
  int n = 0;
  int k = 0;
  int bits = 4;
  int group = 64;

  __host__ __device__ RawView entry(int index) const {
    RawView v = *this;
    const size_t row = static_cast<size_t>(index) * n;
    if (values != nullptr) {
      v.values += row * k;
    } else {
      v.codes += row * (static_cast<size_t>(k) * bits / 32);
      v.scales += row * static_cast<size_t>(k / group);
      v.biases += row * static_cast<size_t>(k / group);
    }
    return v;
  }
};

}  // namespace calla::cuda
