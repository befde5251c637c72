// The types of tool-call arguments: by the tool's schema, exactly, at any chunking.
#include <gtest/gtest.h>

#include <string>

#include "chat/argument_types.h"
#include "tests/chat/parse_reply.h"

namespace calla {
namespace {

struct TypingCase {
  const char* schema;
  const char* raw;
  const char* value;  // JSON; null pointer: absent
};

constexpr TypingCase kCases[] = {
    {R"({"type":"string"})", "null", R"("null")"},
    {R"({"type":["string","null"]})", "null", "null"},
    {R"({"type":["string","null"]})", "nul", R"("nul")"},
    {R"({"type":["string","null"]})", "null ", R"("null ")"},
    {R"({"type":["string","null"]})", "", R"("")"},
    {R"({"type":"string"})", "007", R"("007")"},
    {R"({"type":"string"})", R"({"a":1})", R"("{\"a\":1}")"},
    {R"({"type":"string"})", "", R"("")"},
    {R"({"type":"string"})", "\n  x\n", R"("\n  x\n")"},
    {R"({"type":"string"})", "\t\"\\\x01", R"("\t\"\\\u0001")"},
    {R"({"type":"integer"})", "9007199254740993", "9007199254740993"},
    {R"({"type":"integer"})", "-9223372036854775808", "-9223372036854775808"},
    {R"({"type":"integer"})", "18446744073709551615", "18446744073709551615"},
    {R"({"type":"integer"})", "123456789012345678901234567890", "123456789012345678901234567890"},
    {R"({"type":"integer"})", "9007199254740993.0", "9007199254740993"},
    {R"({"type":"integer"})", " 42\n", "42"},
    {R"({"type":"integer"})", "42.0", "42"},
    {R"({"type":"integer"})", "1e3", "1000"},
    {R"({"type":"integer"})", "4.5", R"("4.5")"},
    {R"({"type":"integer"})", "007", R"("007")"},
    {R"({"type":"integer"})", "many", R"("many")"},
    {R"({"type":"integer"})", "", nullptr},
    {R"({"type":"number"})", "1e3", "1e3"},
    {R"({"type":"number"})", "0.1", "0.1"},
    {R"({"type":"number"})", "9007199254740993", "9007199254740993"},
    {R"({"type":"number"})", "nan", R"("nan")"},
    {R"({"type":"number"})", "1e999", R"("1e999")"},
    {R"({"type":"boolean"})", "True", "true"},
    {R"({"type":"boolean"})", "false", "false"},
    {R"({"type":"boolean"})", "yes", R"("yes")"},
    {R"({"type":"boolean"})", " ", nullptr},
    {R"({"type":"array"})", "[1, 2]", "[1,2]"},
    {R"({"type":"array"})", R"({"a":1})", R"("{\"a\":1}")"},
    {R"({"type":"array"})", "[1,", R"("[1,")"},
    {R"({"type":"object"})", R"({"id": 9007199254740993, "x": [1.50]})", R"({"id":9007199254740993,"x":[1.5]})"},
    {R"({"type":"null"})", "null", "null"},
    {R"({"anyOf":[{"type":"object"},{"type":"null"}]})", R"({"city":"Paris"})", R"({"city":"Paris"})"},
    {R"({"anyOf":[{"type":"object"},{"type":"null"}]})", "null", "null"},
    {R"({"oneOf":[{"type":"integer"},{"type":"string"}]})", "12", "12"},
    {R"({"oneOf":[{"type":"integer"},{"type":"string"}]})", "012", R"("012")"},
    {R"({"type":["boolean","string"]})", "True", R"("True")"},
    {R"({"allOf":[{"$ref":"#/$defs/point"}]})", R"({"x":1})", R"({"x":1})"},
    {R"({"$ref":"#/$defs/point"})", R"({"x":1})", R"({"x":1})"},
    {R"({"$ref":"#/$defs/loop"})", R"({"x":1})", R"({"x":1})"},
    {R"({"$ref":"no pointer"})", "text", R"("text")"},
    {R"({"type":"integer","nullable":true})", "null", "null"},
    {R"({"enum":["a","b"]})", "1", R"("1")"},
    {R"({"enum":[1,2]})", "1", "1"},
    {R"({"const":true})", "true", "true"},
    {R"({"properties":{}})", "{}", "{}"},
    {R"({"items":{}})", "[]", "[]"},
    {R"({})", R"({"k":[1]})", R"({"k":[1]})"},
    {R"({})", "[]", "[]"},
    {R"({})", "123", R"("123")"},
    {R"({})", "null", R"("null")"},
    {R"({})", "", R"("")"},
    {R"({"type":7})", "7", R"("7")"},
    {R"(true)", "7", R"("7")"},
};

TEST(ArgumentTyping, FollowsTheSchema) {
  for (const TypingCase& item : kCases) {
    const std::string place = std::string(item.schema) + " " + item.raw;
    const std::string tools =
        std::string(R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"p":)") +
        item.schema + R"(},"$defs":{"point":{"type":"object"},"loop":{"anyOf":[{"$ref":"#/$defs/loop"}]}}}}}])";
    const std::string text = std::string("<tool_call>\n<function=f>\n<parameter=p>\n") + item.raw +
                             "\n</parameter>\n</function>\n</tool_call>";
    const std::string expected = item.value ? std::string(R"({"p":)") + item.value + "}" : "{}";
    for (size_t split = 0; split < text.size(); split++) {
      const std::string_view view = text;
      const ParsedReply reply = parse_chunks({view.substr(0, split), view.substr(split)}, {false, tools, false});
      ASSERT_EQ(reply.calls.size(), 1u) << place;
      ASSERT_EQ(reply.calls[0].arguments, expected) << place;
      ASSERT_TRUE(reply.calls[0].complete) << place;
      ASSERT_EQ(compact_json(parse_json(reply.calls[0].arguments)), compact_json(parse_json(expected))) << place;
    }
  }
}

TEST(ArgumentTyping, AbsentParametersLeaveNoComma) {
  const std::string tools =
      R"([{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"type":"integer"},"b":{"type":"integer"},
         "c":{"type":"integer"}}}}}])";
  const std::string text =
      "<tool_call>\n<function=f>\n<parameter=a>\n\n</parameter>\n<parameter=b>\n1\n</"
      "parameter>\n<parameter=c>\n</parameter>\n"
      "</function>\n</tool_call>";
  EXPECT_EQ(parse_chunks({text}, {false, tools, false}).calls.at(0).arguments, R"({"b":1})");
}

TEST(ArgumentTyping, SchemalessToolGivesStringsAndContainers) {
  const std::string tools = R"([{"type":"function","function":{"name":"f"}}])";
  const std::string text =
      "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[1]\n</parameter>\n</"
      "function>\n</tool_call>";
  EXPECT_EQ(parse_chunks({text}, {false, tools, false}).calls.at(0).arguments, R"({"a":"1","b":[1]})");
}

}  // namespace
}  // namespace calla
