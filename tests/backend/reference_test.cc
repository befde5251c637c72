// The conformance suite itself: the reference agrees with itself, and a planted fault is found.
#include "tests/backend/expect_conforms.h"

namespace calla {
namespace {

TEST(Conformance, ReferenceAgreesWithItself) {
  const RandomModel model(tiny_shape(4), 7);
  ConformanceOptions options;
  options.tolerance = 0;
  options.batches = {{"decode of 2", {{0, 1}, {65, 1}}}, {"prefill 9 at 60", {{60, 9}}}};
  expect_conforms(create_reference_backend, model, options);
}

TEST(Conformance, FindsAWrongWeight) {
  const ModelShape shape = tiny_shape(4);
  const RandomModel model(shape, 7), other(shape, 8);
  ConformanceOptions options;
  options.batches = {{"decode at 3", {{3, 1}}}};
  const auto wrong = [&](const ModelShape& s, const ModelWeights&, const BackendOptions& o) {
    return create_reference_backend(s, other.weights(), o);
  };
  int failed = 0;
  for (const StageResult& r : run_conformance(wrong, model, options)) failed += !r.ok;
  EXPECT_GT(failed, 10);
}

}  // namespace
}  // namespace calla
