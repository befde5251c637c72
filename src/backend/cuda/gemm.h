#pragma once
// Matrix products of many rows with packed weights (prefill, Hopper).
#include "backend/cuda/launch.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/step.h"

namespace calla::cuda {

// Up to 128 rows of one expert: entries [first, first + count) of the list of (row, choice) pairs.
struct ExpertTile {
  int32_t expert = 0;
  int32_t first = 0;
  int32_t count = 0;
};

enum class GemmOutput : uint8_t {
  kStore,   // fp32 out = y
  kAdd,     // fp32 out += y
  kSwiglu,  // fp16 out = silu(gate) * up * kHiddenScale (swiglu tiles)
  kBf16,    // bf16 out = y
};

// y = W x for a list of rows. Row i of the product reads x at row * x_stride + choice * x_choice_stride and writes out
// at row * out_stride + choice * out_choice_stride (elements). Dense: row = i, choice = 0. Grouped by expert: the pairs
// list says (row * 8 + choice), and tiles say which expert's matrix multiplies which part of the list.
struct GemmParams {
  PackedView w;
  const __half* x = nullptr;
  size_t x_stride = 0, x_choice_stride = 0;
  void* out = nullptr;
  size_t out_stride = 0, out_choice_stride = 0;
  int rows = 0;
  int columns = 0;  // outputs (units, for kSwiglu) that exist; padded ones are not written
  // Grouped only:
  const int32_t* pairs = nullptr;
  const ExpertTile* tiles = nullptr;
  const int32_t* tile_count = nullptr;  // on the device
  int max_tiles = 0;
};

void gemm(const Launch& launch, const GemmParams& p, GemmOutput output);

// The forms of gemm(), a file each so that they compile side by side.
void gemm_store(const Launch& launch, const GemmParams& p);
void gemm_add(const Launch& launch, const GemmParams& p);
void gemm_swiglu(const Launch& launch, const GemmParams& p);
void gemm_bf16(const Launch& launch, const GemmParams& p);

}  // namespace calla::cuda
