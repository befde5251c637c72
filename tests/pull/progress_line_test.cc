#include "pull/progress_line.h"

#include <gtest/gtest.h>

namespace calla {
namespace {

TEST(ReadableBytes, KeepsThreeDigits) {
  EXPECT_EQ(readable_bytes(0), "0 B");
  EXPECT_EQ(readable_bytes(999), "999 B");
  EXPECT_EQ(readable_bytes(1000), "1.0 kB");
  EXPECT_EQ(readable_bytes(112'400'000), "112 MB");
  EXPECT_EQ(readable_bytes(20'430'000'000), "20.4 GB");
  EXPECT_EQ(readable_bytes(999'999), "1.0 MB");
}

TEST(ProgressLine, ShowsAllThatIsKnown) {
  PullProgress progress{.bytes_done = 9'600'000'000,
                        .bytes_total = 20'400'000'000,
                        .files_done = 3,
                        .files_total = 10,
                        .bytes_per_second = 112e6,
                        .seconds_left = 96};
  EXPECT_EQ(progress_line(progress, 80),
            "[===============>                ]  47%  9.6 GB of 20.4 GB  112 MB/s  1:36 left");
  EXPECT_EQ(progress_line(progress, 46), " 47%  9.6 GB of 20.4 GB  112 MB/s  1:36 left");
  EXPECT_EQ(progress_line(progress, 10), " 47%  9.6 ");
  progress.seconds_left = 3723;
  EXPECT_NE(progress_line(progress, 80).find("1:02:03 left"), std::string::npos);
}

TEST(ProgressLine, WorksAtBothEnds) {
  EXPECT_EQ(progress_line({}, 40), "[>                   ]   0%  0 B of 0 B");
  PullProgress progress{.bytes_done = 999, .bytes_total = 1000};
  EXPECT_NE(progress_line(progress, 60).find(" 99%"), std::string::npos);
  progress.bytes_done = 1000;
  EXPECT_EQ(progress_line(progress, 24), "100%  1.0 kB of 1.0 kB");
  EXPECT_EQ(progress_line(progress, 60).find('>'), std::string::npos);
  progress.bytes_done = 2000;  // never more than full
  EXPECT_NE(progress_line(progress, 60).find("100%"), std::string::npos);
  for (int width = 1; width < 100; ++width)
    EXPECT_LE(progress_line(progress, width).size(), static_cast<size_t>(width));
}

}  // namespace
}  // namespace calla
