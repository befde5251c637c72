#pragma once
// A model with random weights of any shape, in memory, for checking stages without a checkpoint. Weights have
// zero mean and a standard deviation of 1 / sqrt(k), so that activations keep a sane size.
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/weights.h"
#include "model/shape.h"

namespace calla {

class RandomModel {
 public:
  // bits, group: of every matrix but the router and the shared expert's gate, which are 8-bit like in real
  // checkpoints.
  RandomModel(const ModelShape& shape, uint64_t seed, int bits = 4, int group = 64)
      : RandomModel(shape, seed, bits, group, true) {}
  // Sizes and formats without memory behind them: to count with, not to compute with.
  static RandomModel shapes_only(const ModelShape& shape) { return RandomModel(shape, 0, 4, 64, false); }
  const ModelShape& shape() const { return shape_; }
  const ModelWeights& weights() const { return weights_; }

 private:
  RandomModel(const ModelShape& shape, uint64_t seed, int bits, int group, bool filled);
  WeightMatrix matrix(int stack, int n, int k, int bits, int group);
  FloatVector vector(int n, float mean, float spread);
  uint64_t next();
  float uniform();  // in [-1, 1)

  const ModelShape shape_;
  const bool filled_;
  uint64_t state_;
  std::vector<std::unique_ptr<uint32_t[]>> codes_;
  std::vector<std::unique_ptr<bf16[]>> numbers_;
  ModelWeights weights_;
};

// The shape of calla-tiny with `layers` layers, and the real model's widths with `layers` layers.
ModelShape tiny_shape(int layers = 4);
ModelShape real_shape(int layers = 40);

}  // namespace calla
