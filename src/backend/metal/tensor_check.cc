#include "backend/metal/tensor_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

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

// lane_place() of qmm_tensor.metal.
Place place_of(int lane, int slot) {
  const int q = lane >> 2;
  return {((q & 4) | ((lane >> 1) & 3)) + 8 * (slot / 4), ((q & 2) | (lane & 1)) * 4 + slot % 4};
}

bool layout_agrees(Device& device, const BufferSpan& memory) {
  constexpr int kSlots = 8 + 16 + 16;  // of a lane: left input, right input, sums
  StepEncoder encoder(device, {});
  encoder.dispatch(device.kernel("tensor_layout_probe"), mtl::CombineParams{0}, {writes(memory)}, {1}, mtl::kLanes);
  wait_for(encoder.take());
  const Place* found = memory.as<Place>();
  static_assert(sizeof(Place) * kSlots * mtl::kLanes <= 16384);
  for (int lane = 0; lane < mtl::kLanes; ++lane) {
    for (int slot = 0; slot < 8; ++slot) {
      const Place at = place_of(lane, slot);
      const Place second_outputs{at.row + 16, at.column};  // the right input is stored by output
      const Place second_columns{at.row, at.column + 16};
      const Place* right = found + 32 * 8 + lane * 16;
      const Place* sums = found + 32 * 24 + lane * 16;
      if (found[lane * 8 + slot] != at || right[slot] != at || right[8 + slot] != second_outputs || sums[slot] != at ||
          sums[8 + slot] != second_columns)
        return false;
    }
  }
  return true;
}

// ||a - b|| / ||b||; infinite where a is not finite.
double relative_error(const float* a, const float* b, size_t count) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::isfinite(difference) ? std::sqrt(difference / std::max(norm, 1e-30)) : INFINITY;
}

}  // namespace

std::string check_tensor_ops(Device& device, const BoundMatrix& m, int rows, const TensorCheckMemory& memory) {
  std::string reason;
  if (!device.load_tensor_library(reason)) return "they do not compile here: " + reason;
  try {
    if (!layout_agrees(device, device.allocate(16384, "tensor layout")))
      return "this GPU lays their elements out in a way that the kernels do not know";
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
      const double error = relative_error(memory.result.as<float>(), memory.expected.as<float>(), count);
      if (!(error < 1e-4)) {
        char text[96];
        std::snprintf(text, sizeof(text), "their results are off by %.2g at %d x %d x %d", error, rows, m.shape.n,
                      m.shape.k);
        return text;
      }
    }
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

}  // namespace calla::metal
