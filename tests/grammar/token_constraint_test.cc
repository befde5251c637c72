// From bytes to tokens: the mask is exactly the set of tokens whose bytes fit, whatever short cuts made it.
#include "grammar/token_constraint.h"

#include <gtest/gtest.h>

#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/schema.h"
#include "tests/grammar/vocabulary.h"

namespace calla {
namespace {

bool bit(const std::vector<uint32_t>& mask, TokenId token) {
  return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) != 0;
}

class Masks : public testing::TestWithParam<const char*> {};

// Random walks; at each step the mask is compared with a look at every single token.
TEST_P(Masks, EqualTheTokensThatFit) {
  const TestVocabulary vocabulary = made_up_vocabulary(1500, 7);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  const auto grammar = compile_schema(GetParam());
  const std::vector<TokenId> stops{vocabulary.stop};
  std::mt19937_64 random(11);
  for (int walk = 0; walk < 6; ++walk) {
    GrammarConstraint constraint(trie, grammar, stops);
    std::vector<uint32_t> mask(vocabulary.texts.size() / 32 + 3,
                               0xffffffffu);  // longer than needed: a padded vocabulary
    for (int step = 0; step < 40; ++step) {
      ASSERT_TRUE(constraint.allowed(mask));
      std::vector<TokenId> allowed;
      for (TokenId token = 0; token < static_cast<TokenId>(mask.size() * 32); ++token) {
        const bool is_text = token < static_cast<TokenId>(vocabulary.texts.size()) &&
                             !vocabulary.texts[static_cast<size_t>(token)].empty() && !trie->is_markup(token);
        const bool fits = is_text ? constraint.fits(vocabulary.texts[static_cast<size_t>(token)])
                                  : token == vocabulary.stop && constraint.complete();
        ASSERT_EQ(bit(mask, token), fits) << "token " << token << " at step " << step;
        if (fits && token != vocabulary.stop) allowed.push_back(token);
      }
      if (allowed.empty()) break;
      constraint.accept(allowed[random() % allowed.size()]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schemas, Masks,
    testing::Values(
        R"(true)", R"({"type":"object"})", R"({"type":"string"})", R"({"type":"string","maxLength":9})",
        R"({"type":"string","minLength":3,"maxLength":40})",
        R"({"type":"array","items":{"type":"string","maxLength":3}})",
        R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string","pattern":"^[a-z ]*$"},{"type":"null"}]})",
        R"({"anyOf":[{"type":"string"},{"type":"string","pattern":"^[a-z]+$"}]})",
        R"({"type":"object","properties":{"name":{"type":"string"},"value":{"type":"number"}}})",
        R"({"type":"integer","minimum":-100,"maximum":12345})"));

TEST(TokenTrie, FindsMarkupAndKeepsDuplicates) {
  TestVocabulary vocabulary = made_up_vocabulary(600, 3);
  const auto copy = static_cast<TokenId>(vocabulary.texts.size());
  vocabulary.texts.push_back("true");
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  EXPECT_EQ(trie->bytes(trie->find_markup("<tool_call>")), "<tool_call>");
  EXPECT_EQ(trie->find_markup("true"), -1);
  GrammarConstraint constraint(trie, compile_schema(R"({"type":"boolean"})"), std::vector<TokenId>{vocabulary.stop});
  std::vector<uint32_t> mask((vocabulary.texts.size() + 31) / 32);
  constraint.allowed(mask);
  EXPECT_TRUE(bit(mask, copy));
  constraint.accept(copy);
  EXPECT_TRUE(constraint.complete());
  constraint.allowed(mask);
  EXPECT_TRUE(bit(mask, vocabulary.stop));
  constraint.accept(vocabulary.stop);
  constraint.allowed(mask);
  for (TokenId token = 0; token < static_cast<TokenId>(vocabulary.texts.size()); ++token)
    EXPECT_EQ(bit(mask, token), token == vocabulary.stop);
}

TEST(TokenTrie, NeedsAllBytes) {
  TestVocabulary vocabulary = made_up_vocabulary(600, 3);
  vocabulary.texts[static_cast<size_t>('{')] = "<>";
  EXPECT_THROW(vocabulary.trie(), CheckpointError);
}

// A document is taken under every way to cut it into tokens.
TEST(GrammarConstraint, TakesADocumentUnderAnyTokenisation) {
  const TestVocabulary vocabulary = made_up_vocabulary(3000, 5);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  const auto grammar = compile_schema(R"({"type":"object","properties":{"name":{"type":"string"},"list":{"type":"array",
      "items":{"type":["number","null","object"]}}},"required":["name"]})");
  const std::string document =
      "{\"name\": \"é\\n\\u00e9 日本 😀 \\\"x\\\"\", \"list\": [null, 10.5e+10, {\"é\":{}}], "
      "\"other\":true}\n";
  std::mt19937_64 random(1);
  std::vector<uint32_t> mask((vocabulary.texts.size() + 31) / 32);
  for (int round = 0; round < 100; ++round) {
    GrammarConstraint constraint(trie, grammar, std::vector<TokenId>{vocabulary.stop});
    for (size_t at = 0; at < document.size();) {
      std::vector<TokenId> candidates;
      for (TokenId token = 0; token < static_cast<TokenId>(vocabulary.texts.size()); ++token) {
        const std::string& text = vocabulary.texts[static_cast<size_t>(token)];
        if (!text.empty() && document.compare(at, text.size(), text) == 0) candidates.push_back(token);
      }
      constraint.allowed(mask);
      for (const TokenId token : candidates) ASSERT_TRUE(bit(mask, token)) << document.substr(0, at) << " | " << token;
      const TokenId token = candidates[random() % candidates.size()];
      constraint.accept(token);
      at += vocabulary.texts[static_cast<size_t>(token)].size();
    }
    EXPECT_TRUE(constraint.complete());
  }
}

// Schemas that are hard to follow: each step must stay within its budget, and never lead into a dead end.
class HardSchemas : public testing::TestWithParam<const char*> {};

TEST_P(HardSchemas, AreFollowedInBoundedTime) {
  const TestVocabulary vocabulary = made_up_vocabulary(8'000, 2);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  GrammarConstraint constraint(trie, compile_schema(GetParam()), std::vector<TokenId>{vocabulary.stop});
  std::vector<uint32_t> mask((vocabulary.texts.size() + 31) / 32);
  std::mt19937_64 random(3);
  const std::clock_t begin = std::clock();  // CPU time, so that a busy machine does not matter
  for (int step = 0; step < 12; ++step) {
    constraint.allowed(mask);
    std::vector<TokenId> allowed;
    for (TokenId token = 0; token < vocabulary.stop; ++token)
      if (bit(mask, token)) allowed.push_back(token);
    if (allowed.empty()) {
      EXPECT_TRUE(constraint.complete());
      break;
    }
    constraint.accept(allowed[random() % allowed.size()]);
  }
  // Far above what it takes (well under a second), far below what no budget would take.
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 30.0);
}

INSTANTIATE_TEST_SUITE_P(
    Schemas, HardSchemas,
    testing::Values(R"x({"type":"string","pattern":"^(a|b)*a(a|b|[ -~]){14}$"})x",
                    R"x({"type":"string","pattern":"([a-z ]{0,40}){0,40}q"})x",
                    R"x({"type":"string","pattern":"^([ -~]{1,200}[ -~]{1,200}){1,8}$"})x",
                    R"x({"$ref":"#/$defs/t","$defs":{"t":{"anyOf":[{"type":"array","items":{"$ref":"#/$defs/t"}},
                        {"type":"array","items":{"$ref":"#/$defs/t"},"maxItems":9},
                        {"type":"array","items":{"$ref":"#/$defs/t"},"maxItems":7},{"type":"null"}]}}})x"));

TEST(GrammarConstraintDeathTest, ATokenOutsideTheMaskIsABug) {
  const TestVocabulary vocabulary = made_up_vocabulary(600, 5);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  GrammarConstraint constraint(trie, json_object_grammar(), std::vector<TokenId>{vocabulary.stop});
  EXPECT_DEATH(constraint.accept('x'), "left out");
  EXPECT_DEATH(constraint.accept(vocabulary.stop), "before the constrained text was complete");
}

}  // namespace
}  // namespace calla
