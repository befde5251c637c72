// Golden outputs of an independent implementation on the Metal backend, whole model: every case of both small
// checkpoints, long texts cut (metal_full_test has all of them), in both matrix-unit forms.
#include "tests/backend/metal_golden.h"

#include <algorithm>

#include "tests/backend/bf16_reference.h"

namespace calla {
namespace {

class MetalGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(MetalGolden, CallaTinyAnswers) {
  expect_metal_golden(GetParam(), {kCallaTiny, {"chat0", "chat1", "chat2", "chat3", "chat4", "chat5", "chat6"}});
}
TEST_P(MetalGolden, CallaTinyLongPrompts) {
  expect_metal_golden(GetParam(), {kCallaTiny, {"chat7", "chat8", "chat9"}, 12});
}
TEST_P(MetalGolden, CallaTinyTexts) { expect_metal_golden(GetParam(), {kCallaTiny, {"passage", "heldout"}, 192}); }
TEST_P(MetalGolden, TinyRandom) { expect_metal_golden(GetParam(), {kTinyRandom, {}, 192}); }

INSTANTIATE_TEST_SUITE_P(Forms, MetalGolden, ::testing::ValuesIn(kMetalForms),
                         [](const auto& test) { return std::string(test.param); });

// Why random weights have a tolerance of their own: rounding the reference's activations to bf16, which no kernel can
// undo, already leaves the tolerance of trained weights, and stays within the wider one. docs/metal.md has more numbers.
TEST(MetalGoldenTolerance, IsThatOfBf16) {
  const auto results = golden_results({kTinyRandom, {"len1", "len64"}}, [](const auto&... arguments) {
    return std::make_unique<Bf16Reference>(arguments...);
  });
  expect_golden_results(results);
  const double k_cache = std::find_if(results.begin(), results.end(), [](const GoldenResult& r) {
                           return r.kind == "attn3/k_cache";
                         })->relative;
  EXPECT_GT(k_cache, fast_tolerance().state);
}

// And no single stage is to blame: with one slot rounded and all else in fp32 (the GDN layers' projections, whose rows the
// checkpoint's own cache keeps in bf16), an answer leaves the golden one where that is sure enough to be judged.
TEST(MetalGoldenTolerance, IsNotThatOfOneStage) {
  for (const bool judged_as_trained : {true, false}) {
    MetalGoldenRun run{kTinyRandom, {"greedy7"}};
    if (judged_as_trained) run.tolerance = fast_tolerance();
    const auto results = golden_results(run, [](const auto&... arguments) {
      return std::make_unique<Bf16Reference>(arguments..., std::vector{Slot::kGdnQkv});
    });
    ASSERT_EQ(results.size(), 1u);
    EXPECT_NE(results[0].ok, judged_as_trained) << results[0].note;
  }
}

class MetalGoldenAblation : public ::testing::TestWithParam<std::string> {};

TEST_P(MetalGoldenAblation, TinyRandom) {
  expect_metal_golden("m5max", {kTinyRandom, {"len64", "greedy7"}, 0, {GetParam()}});
}

INSTANTIATE_TEST_SUITE_P(Each, MetalGoldenAblation, ::testing::ValuesIn(metal::ablation_names()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace calla
