// The two checkpoints in the repository, from the directory to the bound weights.
#include "model/load_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

namespace calla {
namespace {

const std::filesystem::path kSource = CALLA_SOURCE_DIR;

class LoadModel : public testing::TestWithParam<const char*> {};

TEST_P(LoadModel, BindsEveryTensorWithoutWarnings) {
  const LoadedModel model = load_model(kSource / GetParam());
  EXPECT_TRUE(model.warnings.empty()) << model.warnings[0];
  const ModelShape& shape = model.config.shape;
  EXPECT_EQ(shape.hidden, 256);
  EXPECT_EQ(shape.layers(), 8);
  EXPECT_EQ(shape.attention_layers(), 2);
  EXPECT_EQ(shape.vocab, 4096);
  EXPECT_EQ(shape.q_heads, 8);
  EXPECT_EQ(shape.kv_heads, 1);
  EXPECT_EQ(shape.rotary_dim, 64);
  EXPECT_EQ(shape.rope_theta, 1e7f);
  EXPECT_EQ(shape.gdn_key_heads, 2);
  EXPECT_EQ(shape.gdn_value_heads, 4);
  EXPECT_EQ(shape.experts, 32);
  EXPECT_EQ(shape.expert_width, 64);
  EXPECT_EQ(shape.shared_expert_width, 64);

  ASSERT_EQ(model.weights.layers.size(), 8u);
  uint64_t bound = 0;  // bytes that the views cover
  const auto count = [&](const WeightMatrix& m) {
    EXPECT_NE(m.codes, nullptr);
    EXPECT_NE(m.scales, nullptr);
    EXPECT_NE(m.biases, nullptr);
    bound += m.bytes();
  };
  count(model.weights.embedding);
  count(model.weights.lm_head);
  for (size_t i = 0; i < model.weights.layers.size(); ++i) {
    const LayerWeights& layer = model.weights.layers[i];
    EXPECT_EQ(layer.attention.has_value(), i % 4 == 3);
    EXPECT_EQ(layer.gdn.has_value(), i % 4 != 3);
    EXPECT_EQ(layer.moe.router.bits, 8);
    EXPECT_EQ(layer.moe.shared_expert_gate.bits, 8);
    EXPECT_EQ(layer.moe.expert_up_proj.bits, 4);
    EXPECT_EQ(layer.moe.expert_up_proj.stack, 32);
    const MoeWeights& moe = layer.moe;
    for (const WeightMatrix* m :
         {&moe.router, &moe.expert_gate_proj, &moe.expert_up_proj, &moe.expert_down_proj, &moe.shared_gate_proj,
          &moe.shared_up_proj, &moe.shared_down_proj, &moe.shared_expert_gate})
      count(*m);
    if (layer.gdn) {
      for (const WeightMatrix* m :
           {&layer.gdn->in_qkv, &layer.gdn->in_z, &layer.gdn->in_a, &layer.gdn->in_b, &layer.gdn->out})
        count(*m);
      EXPECT_EQ(layer.gdn->conv.size(), 1024u * 4);
    } else {
      for (const WeightMatrix* m :
           {&layer.attention->q, &layer.attention->k, &layer.attention->v, &layer.attention->out})
        count(*m);
    }
  }
  uint64_t quantised = 0;  // bytes of the quantised matrices in the file
  for (const Tensor& tensor : model.checkpoint.tensors()) {
    const bool matrix =
        tensor.name.ends_with(".scales") || tensor.name.ends_with(".biases") || tensor.dtype == Dtype::kU32;
    if (matrix) quantised += tensor.data.size();
  }
  EXPECT_EQ(bound, quantised);
}

// Views point into the mapping, and small vectors hold what the file holds.
TEST_P(LoadModel, PointsIntoTheMapping) {
  const LoadedModel model = load_model(kSource / GetParam());
  const Tensor* codes = model.checkpoint.find("language_model.model.layers.5.mlp.switch_mlp.down_proj.weight");
  ASSERT_NE(codes, nullptr);
  const WeightMatrix& down = model.weights.layers[5].moe.expert_down_proj;
  EXPECT_EQ(static_cast<const void*>(down.codes), codes->data.data());
  const auto file = model.checkpoint.mappings().at(0);
  EXPECT_GE(codes->data.data(), file.data());
  EXPECT_LE(codes->data.data() + codes->data.size(), file.data() + file.size());

  const Tensor* gamma = model.checkpoint.find("language_model.model.layers.2.input_layernorm.weight");
  ASSERT_NE(gamma, nullptr);
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(model.weights.layers[2].input_norm[i], gamma->float_at(i));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, LoadModel, testing::Values("models/calla-tiny", "tests/data/tiny-random"));

TEST(LoadModelTest, CallaTinySaysHowToSample) {
  const LoadedModel model = load_model(kSource / "models/calla-tiny");
  EXPECT_EQ(model.config.eos, (std::vector<TokenId>{4089, 4087}));
  EXPECT_EQ(model.config.generation.do_sample, true);
  EXPECT_EQ(model.config.generation.temperature, 0.6f);
  EXPECT_EQ(model.config.generation.top_k, 20);
  EXPECT_EQ(model.config.generation.top_p, 0.95f);
  EXPECT_FALSE(model.config.generation.min_p.has_value());
  EXPECT_EQ(model.config.shape.max_context, 32768);
}

}  // namespace
}  // namespace calla
