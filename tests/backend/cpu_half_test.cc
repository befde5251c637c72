#include "backend/cpu/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace calla::cpu {
namespace {

TEST(Half, EveryNumberReturns) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const half h{static_cast<uint16_t>(bits)};
    const float x = to_float(h);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(to_float(to_half(x))));
    } else if (std::isfinite(x)) {
      EXPECT_EQ(to_half(x).bits, h.bits) << x;
    }
  }
}

TEST(Half, RoundsToNearestTiesToEven) {
  for (uint32_t bits = 0; bits + 1 < 0x7c00; ++bits) {
    const float low = to_float(half{static_cast<uint16_t>(bits)});
    const float high = to_float(half{static_cast<uint16_t>(bits + 1)});
    const float middle = low + (high - low) / 2;
    EXPECT_EQ(to_half(middle).bits, bits + (bits & 1));
    EXPECT_EQ(to_half(std::nextafter(middle, low)).bits, bits);
    EXPECT_EQ(to_half(std::nextafter(middle, high)).bits, bits + 1);
    EXPECT_EQ(to_half(-middle).bits, 0x8000 | (bits + (bits & 1)));
  }
}

TEST(Half, OutOfRangeBecomesTheLargest) {
  EXPECT_EQ(to_float(to_half(1e6f)), 65504);
  EXPECT_EQ(to_float(to_half(-std::numeric_limits<float>::infinity())), -65504);
}

}  // namespace
}  // namespace calla::cpu
