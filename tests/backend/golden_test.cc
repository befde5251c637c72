// Golden outputs of an independent implementation, on every backend of this build.
#include <gtest/gtest.h>

#include "backend/create.h"
#include "model/load_model.h"
#include "selftest/golden.h"

namespace calla {
namespace {

const std::string kRoot = CALLA_SOURCE_DIR;

void expect_golden(const std::string& backend_name, const std::string& model_directory, bool full_precision,
                   std::vector<std::string> cases = {}) {
  const LoadedModel model = load_model(model_directory);
  GoldenOptions golden;
  golden.tolerance = full_precision ? full_precision_tolerance() : fast_tolerance();
  golden.cases = std::move(cases);
  BackendOptions options;
  options.max_rows = golden.chunk;
  options.max_heads = golden.max_heads;
  options.full_precision = full_precision;
  const auto backend = create_backend(backend_name, model.config.shape, model.weights, options);
  const auto results = run_golden(*backend, model.config.shape, model_directory + "/golden.safetensors", golden);
  EXPECT_FALSE(results.empty());
  for (const GoldenResult& r : results)
    EXPECT_TRUE(r.ok) << r.name << " " << r.kind << ": relative error " << r.relative << ", max " << r.max_error
                      << ", top-1 " << r.top1.value_or(1) << ", perplexity " << r.perplexity << " " << r.note;
}

const std::string kCallaTiny = kRoot + "/models/calla-tiny";
const std::string kTinyRandom = kRoot + "/tests/data/tiny-random";

class GoldenTest : public ::testing::TestWithParam<std::string> {};

// The reference is slow and exact: it runs the short cases, in full precision.
TEST_P(GoldenTest, CallaTiny) {
  const bool reference = GetParam() == "reference";
  expect_golden(GetParam(), kCallaTiny, reference,
                reference ? std::vector<std::string>{"chat0", "chat6"} : std::vector<std::string>{});
}

TEST_P(GoldenTest, TinyRandom) {
  const bool reference = GetParam() == "reference";
  expect_golden(GetParam(), kTinyRandom, reference,
                reference ? std::vector<std::string>{"len1", "len7", "greedy7", "len64"} : std::vector<std::string>{});
}

TEST(GoldenFullPrecision, Cpu) {
  if (!cpu_backend_info().available) GTEST_SKIP() << cpu_backend_info().reason;
  expect_golden("cpu", kCallaTiny, true);
  expect_golden("cpu", kTinyRandom, true);
}

std::vector<std::string> backends() {
  std::vector<std::string> names;
  for (const BackendInfo& info : list_backends())
    if (info.available && !info.software) names.push_back(info.name);  // in software: metal_golden_test
  return names;
}

INSTANTIATE_TEST_SUITE_P(Backends, GoldenTest, ::testing::ValuesIn(backends()),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace calla
