#pragma once
// What the conformance tests of all backends share: run, and fail with a readable table.
#include <gtest/gtest.h>

#include <sstream>

#include "backend/create.h"
#include "selftest/conformance.h"

namespace calla {

inline void expect_conforms(const BackendFactory& factory, const RandomModel& model,
                            const ConformanceOptions& options) {
  const std::vector<StageResult> results = run_conformance(factory, model, options);
  ASSERT_FALSE(results.empty());
  for (const StageResult& r : results)
    EXPECT_TRUE(r.ok) << r.stage << " -> " << r.what << ", " << r.batch << ": relative error " << r.error << " > "
                      << r.tolerance;
}

}  // namespace calla
