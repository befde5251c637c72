#include "tokenizer/text_stream.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/tokenizer/tiny_json.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

std::vector<std::string> pushed(const std::vector<std::string>& pieces) {
  Utf8Joiner joiner;
  std::vector<std::string> out;
  for (const std::string& piece : pieces) out.push_back(joiner.push(piece));
  out.push_back(joiner.finish());
  return out;
}

TEST(Utf8Joiner, JoinsCharactersThatAreSplitOverTokens) {
  const std::vector<std::string> pieces = {"\xf0\x9f", "\x91\xa9\xe2", "\x80", "\x8d\xf0\x9f\x92", "\xbb",
                                           " ",        "\xe6\x97"};
  EXPECT_EQ(pushed(pieces),
            (std::vector<std::string>{"", "\U0001f469", "", "\u200d", "\U0001f4bb", " ", "", "\ufffd"}));
}

TEST(Utf8Joiner, ReplacesInvalidBytesAtOnce) {
  EXPECT_EQ(pushed({"a\xff", "b"}), (std::vector<std::string>{"a\ufffd", "b", ""}));
  EXPECT_EQ(pushed({"\xe6", "x"}), (std::vector<std::string>{"", "\ufffdx", ""}));  // a cut character, then ASCII
  EXPECT_EQ(pushed({"\x80"}), (std::vector<std::string>{"\ufffd", ""}));            // a lone continuation
  EXPECT_EQ(pushed({"\xed", "\xa0"}), (std::vector<std::string>{"", "\ufffd\ufffd", ""}));  // a surrogate
  EXPECT_EQ(pushed({"\xf0\x9f\x92", "\xc3", "\xa9"}), (std::vector<std::string>{"", "\ufffd", "\u00e9", ""}));
}

TEST(Utf8Joiner, GivesTheSameTextForAnySplit) {
  std::mt19937 random(3);
  const std::vector<std::string> parts = {"a",        "\u00e9", "\u5929",   "\U0001f469", "\xff",
                                          "\xe5\xa4", "\x80",   "\xf0\x9f", "\xc3"};
  for (int trial = 0; trial < 2000; ++trial) {
    std::string bytes;
    for (int i = 0; i < 12; ++i) bytes += parts[random() % parts.size()];
    Utf8Joiner joiner;
    std::string text;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = 1 + random() % 4;
      const std::string piece = joiner.push(std::string_view(bytes).substr(at, n));
      EXPECT_EQ(utf8_error_offset(piece), piece.size()) << "every piece is valid by itself";
      text += piece;
      at += n;
    }
    text += joiner.finish();
    EXPECT_EQ(text, repair_utf8(bytes));
  }
}

TEST(TextStream, SkipsSpecialTokensIfAsked) {
  const auto tokenizer = Tokenizer::parse(test::tiny_json({}).dump());
  const TokenId special = *tokenizer.find("<|a|>"), plain = *tokenizer.find("<b>");
  for (const bool skip : {true, false}) {
    TextStream stream(tokenizer, skip);
    EXPECT_EQ(stream.push(special), skip ? "" : "<|a|>");
    EXPECT_EQ(stream.push(plain), "<b>");
    EXPECT_EQ(stream.push(0xc3), "");
    EXPECT_EQ(stream.push(special), skip ? "" : "\ufffd<|a|>");
    EXPECT_EQ(stream.push(0xa9), skip ? "\u00e9" : "\ufffd");
    EXPECT_EQ(stream.push(tokenizer.vocab_size() + 5), "") << "a padding row of the model";
    EXPECT_EQ(stream.push('x'), "x");
    EXPECT_EQ(stream.finish(), "");
  }
}

TEST(RepairUtf8, ReplacesEachLongestPartOnce) {
  EXPECT_EQ(repair_utf8("ok \u00e9"), "ok \u00e9");
  EXPECT_EQ(repair_utf8("\xf0\x9f\x91"), "\ufffd");    // cut at the end
  EXPECT_EQ(repair_utf8("\xf0\x9f\x91x"), "\ufffdx");  // cut in the middle
  EXPECT_EQ(repair_utf8("\xc0\xaf"), "\ufffd\ufffd");  // overlong
  EXPECT_EQ(repair_utf8("\xe0\x80\xaf"), "\ufffd\ufffd\ufffd");
  EXPECT_EQ(repair_utf8("\xed\xa0\x80"), "\ufffd\ufffd\ufffd");            // surrogate
  EXPECT_EQ(repair_utf8("\xf4\x90\x80\x80"), "\ufffd\ufffd\ufffd\ufffd");  // beyond U+10FFFF
  EXPECT_EQ(repair_utf8("\xf8\x88\x80\x80\x80"), "\ufffd\ufffd\ufffd\ufffd\ufffd");
}

}  // namespace
}  // namespace calla
