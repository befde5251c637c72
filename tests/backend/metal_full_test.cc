// What takes too long on softmetal for every run (`make metal-full`): whole golden files; answers, prefill at the real
// widths and memory checks with each mechanism switched off; the 32-row tiles that only long chunks use.
#include "backend/metal/policy.h"
#include "tests/backend/expect_conforms.h"
#include "tests/backend/metal_golden.h"
#include "tests/backend/metal_real_widths.h"
#include "tests/backend/reference_tape.h"

namespace calla {
namespace {

class MetalFull : public ::testing::TestWithParam<const char*> {};

TEST_P(MetalFull, CallaTiny) { expect_metal_golden(GetParam(), {kCallaTiny}); }
TEST_P(MetalFull, TinyRandom) { expect_metal_golden(GetParam(), {kTinyRandom}); }

TEST_P(MetalFull, AnswersWithoutEachMechanism) {
  for (const std::string& name : metal::ablation_names()) {
    SCOPED_TRACE(name);
    expect_metal_golden(GetParam(), {kCallaTiny, {"chat0", "chat6", "passage"}, 0, {name}});
  }
}

#ifndef __APPLE__
TEST_P(MetalFull, CheckedWithoutEachMechanism) {
  const RandomModel model(tiny_shape(4), 20);
  const MetalDevice device(GetParam(), true);
  ReferenceTape tape;
  for (const std::string& name : metal::ablation_names()) {
    SCOPED_TRACE(name);
    ConformanceOptions options;
    options.reference = taped_reference(tape);
    options.backend.ablate = {name};
    options.batches = {{"decode of 2 at 600", {{600, 1}, {70, 1}}}, {"ragged 5 + 1 + 35", {{3, 5}, {64, 1}, {60, 35}}}};
    expect_conforms(metal_factory_of(GetParam()), model, options);
  }
}
#endif

// Those that change what a prefill step runs. The others have other decode kernels, or wait more: with or without them 40
// rows go through the same kernels.
std::vector<std::string> prefill_mechanisms() {
  std::vector<std::string> names = metal::ablation_names();
  std::erase_if(names, [](const std::string& name) {
    return name == "row-parallel" || name == "gpu-handover" || name == "coalesced-kv" || name == "gqa-packing" ||
           name == "split-kv";
  });
  return names;
}

TEST_P(MetalFull, RealWidthsPrefillWithoutEachMechanism) {
  const RandomModel model(one_layer_of_each_kind(), 18);
  const MetalDevice device(GetParam());
  ReferenceTape tape;
  for (const std::string& name : prefill_mechanisms()) {
    SCOPED_TRACE(name);
    ConformanceOptions options;
    options.reference = taped_reference(tape);
    options.backend.ablate = {name};
    options.stages = layer_stages();
    options.batches = {{"prefill 40 at 30", {{30, 40}}}};
    expect_conforms(metal_factory_of(GetParam(), few_rows_checked()), model, options);
  }
}

// 32-row tiles at the real widths: full ones, ragged ones, and five of the shared expert. With 64 experts, so that 150
// rows are enough: such tiles are taken from 16 rows an expert on.
TEST_P(MetalFull, RealWidthsWideTiles) {
  ModelShape shape = one_layer_of_each_kind();
  shape.experts = 64;
  ASSERT_EQ(metal::Policy::expert_tile(150, shape.experts, true), 32);
  const RandomModel model(shape, 19);
  const MetalDevice device(GetParam());
  ConformanceOptions options;
  options.stages = {"experts_up", "experts_down"};
  options.batches = {{"prefill 150", {{0, 150}}}};
  expect_conforms(metal_factory_of(GetParam(), few_rows_checked()), model, options);
}

INSTANTIATE_TEST_SUITE_P(Forms, MetalFull, ::testing::ValuesIn(kMetalForms),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace calla
