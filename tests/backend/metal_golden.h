#pragma once
// Golden files on the Metal backend, in a given matrix-unit form.
#include <gtest/gtest.h>

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
};

inline void expect_metal_golden(const char* chip, const MetalGoldenRun& run) {
  const MetalDevice device(chip);
  const std::string directory = std::string(CALLA_SOURCE_DIR) + "/" + run.model;
  const LoadedModel model = load_model(directory);
  GoldenOptions golden;
  golden.tolerance = fast_tolerance();
  golden.cases = run.cases;
  golden.prefix = run.prefix;
  BackendOptions options;
  options.max_rows = golden.chunk;
  options.max_heads = golden.max_heads;
  options.ablate = run.ablate;
  metal::MetalBackend backend(model.config.shape, model.weights, options);
  const auto results = run_golden(backend, model.config.shape, directory + "/golden.safetensors", golden);
  EXPECT_FALSE(results.empty());
  for (const GoldenResult& r : results)
    EXPECT_TRUE(r.ok) << r.name << " " << r.kind << ": relative error " << r.relative << ", max " << r.max_error
                      << ", top-1 " << r.top1 << ", perplexity " << r.perplexity << " " << r.note;
}

inline constexpr const char* kCallaTiny = "models/calla-tiny";
inline constexpr const char* kTinyRandom = "tests/data/tiny-random";

}  // namespace calla
