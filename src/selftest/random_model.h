#pragma once
// A model with random weights of any shape, in memory: for checking stages, and measuring, without a checkpoint. Weights
// have zero mean and a standard deviation of 1 / sqrt(k), so that activations keep a sane size.
#include <cstdint>
#include <memory>
#include <vector>

#include "backend/weights.h"
#include "checkpoint/synthetic.h"
#include "model/shape.h"

namespace calla {

class RandomModel {
 public:
  // bits, group: see outline_weights.
  RandomModel(const ModelShape& shape, uint64_t seed, int bits = 4, int group = 64);
  const ModelShape& shape() const { return shape_; }
  const ModelWeights& weights() const { return weights_; }

 private:
  const ModelShape shape_;
  std::vector<std::unique_ptr<uint32_t[]>> codes_;
  std::vector<std::unique_ptr<bf16[]>> numbers_;
  ModelWeights weights_;
};

// The shape of calla-tiny with `layers` layers, and the real model's widths with `layers` layers.
inline ModelShape tiny_shape(int layers = 4) { return named_shape("calla-tiny", layers); }
inline ModelShape real_shape(int layers = 40) { return named_shape("qwen3.6-35b-a3b", layers); }

}  // namespace calla
