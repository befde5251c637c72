// The Metal backend at the sizes of Qwen3.6-35B-A3B: 2,048 wide, 256 experts, a vocabulary of 248,320; one layer of each
// kind, in both matrix-unit forms and with each mechanism switched off. What takes longer is in metal_full_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/backend/expect_conforms.h"
#include "tests/backend/metal_device.h"
#include "tests/backend/metal_real_widths.h"
#include "tests/backend/reference_tape.h"

namespace calla {
namespace {

TEST(MetalRealWidths, Decode) {
  const RandomModel model(one_layer_of_each_kind(), 14);
  ReferenceTape tape;
  for (const char* chip : kMetalForms) {
    SCOPED_TRACE(chip);
    const MetalDevice device(chip);
    ConformanceOptions options;
    options.reference = taped_reference(tape);
    options.batches = {{"decode at 70", {{70, 1}}}};
    expect_conforms(metal_factory_of(chip, few_rows_checked()), model, options);
  }
}

TEST(MetalRealWidths, DecodeInFixedBlocks) {
  const RandomModel model(one_layer_of_each_kind(), 15);
  const MetalDevice device;
  metal::MetalTestOptions test_options = few_rows_checked();
  test_options.fixed_block_from = 512;
  ConformanceOptions options;
  options.stages = {"attend"};
  options.batches = {{"decode at 1100", {{1100, 1}}}};
  expect_conforms(metal_factory(test_options), model, options);
}

TEST(MetalRealWidths, DecodeWithoutEachMechanism) {
  const RandomModel model(one_layer_of_each_kind(), 16);
  const MetalDevice device;
  ReferenceTape tape;
  for (const std::string& name : metal::ablation_names()) {
    SCOPED_TRACE(name);
    ConformanceOptions options;
    options.reference = taped_reference(tape);
    options.backend.ablate = {name};
    options.stages = layer_stages();
    options.batches = {{"decode at 600", {{600, 1}}}};  // several key ranges
    expect_conforms(metal_factory(few_rows_checked()), model, options);
  }
}

#ifndef __APPLE__
// The start-up check of tensor operations at the real size: what is right is taken, what is wrong is not.
TEST(MetalRealWidths, TensorOpsAreTakenIfRight) {
  const RandomModel model(one_layer_of_each_kind(), 18);
  const auto describe = [&](softmetal::TensorFault fault) {
    const MetalDevice device("m5max");
    plant(fault);
    return metal::MetalBackend(model.shape(), model.weights(), BackendOptions{}, few_rows_checked()).description();
  };
  EXPECT_TRUE(describe(softmetal::TensorFault::kNone).ends_with("GEMM with tensor operations"));
  for (const softmetal::TensorFault fault : kTensorFaults) {
    const std::string description = describe(fault);
    EXPECT_THAT(description, ::testing::HasSubstr("not with tensor operations: their results are off by"));
    EXPECT_THAT(description, ::testing::HasSubstr("at 17 x 2048 x 4096"));
  }
}
#endif

class MetalRealWidthsPrefill : public ::testing::TestWithParam<const char*> {};

TEST_P(MetalRealWidthsPrefill, Conforms) {
  const RandomModel model(one_layer_of_each_kind(), 17);
  const MetalDevice device(GetParam());
  ConformanceOptions options;
  options.stages = layer_stages();
  options.batches = {{"prefill 5 at 3", {{3, 5}}}, {"prefill 33 at 40", {{40, 33}}}};
  expect_conforms(metal_factory_of(GetParam(), few_rows_checked()), model, options);
}
INSTANTIATE_TEST_SUITE_P(Forms, MetalRealWidthsPrefill, ::testing::ValuesIn(kMetalForms),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace calla
