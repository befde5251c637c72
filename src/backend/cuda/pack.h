#pragma once
// Kernels that fill weight memory: checkpoint layout -> tile layout, and random contents.
#include <cstdint>

#include "backend/cuda/layout.h"

namespace calla::cuda {

enum class TileRows : uint8_t { kPlain, kSwiglu };

// Packs `stack` matrices of `source` (and, for kSwiglu, `up`, of the same shape) into `view`, from tile `first_tile` of
// each stack entry on. The source's memory must stay valid until the stream has run the kernel.
void pack_tiles(const PackedView& view, int stack, int first_tile, TileRows kind, const RawView& source,
                const RawView& up, cudaStream_t stream);

// Random codes; scales and biases such that weights have zero mean and a standard deviation of 1 / sqrt(k).
void fill_random(const PackedView& view, int stack, uint64_t seed, cudaStream_t stream);
void fill_random(const RawView& view, int stack, uint64_t seed, cudaStream_t stream);

}  // namespace calla::cuda
