#include "tokenizer/added_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace calla {
namespace {

std::string shown(const AddedTokenFinder& finder, std::string_view text, size_t begin = 0,
                  size_t end = std::string_view::npos) {
  end = std::min(end, text.size());
  std::string out;
  while (const auto hit = finder.find(text, begin, end)) {
    out += std::to_string(hit->begin) + "-" + std::to_string(hit->end) + "=" + std::to_string(hit->id) + " ";
    begin = hit->end;
  }
  return out;
}

TEST(AddedTokenFinder, TakesTheLeftmostThenTheLongest) {
  const AddedTokenFinder finder({{"<a>", 1}, {"<a>b", 2}, {"<a>bcd", 3}, {"a>b", 4}, {"x", 5}});
  EXPECT_EQ(shown(finder, "<a>bc"), "0-4=2 ");
  EXPECT_EQ(shown(finder, "<a>bcd<a>"), "0-6=3 6-9=1 ");
  EXPECT_EQ(shown(finder, "<<a>b"), "1-5=2 ");
  EXPECT_EQ(shown(finder, "_a>bx"), "1-4=4 4-5=5 ");
  EXPECT_EQ(shown(finder, ""), "");
}

TEST(AddedTokenFinder, StaysWithinTheRange) {
  const AddedTokenFinder finder({{"<a>", 1}, {"<a>b", 2}});
  EXPECT_EQ(shown(finder, "<a>b<a>b", 0, 3), "0-3=1 ");
  EXPECT_EQ(shown(finder, "<a>b<a>b", 1, 6), "");
  EXPECT_EQ(shown(finder, "<a>b<a>b", 1), "4-8=2 ");
}

TEST(AddedTokenFinder, WorksWithOneStartByteAndWithNoTokens) {
  EXPECT_EQ(shown(AddedTokenFinder({{"<|im_end|>", 7}}), "<<|<|im_end|><|im_end|"), "3-13=7 ");
  EXPECT_EQ(shown(AddedTokenFinder({}), "<|im_end|>"), "");
}

TEST(AddedTokenFinder, HandlesBytesAbove127) {
  const AddedTokenFinder finder({{"\xc3\xa9", 1}, {"\xc3\xa9\xc3\xa9", 2}, {"z", 3}});
  EXPECT_EQ(shown(finder, "z\xc3\xa9\xc3\xa9\xc3\xa9\xc3"), "0-1=3 1-5=2 5-7=1 ");
}

}  // namespace
}  // namespace calla
