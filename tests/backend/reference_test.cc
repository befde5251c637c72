// The conformance suite itself: the reference agrees with itself, a planted fault is found, and a tape changes nothing.
#include "tests/backend/expect_conforms.h"
#include "tests/backend/reference_tape.h"

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

// A tape gives each run what the reference would have given it: the errors of a backend that is off are the same.
TEST(Conformance, ATapeReplacesTheReference) {
  const RandomModel model(tiny_shape(4), 7), other(model.shape(), 8);
  const auto off = [&](const ModelShape& shape, const ModelWeights&, const BackendOptions& backend_options) {
    return create_reference_backend(shape, other.weights(), backend_options);
  };
  ReferenceTape tape;
  std::vector<std::vector<StageResult>> runs;
  for (const bool taped : {false, true, true}) {
    ConformanceOptions options;
    options.batches = {{"decode of 2", {{0, 1}, {65, 1}}}, {"prefill 9 at 60", {{60, 9}}}};
    if (taped) options.reference = taped_reference(tape);
    runs.push_back(run_conformance(off, model, options));
  }
  EXPECT_TRUE(tape.full);
  for (const size_t taped : {1, 2}) {
    ASSERT_EQ(runs[taped].size(), runs[0].size());
    for (size_t i = 0; i < runs[0].size(); ++i)
      EXPECT_EQ(runs[taped][i].error, runs[0][i].error) << runs[0][i].stage << " -> " << runs[0][i].what;
  }
}

}  // namespace
}  // namespace calla
