#include "chat/stop_strings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace calla {
namespace {

struct Stopped {
  std::string text;
  std::string stop;
  bool operator==(const Stopped&) const = default;
};

Stopped run(const std::vector<std::string>& stops, const std::vector<std::string>& chunks) {
  StopStrings strings(stops);
  Stopped result;
  for (const std::string& chunk : chunks) result.text += strings.push(chunk);
  result.text += strings.finish();
  if (strings.found()) result.stop = *strings.found();
  return result;
}

void expect_everywhere(const std::vector<std::string>& stops, const std::string& text, const Stopped& expected) {
  EXPECT_EQ(run(stops, {text}), expected) << text;
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(run(stops, bytes), expected) << text;
  for (size_t i = 1; i < text.size(); i++) {
    EXPECT_EQ(run(stops, {text.substr(0, i), text.substr(i)}), expected) << text << " at " << i;
  }
}

TEST(StopStrings, EndsBeforeTheFirstStop) {
  expect_everywhere({}, "abc", {"abc", ""});
  expect_everywhere({""}, "abc", {"abc", ""});
  expect_everywhere({"END"}, "textENDmore", {"text", "END"});
  expect_everywhere({"END"}, "text EN and", {"text EN and", ""});
  expect_everywhere({"END"}, "text EN", {"text EN", ""});
  expect_everywhere({"END"}, "ENENDEND", {"EN", "END"});
  expect_everywhere({"aab"}, "aaaab", {"aa", "aab"});
  expect_everywhere({"x", "bcx"}, "abcx", {"a", "bcx"});
  expect_everywhere({"abcd", "bc"}, "abcd", {"a", "bc"});
  expect_everywhere({"a"}, "a", {"", "a"});
  expect_everywhere({"ü"}, "grün", {"gr", "ü"});
  expect_everywhere({"\n\n", "Q:"}, "A\nB\n\nC", {"A\nB", "\n\n"});
}

TEST(StopStrings, HoldsBackNoMoreThanNeeded) {
  StopStrings strings({"\nUser:", "END"});
  EXPECT_EQ(strings.push("hello\n"), "hello");
  EXPECT_EQ(strings.push("Us"), "");
  EXPECT_EQ(strings.push("ual"), "\nUsual");
  EXPECT_EQ(strings.push(" E"), " ");
  EXPECT_EQ(strings.push("NE"), "EN");
  EXPECT_EQ(strings.push("ND"), "");
  EXPECT_EQ(*strings.found(), "END");
  EXPECT_EQ(strings.push("more"), "");
  EXPECT_EQ(strings.finish(), "");
}

}  // namespace
}  // namespace calla
