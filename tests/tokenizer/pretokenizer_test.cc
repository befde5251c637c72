#include "tokenizer/pretokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tokenizer/char_class.h"
#include "tokenizer/qwen_words.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> split(const PreTokenizer& pretokenizer, std::string_view text) {
  std::vector<std::string> out;
  PreTokenizer::Words words(pretokenizer, text);
  for (std::string_view word; words.next(word);) out.emplace_back(word);
  return out;
}

const std::string kPattern(kQwenPattern);

class QwenPattern : public ::testing::TestWithParam<PreTokenizer::Engine> {
 protected:
  std::vector<std::string> split(std::string_view text) const {
    return ::calla::split(PreTokenizer(kPattern, GetParam()), text);
  }
};

TEST_P(QwenPattern, SplitsWords) {
  EXPECT_THAT(split(""), ElementsAre());
  EXPECT_THAT(split("Hello, world!"), ElementsAre("Hello", ",", " world", "!"));
  EXPECT_THAT(split("a1b22 33"), ElementsAre("a", "1", "b", "2", "2", " ", "3", "3"));
  EXPECT_THAT(split("don't I'LL 'sx"), ElementsAre("don", "'t", " I", "'LL", " '", "sx"));
  EXPECT_THAT(split("it'\u017f 'rex"), ElementsAre("it", "'\u017f", " '", "rex"));
  EXPECT_THAT(split("('re"), ElementsAre("('", "re"));
  EXPECT_THAT(split("(x.y)"), ElementsAre("(x", ".y", ")"));
}

TEST_P(QwenPattern, SplitsSpace) {
  EXPECT_THAT(split("a  b"), ElementsAre("a", " ", " b"));
  EXPECT_THAT(split("a   "), ElementsAre("a", "   "));
  EXPECT_THAT(split("a \n\n  b"), ElementsAre("a", " \n\n", " ", " b"));
  EXPECT_THAT(split("\t\tx\t!"), ElementsAre("\t", "\tx", "\t", "!"));
  EXPECT_THAT(split("x;\r\n\r\n  y"), ElementsAre("x", ";\r\n\r\n", " ", " y"));
  EXPECT_THAT(split("\nx"), ElementsAre("\n", "x"));
  EXPECT_THAT(split("1\u00a0\u3000\u20282"), ElementsAre("1", "\u00a0\u3000", "\u2028", "2"));
  EXPECT_THAT(split("\u180e\u180ea"), ElementsAre("\u180e\u180e", "a")) << "U+180E is not white space";
}

TEST_P(QwenPattern, SplitsScripts) {
  EXPECT_THAT(split("天气，好"), ElementsAre("天气", "，好"));
  EXPECT_THAT(split("e\u0301a \u0301b"), ElementsAre("e\u0301a", " \u0301b"));
  EXPECT_THAT(split("\u0301\u0301"), ElementsAre("\u0301\u0301"));
  EXPECT_THAT(split("١٢"), ElementsAre("١", "٢"));
  EXPECT_THAT(split("👩\u200d💻x"), ElementsAre("👩\u200d💻", "x"));
}

INSTANTIATE_TEST_SUITE_P(Engines, QwenPattern,
                         ::testing::Values(PreTokenizer::Engine::kAuto, PreTokenizer::Engine::kPcre2));

// The characters whose class is the same in the generated table and in the installed PCRE2 (an older or newer
// Unicode).
std::vector<char32_t> agreed_characters() {
  const std::pair<const char*, CharClass> kinds[] = {{"\\p{L}", CharClass::kLetter},
                                                     {"\\p{M}", CharClass::kMark},
                                                     {"\\p{N}", CharClass::kNumber},
                                                     {"\\s", CharClass::kSpace}};
  std::vector<char32_t> out;
  std::vector<PreTokenizer> engines;
  for (const auto& [regex, kind] : kinds) engines.emplace_back(regex + std::string("(?=!)"));
  for (char32_t c = 0; c < 0x110000; c = c == 0xd7ff ? 0xe000 : c + 1) {
    std::string text;
    append_utf8(c, text);
    text += '!';
    CharClass found = CharClass::kOther;
    for (size_t i = 0; i < engines.size(); ++i) {
      if (split(engines[i], text).size() == 2) found = kinds[i].second;
    }
    if (found == char_classes()[c]) out.push_back(c);
  }
  return out;
}

TEST(QwenScanner, GivesTheWordsOfTheRegex) {
  const std::vector<char32_t> characters = agreed_characters();
  EXPECT_GT(characters.size(), size_t{1090000}) << "the Unicode versions lie too far apart";
  const PreTokenizer scanner(kPattern), regex(kPattern, PreTokenizer::Engine::kPcre2);
  std::mt19937 random(7);
  const std::u32string near =
      U"  \n\r\t''''sStTrReEvVmMlLdD\u017faZ0\u0663.-!<\u00a0\u2003\u0301\u05b0\u00e9\u5929\U0001f600";
  for (int trial = 0; trial < 30000; ++trial) {
    std::string text;
    const size_t length = 1 + random() % 24;
    for (size_t i = 0; i < length; ++i)
      append_utf8(random() % 4 == 0 ? characters[random() % characters.size()] : near[random() % near.size()], text);
    ASSERT_EQ(split(scanner, text), split(regex, text)) << text;
  }
}

TEST(PreTokenizer, MakesAWordOfTheTextBetweenMatches) {
  EXPECT_THAT(split(PreTokenizer("[0-9]+"), "ab12cd3"), ElementsAre("ab", "12", "cd", "3"));
  EXPECT_THAT(split(PreTokenizer("(?<=a)b"), "abb"), ElementsAre("a", "b", "b"));
  EXPECT_THAT(split(PreTokenizer("x"), "abc"), ElementsAre("abc"));
}

TEST(PreTokenizer, TakesLongRunsOfSpace) {
  const std::string text(3 << 20, ' ');
  for (const auto engine : {PreTokenizer::Engine::kAuto, PreTokenizer::Engine::kPcre2}) {
    const PreTokenizer pretokenizer(kPattern, engine);
    EXPECT_EQ(split(pretokenizer, text).size(), 1u);
    EXPECT_THAT(split(pretokenizer, text + "x"), ElementsAre(std::string(text.size() - 1, ' '), " x"));
  }
}

std::string error_of(const std::string& pattern) {
  try {
    PreTokenizer{pattern};
    return "accepted";
  } catch (const CheckpointError& error) {
    return error.what();
  }
}

TEST(PreTokenizer, RefusesPatternsThatItCannotApply) {
  EXPECT_THAT(error_of("[a"), HasSubstr("not a regex"));
  EXPECT_THAT(error_of("a*"), HasSubstr("empty text"));
  EXPECT_THAT(error_of("\\w+"), HasSubstr("uses \\w, which"));
  EXPECT_THAT(error_of("\\Q\\s"), HasSubstr("uses \\Q, which"));
  EXPECT_THAT(error_of("[]\\s]"), HasSubstr("bracket at the start"));
  EXPECT_THAT(error_of("[a&&b]"), HasSubstr("&&"));
  EXPECT_THAT(error_of("[^\\S]"), HasSubstr("\\S in brackets"));
  EXPECT_THAT(error_of("[[:alpha:]]"), HasSubstr("brackets"));
  EXPECT_THAT(error_of("a\\"), HasSubstr("not a regex"));
}

}  // namespace
}  // namespace calla
