// Forced tool calls: the exact format, the tools' schemas, and random calls that read back as they were
// meant.
#include "grammar/forced_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "base/error.h"
#include "grammar/matcher.h"
#include "grammar/token_constraint.h"
#include "tests/grammar/generate.h"
#include "tests/grammar/schema_validator.h"

namespace calla {
namespace {

// Without markup tokens the tags are spelled out, so that a text can be tested byte by byte.
class ForcedCallTexts : public testing::Test {
 protected:
  ForcedCallTexts() : trie_(make_trie()) {}

  static TokenTrie make_trie() {
    TestVocabulary vocabulary = made_up_vocabulary(600, 1);
    vocabulary.markup.clear();
    return vocabulary.trie();
  }
  bool takes(const std::vector<CallableTool>& tools, std::string_view text, bool parallel = true) {
    Matcher matcher(forced_call_grammar(tools, trie_, {.parallel = parallel}));
    const Matcher::StateId state = matcher.step(matcher.start(), text);
    return state != Matcher::kDead && matcher.accepting(state);
  }
  static std::string call(const std::string& name, const std::string& parameters) {
    return "<tool_call>\n<function=" + name + ">\n" + parameters + "</function>\n</tool_call>";
  }
  static std::string parameter(const std::string& name, const std::string& value) {
    return "<parameter=" + name + ">\n" + value + "\n</parameter>\n";
  }

  TokenTrie trie_;
  const std::vector<CallableTool> tools_{
      {"get_weather",
       R"({"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","minimum":1,"maximum":14},
                          "metric":{"type":"boolean"}},"required":["city"]})"},
      {"get_time", R"({"type":"object","properties":{}})"},
      {"noop", ""},
  };
};

TEST_F(ForcedCallTexts, TakesTheFormatOfTheTemplate) {
  EXPECT_TRUE(takes(
      tools_, call("get_weather", parameter("city", "Zürich") + parameter("days", "2") + parameter("metric", "true"))));
  EXPECT_TRUE(takes(tools_, "\n\n" + call("get_weather", parameter("city", ""))));
  EXPECT_TRUE(takes(tools_, call("get_time", "")));
  EXPECT_TRUE(takes(tools_, call("noop", "")));
  EXPECT_TRUE(takes(tools_, call("get_time", "") + "\n" + call("get_weather", parameter("city", "a\nb\n\n<tool"))));
  for (const std::string& text : {
           std::string(),
           std::string("I'll do it"),
           call("get_tim", ""),
           call("get_weather", ""),
           call("get_weather", parameter("city", "x") + parameter("city", "y")),
           call("get_weather", parameter("days", "2") + parameter("city", "x")),
           call("get_weather", parameter("city", "x") + parameter("days", "15")),
           call("get_weather", parameter("city", "x") + parameter("days", "two")),
           call("get_weather", parameter("city", "x") + parameter("metric", "True")),
           call("get_weather", parameter("city", "x") + parameter("other", "1")),
           call("get_time", "") + call("get_time", ""),
           call("get_time", "") + "\n",
           call("get_time", "") + " done",
       })
    EXPECT_FALSE(takes(tools_, text)) << text;
}

TEST_F(ForcedCallTexts, OneCallOnlyWhenNotParallel) {
  EXPECT_TRUE(takes(tools_, call("get_time", ""), false));
  EXPECT_FALSE(takes(tools_, call("get_time", "") + "\n" + call("get_time", ""), false));
}

TEST_F(ForcedCallTexts, TextCannotLookLikeMarkup) {
  const std::vector<CallableTool> tools{
      {"f", R"({"properties":{"t":{"type":"string"},"u":{"type":"string"}},"required":["t"]})"}};
  for (const char* text :
       {"x", "\n", "\n\n  x\n", "</", "<parameter", "a <parameter=u> b", "a</function>", "\r\n\t\"\\{}", "é😀",
        "x\n</functio", "\n<", "line\n</p", "a </tool_call>", "\n </function>"})
    EXPECT_TRUE(takes(tools, call("f", parameter("t", text)))) << text;
  for (const char* text : {"x</parameter>", "</parameter></parameter>", "x\n</function>", "\n</tool_call>y",
                           "x\n<parameter=u>\ny", "</function>\n</tool_call>", "\x01", "\xc3", "\xed\xa0\x80"})
    EXPECT_FALSE(takes(tools, call("f", parameter("t", text)))) << text;
}

TEST_F(ForcedCallTexts, ValuesFollowTheirSchemas) {
  const auto tool = [](const char* schema) {
    return std::vector<CallableTool>{
        {"f", std::string(R"({"type":"object","properties":{"a":)") + schema + R"(},"required":["a"]})", true}};
  };
  const auto good = [&](const char* schema, const char* text) {
    return takes(tool(schema), call("f", parameter("a", text)));
  };
  EXPECT_TRUE(good(R"({"type":["string","null"]})", "null"));
  EXPECT_TRUE(good(R"({"type":["string","null"]})", "any\ntext"));
  EXPECT_TRUE(good("{}", R"({"k":[1]})"));
  EXPECT_TRUE(good("{}", "123 and text"));
  EXPECT_TRUE(good(R"({"type":"array","items":{"type":"integer"}})", "[1, 2]"));
  EXPECT_FALSE(good(R"({"type":"array","items":{"type":"integer"}})", "[1, \"2\"]"));
  EXPECT_TRUE(good(R"({"anyOf":[{"type":"object"},{"type":"null"}]})", R"({"city":"Paris"})"));
  EXPECT_FALSE(good(R"({"anyOf":[{"type":"object"},{"type":"null"}]})", "Paris"));
  EXPECT_TRUE(good(R"({"enum":["fast","slow",3]})", "slow"));
  EXPECT_TRUE(good(R"({"enum":["fast","slow",3]})", "3"));
  EXPECT_FALSE(good(R"({"enum":["fast","slow",3]})", "\"slow\""));
  EXPECT_FALSE(good(R"({"type":"string","enum":["fast","slow"]})", "slo"));
  EXPECT_TRUE(good(R"({"type":"string","pattern":"^[a-z]+$"})", "abc"));
  EXPECT_FALSE(good(R"({"type":"string","pattern":"^[a-z]+$"})", "Abc"));
  EXPECT_TRUE(good(R"({"type":"string","minLength":2,"maxLength":3})", "é\"é"));
  EXPECT_FALSE(good(R"({"type":"string","minLength":2,"maxLength":3})", "abcd"));
  EXPECT_TRUE(good(R"({"type":"string","format":"date"})", "2024-02-03"));
  EXPECT_FALSE(good(R"({"type":"string","format":"date"})", "today"));
  EXPECT_TRUE(good(R"({"type":"object","properties":{"x":{"type":"string"}},"additionalProperties":false})",
                   R"({"x": "a\n"})"));
}

TEST_F(ForcedCallTexts, LooseToolsKeepTheTypeOfWhatCannotBeEnforced) {
  const std::vector<CallableTool> tools{
      {"f",
       R"x({"type":"object","properties":{"a":{"type":"array","uniqueItems":true},"b":{"type":"string","pattern":"(?=x)"}},"required":["a"]})x"}};
  EXPECT_TRUE(takes(tools, call("f", parameter("a", "[1]") + parameter("b", "free"))));
  EXPECT_FALSE(takes(tools, call("f", parameter("a", "1"))));
  std::vector<CallableTool> strict = tools;
  strict[0].strict = true;
  try {
    forced_call_grammar(strict, trie_);
    FAIL() << "was compiled";
  } catch (const RequestError& error) {
    EXPECT_EQ(error.field(), "tools[0].function.parameters");
    EXPECT_THAT(error.what(), testing::HasSubstr("uniqueItems"));
  }
}

TEST_F(ForcedCallTexts, RefusesWhatCannotBeCalled) {
  EXPECT_THROW(forced_call_grammar({}, trie_), RequestError);
  for (const CallableTool& tool :
       {CallableTool{"", ""}, CallableTool{"a>b", ""}, CallableTool{"f", "[]"}, CallableTool{"f", "{"},
        CallableTool{"f", R"({"type":"string"})"}, CallableTool{"f", R"({"properties":{"a>":{}}})"},
        CallableTool{"f", R"({"properties":{"a":false},"required":["a"]})"}})
    EXPECT_THROW(forced_call_grammar(std::vector{tool}, trie_), RequestError) << tool.name << " " << tool.parameters;
}

// Reads a call back as a strict reader of the format would.
nlohmann::json read_calls(const std::string& text, const std::string& string_parameter) {
  nlohmann::json calls = nlohmann::json::array();
  const std::string open = "<tool_call>\n<function=", close = "</function>\n</tool_call>", end = "\n</parameter>\n";
  size_t at = text.find_first_not_of(" \n");
  while (at != std::string::npos && at < text.size()) {
    if (text.compare(at, open.size(), open) != 0) return nullptr;
    at += open.size();
    const size_t name_end = text.find(">\n", at);
    nlohmann::json call = {{"name", text.substr(at, name_end - at)}, {"arguments", nlohmann::json::object()}};
    at = name_end + 2;
    while (text.compare(at, 11, "<parameter=") == 0) {
      const size_t key_end = text.find(">\n", at);
      const std::string key = text.substr(at + 11, key_end - at - 11);
      const size_t value_end = text.find(end, key_end + 1);
      if (value_end == std::string::npos) return nullptr;
      const std::string value = value_end < key_end + 2 ? "" : text.substr(key_end + 2, value_end - key_end - 2);
      call["arguments"][key] = key == string_parameter ? nlohmann::json(value) : nlohmann::json::parse(value);
      at = value_end + end.size();
    }
    if (text.compare(at, close.size(), close) != 0) return nullptr;
    at += close.size();
    calls.push_back(call);
    if (at < text.size() && text[at] == '\n') ++at;
  }
  return calls;
}

TEST(ForcedCall, RandomCallsReadBack) {
  const TestVocabulary vocabulary = made_up_vocabulary(2500, 9);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  const std::string schema =
      R"({"type":"object","properties":{"text":{"type":"string"},"n":{"type":"number","minimum":-2},
      "list":{"type":"array","items":{"type":["string","null"]},"minItems":1}},"required":["list"],"additionalProperties":false})";
  const std::vector<CallableTool> tools{{"write", schema}, {"write_all", schema}};
  std::mt19937_64 random(5);
  size_t calls = 0;
  for (int round = 0; round < 150; ++round) {
    const bool parallel = round % 2 == 0;
    GrammarConstraint constraint(trie, forced_call_grammar(tools, *trie, {.parallel = parallel}),
                                 std::vector<TokenId>{vocabulary.stop});
    const std::string text = generate(constraint, vocabulary, static_cast<int>(random() % 80), random);
    nlohmann::json read;
    ASSERT_NO_THROW(read = read_calls(text, "text")) << text;
    ASSERT_TRUE(read.is_array() && !read.empty()) << text;
    if (!parallel) {
      EXPECT_EQ(read.size(), 1u) << text;
    }
    for (const auto& call : read) {
      EXPECT_TRUE(call.at("name") == "write" || call.at("name") == "write_all");
      const auto parsed = nlohmann::json::parse(schema);
      ASSERT_EQ(schema_violation(parsed, parsed, call.at("arguments")), "") << text;
    }
    calls += read.size();
  }
  EXPECT_GT(calls, 150u);
}

// The tags are their tokens and nothing else: neither spelled out, nor inside values.
TEST(ForcedCall, TagsAreTokens) {
  const TestVocabulary vocabulary = made_up_vocabulary(800, 9);
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  const std::vector<CallableTool> tools{{"f", R"({"properties":{"t":{"type":"string"}},"required":["t"]})"}};
  GrammarConstraint constraint(trie, forced_call_grammar(tools, *trie), std::vector<TokenId>{vocabulary.stop});
  std::vector<uint32_t> mask((vocabulary.texts.size() + 31) / 32);
  const auto allows = [&](TokenId token) {
    constraint.allowed(mask);
    return (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) != 0;
  };
  const TokenId open = trie->find_markup("<tool_call>"), close = trie->find_markup("</tool_call>");
  EXPECT_TRUE(allows(open));
  EXPECT_FALSE(allows('<'));
  constraint.accept(open);
  constraint.accept_text("\n<function=f>\n<parameter=t>\nsome <");
  EXPECT_FALSE(allows(open));
  EXPECT_FALSE(allows(close));
  constraint.accept_text("\n</parameter>\n</function>\n");
  EXPECT_TRUE(allows(close));
  EXPECT_FALSE(allows(vocabulary.stop));
  constraint.accept(close);
  EXPECT_TRUE(allows(vocabulary.stop));
  EXPECT_TRUE(constraint.complete());
}

}  // namespace
}  // namespace calla
