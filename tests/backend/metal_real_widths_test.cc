// The Metal backend at the sizes of Qwen3.6-35B-A3B: 2,048 wide, 256 experts, a vocabulary of 248,320; one layer of each
// kind, in both matrix-unit forms and with each mechanism switched off. What takes longer is in metal_full_test.
#include <gtest/gtest.h>

#include "tests/backend/expect_conforms.h"
#include "tests/backend/metal_device.h"
#include "tests/backend/metal_real_widths.h"

namespace calla {
namespace {

TEST(MetalRealWidths, Decode) {
  const RandomModel model(one_layer_of_each_kind(), 14);
  for (const char* chip : kMetalForms) {
    SCOPED_TRACE(chip);
    const MetalDevice device(chip);
    ConformanceOptions options;
    options.batches = {{"decode at 70", {{70, 1}}}};
    expect_conforms(metal_factory(few_rows_checked()), model, options);
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
  for (const std::string& name : metal::ablation_names()) {
    SCOPED_TRACE(name);
    ConformanceOptions options;
    options.backend.ablate = {name};
    options.stages = layer_stages();
    options.batches = {{"decode at 600", {{600, 1}}}};  // several key ranges
    expect_conforms(metal_factory(few_rows_checked()), model, options);
  }
}

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
