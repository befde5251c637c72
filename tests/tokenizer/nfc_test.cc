#include "tokenizer/nfc.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tokenizer/utf8.h"

namespace calla {
namespace {

std::string utf8(std::u32string_view points) {
  std::string out;
  for (const char32_t c : points) append_utf8(c, out);
  return out;
}

std::string nfc(std::u32string_view points) {
  std::string buffer;
  return std::string(to_nfc(utf8(points), buffer));
}

TEST(Nfc, ComposesAndReorders) {
  EXPECT_EQ(nfc(U"e\u0301"), utf8(U"\u00e9"));
  EXPECT_EQ(nfc(U"a\u0301\u0323"), utf8(U"\u1ea1\u0301"));  // the dot below sorts first and composes
  EXPECT_EQ(nfc(U"\u0061\u0315\u0300\u05ae\u0062"), utf8(U"\u00e0\u05ae\u0315\u0062"));
  EXPECT_EQ(nfc(U"\u212b \u2126 \uf900"), utf8(U"\u00c5 \u03a9 \u8c48"));  // singletons
  EXPECT_EQ(nfc(U"\u0958"), utf8(U"\u0915\u093c"));                        // excluded from composition
  EXPECT_EQ(nfc(U"\u0301e"), utf8(U"\u0301e"));                            // a mark with nothing before it
  EXPECT_EQ(nfc(U"\u09c7\u09be"), utf8(U"\u09cb"));                        // the second part is no mark
  EXPECT_EQ(nfc(U"\ufb01"), utf8(U"\ufb01"));                              // compatibility forms stay
}

TEST(Nfc, ComposesHangul) {
  EXPECT_EQ(nfc(U"\u1112\u1161\u11ab"), utf8(U"\ud55c"));
  EXPECT_EQ(nfc(U"\ud558\u11ab"), utf8(U"\ud55c"));
  EXPECT_EQ(nfc(U"\ud55c\u11ab"), utf8(U"\ud55c\u11ab"));
  EXPECT_EQ(nfc(U"\u1112\u1161\u11a7"), utf8(U"\ud558\u11a7"));  // U+11A7 is no final jamo
}

TEST(Nfc, LeavesMarksAloneThatTheReferenceDoesNotKnow) {
  // U+1ABF (class 220, Unicode 13) would sort before U+0301 (230); the reference has older tables.
  EXPECT_EQ(nfc(U"x\u0301\u1abf"), utf8(U"x\u0301\u1abf"));
  EXPECT_EQ(nfc(U"e\u0301\u1abfe\u0301"), utf8(U"\u00e9\u1abf\u00e9"));
}

TEST(Nfc, DoesNotCopyTextThatIsComposedAlready) {
  for (const std::u32string_view points : {U"", U"plain ASCII", U"Zürich, naïve", U"天气很好。カタカナ", U"한국어",
                                           U"привет", U"👩‍💻", U"שלום مرحبا ελληνικά"}) {
    const std::string text = utf8(points);
    std::string buffer;
    const std::string_view result = to_nfc(text, buffer);
    EXPECT_EQ(result.data(), text.data()) << text;
    EXPECT_EQ(result.size(), text.size());
  }
}

TEST(Nfc, EndlessMarksTakeNearlyLinearTime) {
  std::string text = "a", buffer;
  for (int i = 0; i < 250000; ++i) text += utf8(U"\u0301\u0323");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(to_nfc(text, buffer).substr(0, 5), utf8(U"\u1ea1\u0323"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

}  // namespace
}  // namespace calla
