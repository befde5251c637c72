// Which backend a name means.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/create.h"
#include "base/error.h"
#include "selftest/random_model.h"

namespace calla {
namespace {

TEST(CreateBackend, AutoIsTheFirstRealDevice) {
  const RandomModel model(tiny_shape(4), 1);
  std::string expected;
  for (const BackendInfo& info : list_backends())
    if (expected.empty() && info.available && !info.software) expected = info.name;
  EXPECT_NE(expected, "reference");
  const auto chosen = create_backend("auto", model.shape(), model.weights(), BackendOptions{});
  EXPECT_EQ(chosen->name(), expected);
}

// A device in software is there for tests: never chosen, and it says what it is.
TEST(CreateBackend, ASoftwareDeviceIsChosenByNameOnly) {
  const RandomModel model(tiny_shape(4), 1);
  bool seen = false;
  for (const BackendInfo& info : list_backends()) {
    if (!info.available || !info.software) continue;
    seen = true;
    const auto by_name = create_backend(info.name, model.shape(), model.weights(), BackendOptions{});
    EXPECT_THAT(by_name->description(), ::testing::HasSubstr("in software"));
    EXPECT_NE(create_backend("auto", model.shape(), model.weights(), BackendOptions{})->name(), info.name);
  }
#if defined(CALLA_HAS_METAL) && !defined(__APPLE__)
  EXPECT_TRUE(seen) << "softmetal is a software device";
#endif
  if (!seen) GTEST_SKIP() << "every device of this build is a real one";
}

TEST(CreateBackend, UnknownNamesAreRefused) {
  const RandomModel model(tiny_shape(4), 1);
  EXPECT_THROW(create_backend("gpu", model.shape(), model.weights(), BackendOptions{}), UsageError);
}

// Every name that a backend lists for --ablate is one that it takes; `all` is none.
TEST(CreateBackend, AblationsAreTaken) {
  const RandomModel model(tiny_shape(4), 1);
  for (const BackendInfo& info : list_backends()) {
    if (!info.available) continue;
    BackendOptions options;
    for (const std::string& name : info.ablations) {
      options.ablate = {name};
      EXPECT_NO_THROW(create_backend(info.name, model.shape(), model.weights(), options)) << info.name << " " << name;
    }
    options.ablate = {"all"};
    EXPECT_THROW(create_backend(info.name, model.shape(), model.weights(), options), UsageError) << info.name;
  }
}

}  // namespace
}  // namespace calla
