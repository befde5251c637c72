// Which texts a compiled schema takes and which it refuses, byte by byte; and which schemas are refused.
#include "grammar/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/matcher.h"

namespace calla {
namespace {

bool takes(const std::shared_ptr<const Grammar>& grammar, std::string_view text) {
  Matcher matcher(grammar);
  const Matcher::StateId state = matcher.step(matcher.start(), text);
  return state != Matcher::kDead && matcher.accepting(state);
}

struct Case {
  const char* schema;
  std::vector<const char*> good, bad;
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.schema; }

class SchemaTexts : public testing::TestWithParam<Case> {};

TEST_P(SchemaTexts, TakesGoodOnesOnly) {
  const auto grammar = compile_schema(GetParam().schema);
  for (const char* text : GetParam().good) EXPECT_TRUE(takes(grammar, text)) << text;
  for (const char* text : GetParam().bad) EXPECT_FALSE(takes(grammar, text)) << text;
}

INSTANTIATE_TEST_SUITE_P(
    Values, SchemaTexts,
    testing::Values(
        Case{R"(true)",
             {"1", "\"a\"", "{}", "[]", "[1, {\"a\": null}]", "true", "\n\n7", "{ }", "{\n  \"a\": 1\n}"},
             {"", "tru", "01", "[1,]", "{\"a\"}", "1 2", "\"\n\"", "{'a':1}", "NaN", "+1", "1.", ".5", "\"\\x\""}},
        Case{R"({"type":"string"})",
             {R"("")", R"("é😀")", R"("\u00e9")", R"("\ud83d\ude00")", R"("\uD83D\uDE00")", R"("\"\\\/\b\f\n\r\t")",
              "\"\x7f\""},
             {R"("\ud83d")", R"("\ude00")", R"("\ud83dx")", R"("\ud83d\u0041")", R"("\u12")", "\"\xc0\x80\"",
              "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xff\"", "\"\xe6\x97\"", "\"\x01\"", "\"a", "a\""}},
        Case{R"({"type":"string","minLength":2,"maxLength":3})",
             {R"("ab")", R"("é😀é")", R"("\u0041\ud83d\ude00")"},
             {R"("a")", R"("abcd")", R"("")"}},
        Case{R"({"type":"integer"})",
             {"0", "-1", "123456789012345678"},
             {"1.0", "-", "007", "1e3", "1234567890123456789"}},
        Case{R"({"type":"number"})",
             {"0", "-0.5", "1e3", "1.25E-07", "9007199254740993"},
             {"1e", "1e400", "0x1", "--1"}},
        Case{R"({"type":["boolean","null"]})", {"true", "false", "null"}, {"0", "\"true\""}},
        Case{R"({"const":{"a":[1,"x"],"b":{}}})",
             {R"({"a":[1,"x"],"b":{}})", R"({ "a": [1, "x"], "b": {} })"},
             {R"({"b":{},"a":[1,"x"]})", R"({"a":[1,"x"]})", "{}"}},
        Case{R"({"enum":["a","ab","é\n",1,null,[2]]})",
             {R"("a")", R"("ab")", R"("é\n")", "1", "null", "[2]"},
             {R"("b")", "2", "[]"}},
        Case{R"({"type":"string","enum":["a",1]})", {R"("a")"}, {"1"}},
        Case{R"({"type":"string","const":"x"})", {R"("x")"}, {R"("y")", "x"}}));

INSTANTIATE_TEST_SUITE_P(
    Numbers, SchemaTexts,
    testing::Values(Case{R"({"type":"integer","minimum":-5,"maximum":120})",
                         {"-5", "-1", "0", "9", "99", "100", "119", "120"},
                         {"-6", "121", "130", "-10", "-0", "200", "1000", "1.5"}},
                    Case{R"({"type":"integer","exclusiveMinimum":10,"exclusiveMaximum":13})",
                         {"11", "12"},
                         {"10", "13", "1", "110"}},
                    Case{R"({"type":"integer","minimum":0.5,"maximum":2.5})", {"1", "2"}, {"0", "3"}},
                    Case{R"({"type":"integer","minimum":9007199254740993,"maximum":9007199254740995})",
                         {"9007199254740993", "9007199254740995"},
                         {"9007199254740992", "9007199254740996"}},
                    Case{R"({"type":"integer","maximum":-3})", {"-3", "-4", "-30", "-100"}, {"-2", "0", "3", "-03"}},
                    Case{R"({"type":"number","minimum":0,"maximum":1})",
                         {"0", "1", "0.5", "0.999", "1.0", "1.00", "0.0"},
                         {"1.01", "-0.1", "2", "1e-1", "10", "0.", "-0"}},
                    Case{R"({"type":"number","exclusiveMinimum":0,"exclusiveMaximum":0.25})",
                         {"0.01", "0.249", "0.2"},
                         {"0", "0.0", "0.25", "0.250", "0.3", "1"}},
                    Case{R"({"type":"number","minimum":-1.5})",
                         {"-1.5", "-1.49", "-1", "0", "-0.2", "12.5"},
                         {"-1.51", "-2", "-1.6"}},
                    Case{R"({"type":"integer","multipleOf":25,"minimum":1,"maximum":100})",
                         {"25", "50", "75", "100"},
                         {"0", "30", "125"}},
                    Case{R"({"minimum":3,"exclusiveMinimum":3})", {"4", "3.5"}, {"3", "2"}},
                    Case{R"({"minimum":3,"exclusiveMinimum":2})", {"4", "3"}, {"2.5"}}));

INSTANTIATE_TEST_SUITE_P(
    Objects, SchemaTexts,
    testing::Values(
        Case{
            R"({"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"},"c":{}},"required":["b"],
                 "additionalProperties":false})",
            {R"({"b":"x"})", R"({"a":1,"b":"x","c":[]})", R"({"a": 1, "b": ""})", "{\n  \"b\": \"x\",\n  \"c\": 1\n}"},
            {"{}", R"({"a":1})", R"({"b":"x","a":1})", R"({"b":"x",})", R"({,"b":"x"})", R"({"b":"x","d":1})",
             R"({"b":"x","b":"y"})", R"({"b":"x" "c":1})"}},
        Case{R"({"type":"object","properties":{"a":{"type":"integer"}}})",
             {"{}", R"({"a":1})", R"({"a":1,"z":null})", R"({"b":"x","c":2})", R"({"ab":"x"})", R"({"":1})",
              R"({"é":1})"},
             {R"({"a":"x"})", R"({"b":1,"a":"x"})", R"({"\\u0061":"x"})", R"({"\u0061":"x"})"}},
        Case{
            R"({"type":"object","properties":{"é":{"type":"integer"},"éa":{"type":"null"}},"additionalProperties":{"type":"boolean"}})",
            {R"({"é":1,"éa":null,"è":true})", R"({"éab":true})", R"({"ê":false})", R"({"x":false})"},
            {R"({"è":1})", R"({"é":true})", R"({"éa":true})"}},
        Case{R"({"type":"object","additionalProperties":{"type":"integer"},"minProperties":1,"maxProperties":2})",
             {R"({"a":1})", R"({"a":1,"b":2})"},
             {"{}", R"({"a":1,"b":2,"c":3})", R"({"a":"x"})"}},
        Case{R"({"type":"object","patternProperties":{"^x[0-9]+$":{"type":"null"}},"additionalProperties":false})",
             {"{}", R"({"x1":null})", R"({"x1":null,"x23":null})"},
             {R"({"x":null})", R"({"y1":null})", R"({"x1":1})"}},
        Case{R"({"type":"object","propertyNames":{"enum":["a","b"]},"additionalProperties":{"type":"integer"}})",
             {"{}", R"({"b":1,"a":2})"},
             {R"({"c":1})", R"({"a":"x"})"}},
        Case{R"({"propertyNames":{"maxLength":2}})", {R"({"ab":[]})"}, {R"({"abc":1})"}},
        Case{R"({"type":"object","required":["k"],"additionalProperties":{"type":"integer"}})",
             {R"({"k":1,"l":2})"},
             {"{}", R"({"l":2})", R"({"k":"a"})"}},
        Case{R"({"type":"object","properties":{},"additionalProperties":false})", {"{}", "{ }"}, {R"({"a":1})"}},
        Case{R"({"type":"object","properties":{"a":{"type":"integer"},"b":false},"additionalProperties":false})",
             {"{}", R"({"a":1})"},
             {R"({"b":1})"}},
        Case{
            R"({"type":"object","properties":{"a\"b\\":{"const":1}},"required":["a\"b\\"],"additionalProperties":false})",
            {R"({"a\"b\\":1})"},
            {R"({"ab":1})"}}));

INSTANTIATE_TEST_SUITE_P(
    Arrays, SchemaTexts,
    testing::Values(
        Case{R"({"type":"array","items":{"type":"integer"}})",
             {"[]", "[1]", "[1,2, 3]", "[\n  1,\n  2\n]"},
             {"[1 ,2]", "[,1]", "[\"a\"]", "[1,]"}},
        Case{R"({"type":"array","items":{"type":"integer"},"minItems":2,"maxItems":3})",
             {"[1,2]", "[1,2,3]"},
             {"[]", "[1]", "[1,2,3,4]"}},
        Case{R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"}},
        Case{R"({"type":"array","prefixItems":[{"type":"string"},{"type":"integer"}],"items":{"type":"null"}})",
             {"[]", R"(["a"])", R"(["a",1])", R"(["a",1,null,null])"},
             {"[1]", R"(["a",null])", R"(["a",1,2])"}},
        Case{R"({"type":"array","prefixItems":[{"type":"string"},{"type":"integer"}],"items":false,"minItems":2})",
             {R"(["a",1])"},
             {"[]", R"(["a"])", R"(["a",1,null])"}},
        Case{R"({"type":"array","items":[{"const":1}],"additionalItems":{"const":2},"maxItems":3})",
             {"[]", "[1,2,2]"},
             {"[2]", "[1,2,2,2]"}}));

INSTANTIATE_TEST_SUITE_P(
    Combinations, SchemaTexts,
    testing::Values(
        Case{
            R"({"anyOf":[{"type":"integer"},{"type":"object","properties":{"a":{"type":"string"}},"required":["a"]}]})",
            {"1", R"({"a":"x"})"},
            {"{}", "\"x\""}},
        Case{R"({"type":"object","properties":{"k":{"type":"string"}},"additionalProperties":false,
                 "anyOf":[{"required":["k"]},{"properties":{"k":false}}]})",
             {"{}", R"({"k":"x"})"},
             {R"({"k":1})"}},
        Case{R"({"allOf":[{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]},
                          {"properties":{"a":{"minimum":3},"b":{"type":"null"}},"required":["b"]}]})",
             {R"({"a":3,"b":null})"},
             {R"({"a":2,"b":null})", R"({"a":3})"}},
        Case{R"({"allOf":[{"type":["string","integer"],"maxLength":5},{"type":"string","maxLength":2,"minLength":1}]})",
             {R"("ab")"},
             {R"("abc")", "1", R"("")"}},
        Case{R"({"allOf":[{"enum":[1,2,3]},{"enum":[2,3,4]}]})", {"2", "3"}, {"1", "4"}},
        Case{R"({"$ref":"#/$defs/node","$defs":{"node":{"type":"object","properties":{"v":{"type":"integer"},
                 "next":{"anyOf":[{"$ref":"#/$defs/node"},{"type":"null"}]}},"required":["v","next"],"additionalProperties":false}}})",
             {R"({"v":1,"next":null})", R"({"v":1,"next":{"v":2,"next":{"v":3,"next":null}}})"},
             {R"({"v":1,"next":1})", R"({"v":1,"next":{"v":2}})", R"({"v":1})"}},
        Case{R"({"type":"array","items":{"$ref":"#"}})", {"[]", "[[],[[]]]"}, {"[1]"}},
        Case{R"({"$ref":"#/definitions/a%20b~1c","definitions":{"a b/c":{"const":5}}})", {"5"}, {"6"}},
        Case{R"({"anyOf":[{"$ref":"#"},{"const":1}]})", {"1"}, {"2"}},
        Case{R"({"oneOf":[{"const":"a"},{"const":"b","title":"B"}]})", {R"("a")", R"("b")"}, {R"("c")"}},
        Case{
            R"({"$ref":"#/$defs/p","required":["b"],"$defs":{"p":{"type":"object","properties":{"a":{"const":1},"b":{"const":2}},
                 "additionalProperties":false}}})",
            {R"({"b":2})", R"({"a":1,"b":2})"},
            {"{}", R"({"a":1})"}}));

INSTANTIATE_TEST_SUITE_P(
    Patterns, SchemaTexts,
    testing::Values(
        Case{R"({"type":"string","pattern":"^[a-z]{2,3}-\\d+$"})",
             {R"("ab-1")", R"("abc-123")"},
             {R"("a-1")", R"("ab-")", R"("abcd-1")", R"("wxab-1")"}},
        Case{R"({"type":"string","pattern":"b+"})", {R"("b")", R"("abbc")", R"("é b \"")"}, {R"("")", R"("ac")"}},
        Case{R"({"type":"string","pattern":"^(?:a|b.)*$"})",
             {R"("")", R"("abxa")", R"("bé")"},
             {R"("b")", R"("c")", R"("b\n")"}},
        Case{R"({"type":"string","pattern":"^a$|^b"})", {R"("a")", R"("b")", R"("bcd")"}, {R"("ab")", R"("")"}},
        Case{R"({"type":"string","pattern":"^[^a-c\"]\\s\\u00e9?$"})",
             {R"("d ")", R"("é\té")", R"("\\ é")"},
             {R"("a ")", R"("\" ")", R"("d\u0020")"}},
        Case{R"({"type":"string","pattern":"^[a-z]*$","minLength":2,"maxLength":4})",
             {R"("ab")", R"("abcd")"},
             {R"("a")", R"("abcde")", R"("A1")"}},
        Case{R"({"type":"string","pattern":"^(a|ab)(c|bcd)?$","minLength":3})",
             {R"("abc")", R"("abcd")", R"("abbcd")"},
             {R"("ab")", R"("ac")"}},
        Case{R"({"type":"string","pattern":"^[\\w.+-]+@[a-z]+\\.[a-z]{2,}$"})",
             {R"("a.b+c@d.eu")"},
             {R"("a@b")", R"("@d.eu")"}},
        Case{R"({"type":"string","format":"date"})",
             {R"("2024-01-31")", R"("1999-02-28")"},
             {R"("2024-13-01")", R"("2024-04-31")", R"("2024-02-30")", R"("x")"}},
        Case{R"({"type":"string","format":"date-time"})",
             {R"("2024-01-31T23:59:59Z")", R"("2024-01-31T00:00:00.5+02:00")"},
             {R"("2024-01-31")", R"("2024-01-31T24:00:00Z")"}},
        Case{R"({"type":"string","format":"uuid"})", {R"("123e4567-e89b-12d3-a456-426614174000")"}, {R"("123e4567")"}},
        Case{R"({"type":"string","format":"email"})",
             {R"("a.b+c@d-e.example.eu")"},
             {R"("a@b")", R"("a b@c.de")", R"(".a@c.de")"}},
        Case{R"({"type":"string","format":"ipv4"})",
             {R"("0.0.0.0")", R"("255.10.99.1")"},
             {R"("256.0.0.0")", R"("1.2.3")", R"("1.2.3.4.")"}},
        Case{R"({"type":"string","format":"made-up"})", {R"("anything")"}, {"1"}}));

TEST(JsonObject, TakesObjectsOnly) {
  const auto grammar = json_object_grammar();
  for (const char* text : {"{}", R"({"a": [1, {"b": "\u00e9"}], "c": -1.5e3})", "{\n    \"a\": 1\n}\n"})
    EXPECT_TRUE(takes(grammar, text)) << text;
  for (const char* text : {"[]", "1", "{", "{}{}", "{} ", R"({"a":1,})"}) EXPECT_FALSE(takes(grammar, text)) << text;
}

TEST(JsonObject, BlankSpaceIsBounded) {
  const auto grammar = json_object_grammar();
  Matcher matcher(grammar);
  for (const char* before : {"", "{", R"({"a":)", R"({"a":1)", R"({"a":1,)", R"({"a":[)"}) {
    Matcher::StateId state = matcher.step(matcher.start(), before);
    ASSERT_NE(state, Matcher::kDead) << before;
    int blanks = 0;
    for (; blanks < 1000; ++blanks) {
      Matcher::StateId next = matcher.step(state, '\n');
      if (next == Matcher::kDead) next = matcher.step(state, ' ');
      if (next == Matcher::kDead) break;
      state = next;
    }
    EXPECT_LT(blanks, 64) << before;
  }
}

TEST(JsonObject, NestingIsBoundedAndCanAlwaysBeClosed) {
  const auto grammar = json_object_grammar();
  Matcher matcher(grammar);
  Matcher::StateId state = matcher.step(matcher.start(), R"({"a":)");
  int depth = 0;
  for (;; ++depth) {
    const Matcher::StateId next = matcher.step(state, '[');
    if (next == Matcher::kDead) break;
    state = next;
    ASSERT_LT(depth, 1000);
  }
  EXPECT_GT(depth, 60);
  state = matcher.step(state, "1" + std::string(static_cast<size_t>(depth), ']') + "}");
  ASSERT_NE(state, Matcher::kDead);
  EXPECT_TRUE(matcher.accepting(state));
}

struct Refusal {
  const char* schema;
  const char* says;
};
void PrintTo(const Refusal& one, std::ostream* out) { *out << one.schema; }

class RefusedSchemas : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedSchemas, SayWhereAndWhy) {
  try {
    compile_schema(GetParam().schema, "response_format");
    FAIL() << "was compiled";
  } catch (const RequestError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(GetParam().says));
    EXPECT_EQ(error.field(), "response_format");
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RefusedSchemas,
    testing::Values(
        Refusal{R"({"properties":{"a":{"not":{}}}})", "#/properties/a/not: the keyword \"not\" is not supported"},
        Refusal{R"({"properties":{"a":{}},"propertyNames":{"maxLength":2}})", "#/propertyNames"},
        Refusal{R"({"type":"array","uniqueItems":true})", "uniqueItems"}, Refusal{R"({"if":{},"then":{}})", "#/if"},
        Refusal{R"({"type":"object","dependentRequired":{"a":["b"]}})", "dependentRequired"},
        Refusal{R"({"$ref":"other.json#/a"})", "only references into the same schema"},
        Refusal{R"({"$ref":"#/$defs/none"})", "nothing is found"},
        Refusal{R"({"allOf":[{"$ref":"#"}]})", "leads back to itself"},
        Refusal{R"({"$ref":"#"})", "cannot be satisfied"}, Refusal{R"(false)", "cannot be satisfied"},
        Refusal{R"({"type":"object","properties":{"a":false},"required":["a"]})", "cannot be satisfied"},
        Refusal{R"({"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]})", "cannot be satisfied"},
        Refusal{R"({"type":"integer","minimum":5,"maximum":4})", "cannot be satisfied"},
        Refusal{R"({"type":"string","minLength":5,"maxLength":4})", "cannot be satisfied"},
        Refusal{R"({"type":"array","minItems":3,"items":false})", "cannot be satisfied"},
        Refusal{R"({"enum":[]})", "cannot be satisfied"}, Refusal{R"({"type":"strin"})", "unknown type"},
        Refusal{R"({"type":"string","minLength":-1})", "#/minLength"},
        Refusal{R"({"type":"string","minLength":1.5})", "#/minLength"},
        Refusal{R"({"properties":{"a":3}})", "#/properties/a"},
        Refusal{R"x({"type":"string","pattern":"(?=a)"})x", "look-around"},
        Refusal{R"({"type":"string","pattern":"(a)\\1"})", "not supported"},
        Refusal{R"({"type":"string","pattern":"a^b"})", "anchors"},
        Refusal{R"({"type":"string","pattern":"a**"})", "quantifier"},
        Refusal{R"x({"type":"string","pattern":"("})x", "group does not end"},
        Refusal{R"x({"type":"string","pattern":"a)"})x", "not supported"},
        Refusal{R"({"type":"string","pattern":"((a{1000}){1000}){1000}"})", "too large"},
        Refusal{R"({"type":"object","minProperties":2})", "minProperties"},
        Refusal{R"({"type":"number","multipleOf":0.01})", "multipleOf"},
        Refusal{R"({"exclusiveMinimum":true})", "expected a number"}, Refusal{R"({"type":)", "not valid JSON"},
        Refusal{"", "not valid JSON"}, Refusal{"\"a\xff\"", "not valid JSON"},
        Refusal{R"({"properties":3})", "expected an object"}, Refusal{R"({"required":{"a":1}})", "expected a list"},
        Refusal{R"({"allOf":[{"properties":3},{"properties":{"a":{}}}]})", "a schema is an object"},
        Refusal{R"({"allOf":[{"prefixItems":3},{"items":{}}]})", "malformed"},
        Refusal{R"({"enum":3})", "expected a list"}, Refusal{R"({"anyOf":3})", "expected a list"},
        Refusal{R"({"$ref":3})", "a reference is a string"}, Refusal{"[]", "a schema is an object"}));

TEST(SchemaBounds, DeepNestingIsRefused) {
  std::string schema = "true";
  for (int i = 0; i < 100; ++i) schema = R"({"items":)" + schema + "}";
  EXPECT_THROW(compile_schema(schema), RequestError);
  EXPECT_THROW(compile_schema(std::string(100'000, '[')), RequestError);
}

TEST(SchemaBounds, HugeEnumWorksAndLargerOnesAreRefused) {
  const auto enum_of = [](int n) {
    std::string schema = R"({"enum":[)";
    for (int i = 0; i < n; ++i) schema += (i > 0 ? ",\"" : "\"") + std::to_string(i * 7919 % 1000003) + "-item\"";
    return schema + "]}";
  };
  const auto grammar = compile_schema(enum_of(20'000));
  EXPECT_TRUE(takes(grammar, "\"7919-item\""));
  EXPECT_FALSE(takes(grammar, "\"1-item\""));
  EXPECT_THROW(compile_schema(enum_of(200'000)), RequestError);
}

TEST(SchemaBounds, AlternativesThatMultiplyAreRefused) {
  std::string schema = R"({"allOf":[)";
  for (int i = 0; i < 20; ++i)
    schema += std::string(i > 0 ? "," : "") + R"({"anyOf":[{"required":["a"]},{"required":["b"]}]})";
  EXPECT_THROW(compile_schema(schema + "]}"), RequestError);
}

TEST(SchemaBounds, ReferencesThatMultiplyAreRefused) {
  std::string schema = R"({"allOf":[{"$ref":"#/$defs/d0"}],"$defs":{)";
  for (int i = 0; i < 40; ++i) {
    const std::string next = R"({"$ref":"#/$defs/d)" + std::to_string(i + 1) + "\"}";
    schema += "\"d" + std::to_string(i) + R"(":{"allOf":[)" + next + "," + next + "]},";
  }
  EXPECT_THROW(compile_schema(schema + R"("d40":{}}})"), RequestError);
}

TEST(SchemaBounds, AThousandPropertiesAreFine) {
  std::string schema = R"({"type":"object","properties":{)";
  for (int i = 0; i < 1000; ++i)
    schema += (i > 0 ? ",\"" : "\"") + std::string("property_with_a_long_name_") + std::to_string(i) +
              R"(":{"type":"integer"})";
  const auto grammar = compile_schema(schema + "}}");
  EXPECT_TRUE(takes(grammar, R"({"property_with_a_long_name_7":1,"property_with_a_long_name_999":2,"other":"x"})"));
  EXPECT_FALSE(takes(grammar, R"({"property_with_a_long_name_7":"x"})"));
}

TEST(SchemaBounds, LongPatternsAreRefused) {
  EXPECT_THROW(compile_schema(R"({"type":"string","pattern":")" + std::string(20'000, 'a') + "\"}"), RequestError);
}

TEST(SchemaBounds, AmbiguousRecursionStaysSmall) {
  // Two ways to read each level: the positions would double with every level if none were dropped.
  const auto grammar = compile_schema(R"({"$ref":"#/$defs/t","$defs":{"t":{"anyOf":[
      {"type":"object","properties":{"k":{"$ref":"#/$defs/t"}},"additionalProperties":false},
      {"type":"object","properties":{"k":{"$ref":"#/$defs/t"},"l":{}},"additionalProperties":false}]}}})");
  Matcher matcher(grammar);
  Matcher::StateId state = matcher.start();
  int depth = 0;
  for (; depth < 60; ++depth) {
    const Matcher::StateId next = matcher.step(state, "{\"k\":");
    ASSERT_NE(next, Matcher::kDead) << depth;
    state = matcher.trim(next);
  }
  state = matcher.step(state, "{}" + std::string(60, '}'));
  ASSERT_NE(state, Matcher::kDead);
  EXPECT_TRUE(matcher.accepting(state));
}

}  // namespace
}  // namespace calla
