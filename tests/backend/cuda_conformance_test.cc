// Every stage of the CUDA backend against the reference, in each of its forms. Skipped where there is no GPU.
#include "tests/backend/expect_conforms.h"

namespace calla {
namespace {

// fp16 inputs of the products and bf16 cache: 1.7e-3 is seen, at the cache.
constexpr double kTolerance = 4e-3;

const BackendFactory kFactory = [](const ModelShape& shape, const ModelWeights& weights,
                                   const BackendOptions& options) {
  return create_cuda_backend(shape, weights, options);
};

class CudaConformance : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_backend_info().available) GTEST_SKIP() << cuda_backend_info().reason;
    options_.tolerance = kTolerance;
  }
  void expect(const RandomModel& model, std::vector<std::string> ablate = {}) {
    options_.backend.ablate = std::move(ablate);
    expect_conforms(kFactory, model, options_);
  }
  // Steps of several sequences: around the eight columns of a product, and the most that the decode forms take.
  void add_decode_batches() {
    for (int sequences : {2, 5, 8, 9, 17, 32}) {
      BatchCase batch{"decode of " + std::to_string(sequences), {}};
      for (int i = 0; i < sequences; ++i) batch.sequences.push_back({3 * i, 1});
      options_.batches.push_back(batch);
    }
  }
  ConformanceOptions options_;
};

TEST_F(CudaConformance, FourBits) {
  add_decode_batches();
  expect(RandomModel(tiny_shape(4), 3));
}
TEST_F(CudaConformance, EightBits) { expect(RandomModel(tiny_shape(4), 4, 8)); }
TEST_F(CudaConformance, GroupsOf32) { expect(RandomModel(tiny_shape(4), 5, 4, 32)); }
TEST_F(CudaConformance, GroupsOf128) {
  ModelShape shape = tiny_shape(4);
  shape.expert_width = shape.shared_expert_width = 128;  // inputs come in whole groups
  expect(RandomModel(shape, 6, 4, 128));
}

TEST_F(CudaConformance, WithoutEachMechanism) {
  const RandomModel model(tiny_shape(4), 7);
  add_decode_batches();
  for (const char* name : {"dependent-launch", "gqa-packing", "split-kv", "fused-choice", "expert-list", "fused-gdn",
                           "weight-stream", "wgmma"}) {
    SCOPED_TRACE(name);
    expect(model, {name});
  }
}

// Widths that fill neither tiles nor chunks, experts of unequal width, and other ratios of heads.
TEST_F(CudaConformance, OddShape) {
  ModelShape shape = tiny_shape(4);
  shape.hidden = 320;
  shape.vocab = 1003;
  shape.q_heads = 16;
  shape.kv_heads = 2;
  shape.gdn_key_heads = 3;
  shape.gdn_value_heads = 3;
  shape.experts = 17;
  shape.expert_width = 192;
  shape.shared_expert_width = 128;
  add_decode_batches();
  expect(RandomModel(shape, 8));
}

TEST_F(CudaConformance, FourValueHeadsAKeyHead) {
  ModelShape shape = tiny_shape(4);
  shape.gdn_key_heads = 2;
  shape.gdn_value_heads = 8;
  expect(RandomModel(shape, 9));
}

// The widths of the real model. One row runs through the token program, stage by stage here; the others through the
// decode kernels and the prefill kernels.
TEST_F(CudaConformance, FullWidth) {
  ModelShape shape = real_shape(2);
  shape.layer_kinds = {LayerKind::kGatedDeltaNet, LayerKind::kAttention};
  shape.vocab = 8192;
  options_.batches = {{"decode at 200", {{200, 1}}},
                      {"decode of 3", {{0, 1}, {77, 1}, {192, 1}}},
                      {"decode of 9", {{0, 1}, {3, 1}, {6, 1}, {9, 1}, {12, 1}, {15, 1}, {18, 1}, {21, 1}, {24, 1}}},
                      {"prefill 33 at 130", {{130, 33}}}};
  const RandomModel model(shape, 10);
  expect(model);
  options_.batches.resize(1);
  expect(model, {"token-program"});
}

}  // namespace
}  // namespace calla
