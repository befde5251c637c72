#pragma once
// What the token program and the rows program have in common: how a layer is shared out among their blocks, what a slot of
// their ring holds, and small steps of the GDN phase.
#include "backend/cuda/program/token_program.h"

namespace calla::cuda::program {

using token::kBlocks;
using token::kHidden;
using token::kMixed;

inline constexpr int kWarps = 16, kWorkers = kWarps * 32;  // the consumers
inline constexpr int kGroups = kHidden / kGroup, kChunks = kGroups / kChunkGroups;
inline constexpr uint32_t kGroupCodes = 512, kGroupScales = 64;  // bytes of a tile's group
// A slot of the ring: a tile of 16 outputs and 2048 inputs, its codes and then its scales; or as many bytes of something
// else.
inline constexpr uint32_t kSlotCodes = kGroups * kGroupCodes, kSlotScales = kGroups * kGroupScales;
inline constexpr uint32_t kSlotBytes = kSlotCodes + kSlotScales;
inline constexpr int kDownGroups = token::kExpertWidth / kGroup, kDownChunks = kDownGroups / kChunkGroups;
inline constexpr int kColumns = kStateColumns;                       // of a GDN head's state, of a block
inline constexpr int kGdnTiles = 6, kOutSlots = 2;                   // of a block
inline constexpr int kSharedGateTile = token::kExperts / kTileRows;  // of the router: the shared expert's gate

// A place in a ring: slot, and the parity of its turn.
template <int kSlots>
struct Place {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ Place plus(int n) const {
    Place p{slot + n, parity};
    if (p.slot >= kSlots) p.slot -= kSlots, p.parity ^= 1;
    return p;
  }
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void consumer_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// Tiles shared out among the blocks.
struct TileShare {
  int first, count;
  __device__ __forceinline__ explicit TileShare(int tiles) {
    const int block = static_cast<int>(blockIdx.x);
    first = tiles * block / kBlocks;
    count = tiles * (block + 1) / kBlocks - first;
  }
};

// What a block has of a GDN layer: 32 of a key head's 256 q and k channels, and for one of its two value heads 32 columns
// of the state with their rows of v and z.
struct GdnPart {
  int rank, key_head, head, part;
  __device__ __forceinline__ GdnPart() {
    const int block = static_cast<int>(blockIdx.x);
    constexpr int kParts = kGdnHeadDim / kColumns;
    rank = block % token::kBlocksPerKeyHead, key_head = block / token::kBlocksPerKeyHead;
    head = block / kParts, part = block % kParts;
  }
  // First outputs of the block's spans: 32 of q (ranks 0..3) or k (4..7), of v, of z.
  __device__ __forceinline__ int first_column(int span, int z_column) const {
    constexpr int kKeyWidth = token::kKeyHeads * kGdnHeadDim;
    if (span == 0) return (rank < 4 ? 0 : kKeyWidth) + key_head * kGdnHeadDim + part * kColumns;
    return (span == 1 ? 2 * kKeyWidth : z_column) + head * kGdnHeadDim + part * kColumns;
  }
  // The block's part of the state.
  __device__ __forceinline__ size_t state() const { return state_place(head, 0, part * kColumns); }
};
inline constexpr int kChannels = (2 * token::kKeyHeads + token::kValueHeads) * kGdnHeadDim;
inline constexpr size_t kStateFloats = size_t{token::kValueHeads} * kGdnHeadDim * kGdnHeadDim;

// A GDN block sends its 32 numbers of `mixed` with an RMSNorm of their own, since it does not know the squares of the
// head's other three blocks; they become right by this factor.
inline constexpr float kLocalEps = 1e-12f;
__device__ __forceinline__ float scale_of_squares(float squares, float total, float eps) {
  const float own = squares / kColumns + kLocalEps;
  return rsqrtf(total / kGdnHeadDim + eps) * (own * rsqrtf(own));
}

__device__ __forceinline__ float4 fma4(float4 a, float b, float4 c) {
  return make_float4(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w));
}
__device__ __forceinline__ float4 add_lane(float4 v, int offset) {
  return make_float4(v.x + __shfl_xor_sync(0xffffffffu, v.x, offset), v.y + __shfl_xor_sync(0xffffffffu, v.y, offset),
                     v.z + __shfl_xor_sync(0xffffffffu, v.z, offset), v.w + __shfl_xor_sync(0xffffffffu, v.w, offset));
}

}  // namespace calla::cuda::program
