#include "chat/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace calla {
namespace {

using ::testing::HasSubstr;

void expect_refused(const std::string& messages, const std::string& field, const std::string& words) {
  try {
    parse_messages(parse_json(messages));
    ADD_FAILURE() << "accepted: " << messages;
  } catch (const RequestError& error) {
    EXPECT_EQ(error.field(), field) << messages;
    EXPECT_THAT(error.what(), HasSubstr(words)) << messages;
  }
}

TEST(Messages, RefusesPartsOtherThanTextAndNamesThem) {
  const auto with_part = [](const std::string& part) {
    return R"([{"role":"user","content":"a"},{"role":"user","content":[{"type":"text","text":"b"},)" + part + "]}]";
  };
  const std::string field = "messages[1].content[1]";
  expect_refused(with_part(R"({"type":"image_url","image_url":{"url":"data:,"}})"), field, "'image_url'");
  expect_refused(with_part(R"({"type":"input_image","image_url":"x"})"), field, "'input_image'");
  expect_refused(with_part(R"({"type":"image","source":{}})"), field, "'image'");
  expect_refused(with_part(R"({"type":"video","video":"x"})"), field, "'video'");
  expect_refused(with_part(R"({"type":"input_audio","input_audio":{}})"), field, "'input_audio'");
  expect_refused(with_part(R"({"type":"text","text":"x","image":"y"})"), field, "text only");
  expect_refused(with_part(R"({"type":"mystery"})"), field, "'mystery'");
  expect_refused(with_part("\"bare\""), field, "bare string");
  expect_refused(with_part(R"({"type":"text","text":7})"), field + ".text", "string");
}

TEST(Messages, RefusesWrongShapes) {
  expect_refused("{}", "messages", "list");
  expect_refused("[1]", "messages[0]", "object");
  expect_refused("[{}]", "messages[0].role", "role");
  expect_refused(R"([{"role":"robot"}])", "messages[0].role", "'robot'");
  expect_refused(R"([{"role":7}])", "messages[0].role", "string");
  expect_refused(R"([{"role":"user","content":7}])", "messages[0].content", "number");
  expect_refused(R"([{"role":"user","content":{}}])", "messages[0].content", "object");
  expect_refused(R"([{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls", "list");
  expect_refused(R"([{"role":"assistant","tool_calls":[{"function":{}}]}])", "messages[0].tool_calls[0].function.name",
                 "missing");
  const std::string field = "messages[0].tool_calls[0].function.arguments";
  for (const char* arguments : {"7", "[]", R"("[1]")", R"("{\"a\":")", R"("text")"}) {
    expect_refused(
        std::string(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":)") + arguments + "}}]}]",
        field, "JSON object");
  }
}

TEST(Messages, ReadsArgumentsOfBothForms) {
  for (const char* arguments : {R"({"z":1,"a":9007199254740993})", R"("{\"z\":1,\"a\":9007199254740993}")"}) {
    const auto messages = parse_messages(
        parse_json(std::string(R"([{"role":"assistant","tool_calls":[{"id":"x","function":{"name":"f","arguments":)") +
                   arguments + "}}]}]"));
    EXPECT_EQ(compact_json(messages[0].tool_calls[0].arguments), R"({"z":1,"a":9007199254740993})");
    EXPECT_EQ(messages[0].tool_calls[0].id, "x");
  }
  EXPECT_TRUE(parse_arguments(Json("  "), "f").empty());
}

TEST(Messages, ReadsReasoningUnderBothNames) {
  const auto messages = parse_messages(parse_json(
      R"([{"role":"assistant","reasoning_content":"a"},{"role":"assistant","reasoning":"b"},
          {"role":"assistant","reasoning_content":""},{"role":"assistant","reasoning_content":null},
          {"role":"user","reasoning_content":"c"}])"));
  EXPECT_EQ(messages[0].reasoning, "a");
  EXPECT_EQ(messages[1].reasoning, "b");
  EXPECT_EQ(messages[2].reasoning, "");
  EXPECT_FALSE(messages[3].reasoning);
  EXPECT_FALSE(messages[4].reasoning);
}

TEST(Tools, ReadsNamesAndSchemas) {
  const auto tools = parse_tools(
      parse_json(R"([{"type":"function","function":{"name":"a","parameters":{"type":"object"}}},{"name":"b"}])"));
  ASSERT_EQ(tools.size(), 2u);
  EXPECT_EQ(tools[0].name, "a");
  EXPECT_EQ(compact_json(tools[0].parameters), R"({"type":"object"})");
  EXPECT_EQ(tools[1].name, "b");
  EXPECT_TRUE(tools[1].parameters.is_null());
  EXPECT_TRUE(parse_tools(Json()).empty());
}

TEST(Tools, RefusesWrongShapes) {
  for (const char* tools : {"{}", "[1]", "[{}]", R"([{"type":"function"}])", R"([{"type":"web_search"}])",
                            R"([{"type":"function","function":"f"}])", R"([{"function":{"name":""}}])"}) {
    EXPECT_THROW(parse_tools(parse_json(tools)), RequestError) << tools;
  }
}

}  // namespace
}  // namespace calla
