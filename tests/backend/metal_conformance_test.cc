// Every stage of the Metal backend against the reference: both matrix-unit forms, each mechanism switched off, and under
// softmetal's memory checks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/backend/expect_conforms.h"
#include "tests/backend/metal_device.h"
#include "tests/backend/reference_tape.h"

namespace calla {
namespace {

using metal::MetalTestOptions;

TEST(MetalConformance, TensorOps) {
  const MetalDevice device("m5max");
  const RandomModel model(tiny_shape(4), 7);
  expect_conforms(metal_factory_of("m5max"), model, ConformanceOptions{});
}

TEST(MetalConformance, SimdgroupMatrices) {
  const MetalDevice device("m4max");
  const RandomModel model(tiny_shape(4), 8);
  expect_conforms(metal_factory_of("m4max"), model, ConformanceOptions{});
}

// Formats that other checkpoints have: 8 bits, groups of 32 and 128.
TEST(MetalConformance, OtherFormats) {
  const MetalDevice device("m1");
  ConformanceOptions options;
  options.batches = {{"decode at 5", {{5, 1}}}, {"prefill 33 at 130", {{130, 33}}}};
  for (const auto& [bits, group] : {std::pair{8, 64}, {4, 32}, {8, 32}}) {
    SCOPED_TRACE(std::to_string(bits) + " bits, groups of " + std::to_string(group));
    const RandomModel model(tiny_shape(4), 9, bits, group);
    expect_conforms(metal_factory(), model, options);
  }
}

// Decode attention in fixed blocks, without a context of 32K: several blocks, the last one short, and one that only
// some rows of the batch reach.
TEST(MetalConformance, FixedBlocks) {
  const MetalDevice device;
  MetalTestOptions test_options;
  test_options.fixed_block_from = 64;
  const RandomModel model(tiny_shape(4), 10);
  ConformanceOptions options;
  options.stages = {"attend"};
  options.batches = {{"decode at 1300", {{1300, 1}}}, {"decode of 3", {{10, 1}, {511, 1}, {512, 1}}}};
  expect_conforms(metal_factory(test_options), model, options);
}

TEST(MetalConformance, GeneralLayoutWithSeveralRanges) {
  const MetalDevice device;
  const RandomModel model(tiny_shape(4), 11);
  ConformanceOptions options;
  options.stages = {"attend"};
  options.batches = {{"decode at 1300", {{1300, 1}}}, {"decode of 2", {{3, 1}, {700, 1}}}};
  expect_conforms(metal_factory(), model, options);
}

class MetalAblation : public ::testing::TestWithParam<std::string> {};

TEST_P(MetalAblation, Conforms) {
  const RandomModel model(tiny_shape(4), 12);
  ReferenceTape tape;
  for (const char* chip : kMetalForms) {
    SCOPED_TRACE(chip);
    const MetalDevice device(chip);
    ConformanceOptions options;
    options.reference = taped_reference(tape);
    options.backend.ablate = {GetParam()};
    options.batches = {{"decode at 300", {{300, 1}}}, {"prefill 70 at 5", {{5, 70}}}};
    expect_conforms(metal_factory_of(chip), model, options);
  }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Each, MetalAblation, ::testing::ValuesIn(metal::ablation_names()), test_name);

#ifndef __APPLE__
// A GPU whose tensor elements lie otherwise than the kernels assume: the start-up check sees it, the simdgroup form takes
// over and says why, and the results are right.
TEST(MetalConformance, UnknownTensorLayoutFallsBack) {
  const MetalDevice device("m5max");
  softmetal::Options shuffled = softmetal::options();
  shuffled.tensor_layout = softmetal::TensorLayout::kShuffled;
  softmetal::set_options(shuffled);
  const RandomModel model(tiny_shape(4), 15);
  const metal::MetalBackend backend(model.shape(), model.weights(), BackendOptions{});
  EXPECT_FALSE(backend.uses_tensor_ops());
  EXPECT_THAT(backend.description(), ::testing::HasSubstr("not with tensor operations: this GPU lays their elements"));
  ConformanceOptions options;
  options.batches = {{"prefill 33 at 130", {{130, 33}}}};
  expect_conforms(metal_factory(), model, options);
}

// The same where the elements lie as they should and the numbers are wrong.
TEST(MetalConformance, WrongTensorNumbersFallBack) {
  const RandomModel model(tiny_shape(4), 16);
  for (const softmetal::TensorFault fault : kTensorFaults) {
    SCOPED_TRACE(static_cast<int>(fault));
    const MetalDevice device("m5max");
    plant(fault);
    const metal::MetalBackend backend(model.shape(), model.weights(), BackendOptions{});
    EXPECT_FALSE(backend.uses_tensor_ops());
    EXPECT_THAT(
        backend.description(),
        ::testing::HasSubstr("GEMM with simdgroup matrices (not with tensor operations: their results are off"));
    ConformanceOptions options;
    options.batches = {{"prefill 33 at 130", {{130, 33}}}};
    expect_conforms(metal_factory(), model, options);
  }
}

// And a right device does not: nothing to say, whatever the number of rows of a step.
TEST(MetalConformance, RightTensorOpsAreTaken) {
  const RandomModel model(tiny_shape(4), 17);
  for (const int rows : {1, 7, 64}) {
    BackendOptions options;
    options.max_rows = rows;
    {
      const MetalDevice device("m5max");
      const metal::MetalBackend backend(model.shape(), model.weights(), options);
      EXPECT_TRUE(backend.uses_tensor_ops());
      EXPECT_TRUE(backend.description().ends_with("GEMM with tensor operations")) << backend.description();
    }
    const MetalDevice device("m4max");
    const metal::MetalBackend backend(model.shape(), model.weights(), options);
    EXPECT_FALSE(backend.uses_tensor_ops());
    EXPECT_TRUE(backend.description().ends_with("GEMM with simdgroup matrices")) << backend.description();
  }
}

// No access out of bounds, no read of what nothing wrote, no race in a kernel, no missing barrier between two.
TEST(MetalChecked, EveryStage) {
  for (const char* chip : kMetalForms) {
    const MetalDevice device(chip, true);
    const RandomModel model(tiny_shape(4), 13);
    ConformanceOptions options;
    options.batches = {{"decode of 2 at 300", {{300, 1}, {70, 1}}}, {"ragged 5 + 1 + 35", {{3, 5}, {64, 1}, {60, 35}}}};
    expect_conforms(metal_factory(), model, options);
  }
}
#endif

}  // namespace
}  // namespace calla
