#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/check.h"

namespace calla {

// Of at least one value; of an even number the mean of the middle two, so that two measurements do not count as the faster.
inline double median(std::vector<double> values) {
  check(!values.empty(), "a median is of something");
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace calla
