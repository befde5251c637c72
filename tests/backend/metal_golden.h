#pragma once
// Golden files on the Metal backend, in a given matrix-unit form.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "model/load_model.h"
#include "selftest/golden.h"
#include "tests/backend/metal_device.h"

namespace calla {

struct MetalGoldenRun {
  std::string model;               // a directory of the source tree with a golden.safetensors
  std::vector<std::string> cases;  // empty: all
  int prefix = 0;                  // tokens of each text and answer; 0: all
  std::vector<std::string> ablate;
  std::optional<GoldenTolerance> tolerance;  // empty: what `model` is judged by
};

inline constexpr const char* kCallaTiny = "models/calla-tiny";
inline constexpr const char* kTinyRandom = "tests/data/tiny-random";

// `make(shape, weights, options)` gives the backend.
template <class Make>
std::vector<GoldenResult> golden_results(const MetalGoldenRun& run, Make make) {
  const std::string directory = std::string(CALLA_SOURCE_DIR) + "/" + run.model;
  const LoadedModel model = load_model(directory);
  GoldenOptions golden;
  golden.tolerance = run.tolerance.value_or(run.model == kTinyRandom ? bf16_random_tolerance() : fast_tolerance());
  golden.cases = run.cases;
  golden.prefix = run.prefix;
  BackendOptions options;
  options.max_rows = golden.chunk;
  options.max_heads = golden.max_heads;
  options.ablate = run.ablate;
  const auto backend = make(model.config.shape, model.weights, options);
  return run_golden(*backend, model.config.shape, directory + "/golden.safetensors", golden);
}

inline void expect_golden_results(const std::vector<GoldenResult>& results) {
  EXPECT_FALSE(results.empty());
  for (const GoldenResult& r : results)
    EXPECT_TRUE(r.ok) << r.name << " " << r.kind << ": relative error " << r.relative << ", max " << r.max_error
                      << ", top-1 " << r.top1.value_or(1) << ", perplexity " << r.perplexity << " " << r.note;
}

inline void expect_metal_golden(const char* chip, const MetalGoldenRun& run) {
  const MetalDevice device(chip);
  expect_golden_results(golden_results(run, metal_factory()));
}

}  // namespace calla
