// Every stage of the Metal backend against the reference. On Linux the kernels and the host code run on softmetal.
#include <gtest/gtest.h>

#include "backend/metal/metal_backend.h"
#include "tests/backend/expect_conforms.h"

namespace calla {
namespace {

BackendFactory metal(const MetalTestOptions& test_options = {}) {
  return [test_options](const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options) {
    return std::make_unique<MetalBackend>(shape, weights, options, test_options);
  };
}

TEST(MetalConformance, Tiny) {
  const RandomModel model(tiny_shape(4), 7);
  expect_conforms(metal(), model, ConformanceOptions{});
}

}  // namespace
}  // namespace calla
