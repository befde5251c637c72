#pragma once
// The device that the Metal tests run on: on macOS the machine's own, elsewhere a software one, set up as a given chip
// and, if asked, with every memory check on.
#include <gtest/gtest.h>

#include "backend/metal/metal_backend.h"
#ifndef __APPLE__
#include "softmetal/softmetal.h"
#endif

namespace calla {

class MetalDevice {
 public:
#ifdef __APPLE__
  explicit MetalDevice(const char* /*chip*/ = "m5max", bool /*check*/ = false) {}
#else
  explicit MetalDevice(const char* chip = "m5max", bool check = false) {
    softmetal::Options options = softmetal::device_preset(chip);
    options.check = check;
    softmetal::set_options(options);
    softmetal::take_findings();
  }
  ~MetalDevice() {
    for (const softmetal::Finding& finding : softmetal::take_findings()) ADD_FAILURE() << softmetal::describe(finding);
    softmetal::set_options(softmetal::Options{});
  }
#endif
};

}  // namespace calla
