#include "backend/metal/tensor_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "backend/metal/encoder.h"
#include "backend/metal/policy.h"
#include "backend/sampling.h"
#include "base/bf16.h"
#include "base/error.h"

namespace calla::metal {
namespace {

struct Place {
  int32_t row;
  int32_t column;
  bool operator==(const Place&) const = default;
};

// lane_place() of kernels/tensor.h.
Place place_of(int lane, int slot) {
  const int q = lane >> 2;
  return {((q & 4) | ((lane >> 1) & 3)) + 8 * (slot / 4), ((q & 2) | (lane & 1)) * 4 + slot % 4};
}

bool layout_agrees(Device& device) {
  constexpr int kSlots = 8 + 16 + 16;  // of a lane: left input, right input, sums
  constexpr int kPlaces = kSlots * mtl::kLanes;
  const BufferSpan memory = device.allocate(2 * kPlaces * sizeof(Place), "tensor layout");
  StepEncoder encoder(device, {});
  encoder.dispatch(device.kernel("tensor_layout_probe"), mtl::ProbeParams{kPlaces}, {writes(memory)}, {1}, mtl::kLanes);
  wait_for(encoder.take());
  for (const bool by_outputs : {true, false}) {
    const Place* found = memory.as<Place>() + (by_outputs ? 0 : kPlaces);
    for (int lane = 0; lane < mtl::kLanes; ++lane) {
      const Place* left = found + lane * 8;
      const Place* right = found + 8 * mtl::kLanes + lane * 16;
      const Place* sums = found + 24 * mtl::kLanes + lane * 16;
      for (int slot = 0; slot < 8; ++slot) {
        const Place at = place_of(lane, slot);
        const Place below{at.row + 16, at.column};
        const Place beside{at.row, at.column + 16};
        if (left[slot] != at || right[slot] != at || right[8 + slot] != (by_outputs ? below : beside) ||
            sums[slot] != at || sums[8 + slot] != beside)
          return false;
      }
    }
  }
  return true;
}

// Relative to the root mean square of b; infinite where a is not finite.
struct Difference {
  double mean = 0;   // root mean square
  double worst = 0;  // of a single element: a million right ones must not hide it
};

Difference difference_of(const float* a, const float* b, size_t count) {
  double squares = 0, norm = 0, worst = 0;
  for (size_t i = 0; i < count; ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    squares += d * d;
    norm += static_cast<double>(b[i]) * b[i];
    worst = std::max(worst, std::abs(d));
  }
  if (!std::isfinite(squares)) return {INFINITY, INFINITY};
  norm = std::max(norm, 1e-30);
  return {std::sqrt(squares / norm), worst / std::sqrt(norm / static_cast<double>(count))};
}

// How far sdpa_tile_tensor is from sdpa_tile on random rows, keys and values; both round the weights to bf16.
double attention_error(Device& device) {
  constexpr int kRows = 45, kBefore = 150, kHeads = 2, kPages = (kBefore + kRows + mtl::kPageRows - 1) / mtl::kPageRows;
  constexpr size_t kOut = static_cast<size_t>(kRows) * kHeads * mtl::kHeadSize;
  const auto random = [&](size_t count, int stream, const char* label) {
    const BufferSpan span = device.allocate(count * sizeof(bf16), label);
    for (size_t i = 0; i < count; ++i) span.as<bf16>()[i] = to_bf16(draw_uniform(stream, i) * 4 - 2);
    return span;
  };
  const BufferSpan q = random(kOut, 2, "attention check, q");
  const BufferSpan q_gate = random(2 * kOut, 3, "attention check, gate");
  const BufferSpan kv = random(2 * kPages * mtl::kPageRows * mtl::kHeadSize, 4, "attention check, KV");
  const BufferSpan rows = device.allocate(kRows * sizeof(mtl::RowInfo), "attention check, rows");
  for (int i = 0; i < kRows; ++i) rows.as<mtl::RowInfo>()[i] = {0, 0, kBefore + i, 0};
  const BufferSpan pages = device.allocate(kPages * sizeof(int32_t), "attention check, pages");
  for (int i = 0; i < kPages; ++i) pages.as<int32_t>()[i] = kPages - 1 - i;
  const BufferSpan tiles = device.allocate(2 * sizeof(mtl::AttentionTile), "attention check, tiles");
  tiles.as<mtl::AttentionTile>()[0] = {0, mtl::kAttnTileRows};
  tiles.as<mtl::AttentionTile>()[1] = {mtl::kAttnTileRows, kRows - mtl::kAttnTileRows};
  mtl::AttentionParams params{};
  params.q_heads = kHeads;
  params.kv_heads = params.layers = 1;
  params.mixed_stride = kHeads * mtl::kHeadSize;

  StepEncoder encoder(device, {});
  std::array<std::vector<float>, 2> results;
  std::array<BufferSpan, 2> mixed;
  for (const int tensor : {0, 1}) {
    mixed[tensor] = device.allocate(kOut * sizeof(bf16), "attention check, result");
    encoder.dispatch(device.kernel(tensor ? "sdpa_tile_tensor" : "sdpa_tile"), params,
                     {constant(q), constant(q_gate), constant(kv), constant(tiles), constant(rows), constant(pages),
                      writes(mixed[tensor])},
                     {2, kHeads}, mtl::kAttnThreads);
  }
  wait_for(encoder.take());
  for (const int tensor : {0, 1})
    for (size_t i = 0; i < kOut; ++i) results[tensor].push_back(to_float(mixed[tensor].as<bf16>()[i]));
  return difference_of(results[1].data(), results[0].data(), kOut).mean;
}

}  // namespace

std::string check_tensor_ops(Device& device, const BoundMatrix& m, int rows, const TensorCheckMemory& memory) {
  std::string reason;
  if (!device.load_tensor_library(reason)) return "they do not compile here: " + reason;
  try {
    if (!layout_agrees(device)) return "this GPU lays their elements out in a way that the kernels do not know";
    auto* input = memory.input.as<bf16>();
    for (size_t i = 0; i < static_cast<size_t>(rows) * m.shape.k; ++i) input[i] = to_bf16(draw_uniform(1, i) * 2 - 1);
    const mtl::QmmParams params{m.shape, rows, m.shape.k, m.shape.n};
    const size_t count = static_cast<size_t>(rows) * m.shape.n;
    for (const int tile : {16, 32}) {
      StepEncoder encoder(device, {});
      const auto gemm = [&](const std::string& suffix, const BufferSpan& out) {
        const Kernel& kernel =
            device.kernel("affine_qmm_" + std::to_string(tile) + suffix, {int_constant(0, m.bits), int_constant(6, 1)});
        encoder.dispatch(kernel, params,
                         {reads(memory.input), constant(m.codes), constant(m.scales), constant(m.biases), writes(out)},
                         {static_cast<size_t>((m.shape.n + mtl::kTileN - 1) / mtl::kTileN),
                          static_cast<size_t>((rows + tile - 1) / tile)},
                         Policy::tile_threads(tile), m.weights() * rows);
      };
      gemm("", memory.expected);
      gemm("_tensor", memory.result);
      wait_for(encoder.take());
      // Both multiply the same bf16 numbers and add in fp32; only the order of the sums differs.
      const Difference off = difference_of(memory.result.as<float>(), memory.expected.as<float>(), count);
      if (!(off.mean < 1e-4) || !(off.worst < 1e-3)) {
        char text[128];
        std::snprintf(text, sizeof(text),
                      "their results are off by %.2g, one element by %.2g, at %d x %d x %d in tiles of %d", off.mean,
                      off.worst, rows, m.shape.n, m.shape.k, tile);
        return text;
      }
    }
    // The softmax goes by other blocks of keys, so other weights are rounded to bf16.
    const double error = attention_error(device);
    if (!(error < 1e-2)) {
      char text[64];
      std::snprintf(text, sizeof(text), "their attention is off by %.2g", error);
      return text;
    }
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

}  // namespace calla::metal
