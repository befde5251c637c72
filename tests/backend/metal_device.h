#pragma once
// The device that the Metal tests run on: on macOS the machine's own, elsewhere a software one, set up as a given chip
// and, if asked, with every memory check on.
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "backend/metal/metal_backend.h"
#include "selftest/conformance.h"
#ifndef __APPLE__
#include "softmetal/softmetal.h"
#endif

namespace calla {

// A chip for each matrix-unit form: tensor operations, simdgroup matrices. (On a Mac both are the machine's own.)
inline constexpr const char* kMetalForms[] = {"m5max", "m4max"};

class MetalDevice {
 public:
#ifdef __APPLE__
  explicit MetalDevice(const char* /*chip*/ = "m5max", bool /*check*/ = false) {}
#else
  explicit MetalDevice(const char* chip = "m5max", bool check = false) {
    softmetal::Options options = softmetal::device_preset(chip);
    options.check = check;
    options.strict_bindings =
        true;  // each dispatch binds what its kernel takes: no more, no less, structs of equal size
    softmetal::set_options(options);
    softmetal::take_findings();
  }
  ~MetalDevice() {
    for (const softmetal::Finding& finding : softmetal::take_findings()) ADD_FAILURE() << softmetal::describe(finding);
    softmetal::set_options(softmetal::Options{});
  }
#endif
};

#ifndef __APPLE__
// Tensor operations that are wrong and say nothing.
inline constexpr softmetal::TensorFault kTensorFaults[] = {
    softmetal::TensorFault::kOneElement, softmetal::TensorFault::kDroppedTail, softmetal::TensorFault::kShortSums};

inline void plant(softmetal::TensorFault fault) {
  softmetal::Options options = softmetal::options();
  options.tensor_fault = fault;
  softmetal::set_options(options);
}
#endif

inline BackendFactory metal_factory(const metal::MetalTestOptions& test_options = {}) {
  return [test_options](const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options) {
    return std::make_unique<metal::MetalBackend>(shape, weights, options, test_options);
  };
}

// The same, where the form of the matrix products matters: one that the start-up check refuses would be replaced by the
// other, which conforms. (A Mac has the form that it has.)
inline BackendFactory metal_factory_of([[maybe_unused]] std::string_view chip,
                                       const metal::MetalTestOptions& test_options = {}) {
  return [=](const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options) {
    auto backend = std::make_unique<metal::MetalBackend>(shape, weights, options, test_options);
#ifndef __APPLE__
    const bool ablated = std::ranges::find(options.ablate, "tensor-ops") != options.ablate.end();
    EXPECT_EQ(backend->uses_tensor_ops(), chip.starts_with("m5") && !ablated) << backend->description();
#endif
    return backend;
  };
}

}  // namespace calla
