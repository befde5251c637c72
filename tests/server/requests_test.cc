// The three dialects' requests: the same conversation gives the same prompt, and mistakes are named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "server/anthropic.h"
#include "server/openai.h"
#include "server/responses.h"

namespace calla {
namespace {

using ::testing::HasSubstr;

ChatRequest chat(const std::string& json) { return openai::parse_chat_request(parse_json(json), {}); }
ChatRequest messages(const std::string& json) { return anthropic::parse_messages_request(parse_json(json), {}); }
ChatRequest response(const std::string& json) { return responses::parse_response_request(parse_json(json), {}).chat; }

std::string prompt(const ChatRequest& request) {
  return render_prompt(request.messages, request.tools, request.render).text();
}

template <typename Parse>
void expect_refused(Parse parse, const std::string& json, const std::string& field, const std::string& words = "") {
  try {
    parse(json);
    ADD_FAILURE() << "accepted: " << json;
  } catch (const RequestError& error) {
    EXPECT_EQ(error.field(), field) << json << ": " << error.what();
    EXPECT_THAT(error.what(), HasSubstr(words)) << json;
  }
}

const std::string kHi = R"("messages":[{"role":"user","content":"Hi"}])";

TEST(Requests, OneConversationInThreeDialects) {
  const ChatRequest a = chat(R"({"messages":[
      {"role":"system","content":"Be brief."},
      {"role":"user","content":"Weather in Zürich and Oslo?"},
      {"role":"assistant","content":"I look.","reasoning_content":"Two calls.","tool_calls":[
        {"id":"c1","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Zürich\",\"days\":2}"}},
        {"id":"c2","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Oslo\"}"}}]},
      {"role":"tool","tool_call_id":"c1","content":"7°C"},
      {"role":"tool","tool_call_id":"c2","content":"snow"},
      {"role":"user","content":"Thanks, and Rome?"}],
    "tools":[{"type":"function","function":{"name":"weather","description":"d","parameters":{"type":"object"}}}],
    "chat_template_kwargs":{"enable_thinking":false}})");
  const ChatRequest b = messages(R"({"max_tokens":5,"system":[{"type":"text","text":"Be brief."}],"messages":[
      {"role":"user","content":"Weather in Zürich and Oslo?"},
      {"role":"assistant","content":[{"type":"thinking","thinking":"Two calls.","signature":""},
        {"type":"text","text":"I look."},
        {"type":"tool_use","id":"c1","name":"weather","input":{"city":"Zürich","days":2}},
        {"type":"tool_use","id":"c2","name":"weather","input":{"city":"Oslo"}}]},
      {"role":"user","content":[{"type":"tool_result","tool_use_id":"c1","content":"7°C"},
        {"type":"tool_result","tool_use_id":"c2","content":[{"type":"text","text":"snow"}]},
        {"type":"text","text":"Thanks, and Rome?"}]}],
    "tools":[{"name":"weather","description":"d","input_schema":{"type":"object"}}],
    "thinking":{"type":"disabled"}})");
  const ChatRequest c = response(R"({"instructions":"Be brief.","input":[
      {"role":"user","content":[{"type":"input_text","text":"Weather in Zürich and Oslo?"}]},
      {"type":"reasoning","id":"rs","summary":[],"content":[{"type":"reasoning_text","text":"Two calls."}]},
      {"type":"message","role":"assistant","content":[{"type":"output_text","text":"I look.","annotations":[]}]},
      {"type":"function_call","call_id":"c1","name":"weather","arguments":"{\"city\":\"Zürich\",\"days\":2}"},
      {"type":"function_call","call_id":"c2","name":"weather","arguments":"{\"city\":\"Oslo\"}"},
      {"type":"function_call_output","call_id":"c1","output":"7°C"},
      {"type":"function_call_output","call_id":"c2","output":[{"type":"input_text","text":"snow"}]},
      {"role":"user","content":"Thanks, and Rome?"}],
    "tools":[{"type":"function","name":"weather","description":"d","parameters":{"type":"object"}}],
    "reasoning":{"effort":"none"}})");
  EXPECT_EQ(prompt(a), prompt(b));
  EXPECT_EQ(prompt(a), prompt(c));
  EXPECT_EQ(a.messages[2].reasoning, "Two calls.");
  EXPECT_EQ(b.messages[2].reasoning, "Two calls.");
  EXPECT_EQ(c.messages[2].reasoning, "Two calls.");
}

TEST(Requests, InstructionsAndDeveloperMessagesMerge) {
  const std::string expected = prompt(chat(
      R"({"messages":[{"role":"developer","content":"Answer in French."},{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"}]})"));
  EXPECT_EQ(
      prompt(response(
          R"({"instructions":"Answer in French.","input":[{"role":"developer","content":"Be brief."},{"role":"user","content":"Hi"}]})")),
      expected);
}

TEST(Requests, SamplingDefaultsAndLimits) {
  SamplingParams defaults;
  defaults.temperature = 0.6f;
  defaults.top_k = 20;
  const auto sampling = [&](const std::string& fields) {
    return openai::parse_chat_request(parse_json("{" + fields + kHi + "}"), defaults).settings.sampling;
  };
  EXPECT_EQ(sampling("").temperature, 0.6f);
  EXPECT_EQ(sampling("").top_k, 20);
  EXPECT_EQ(sampling(R"("temperature":null,"top_k":-1,)").top_k, 0);
  EXPECT_EQ(sampling(R"("temperature":0,)").temperature, 0);
  EXPECT_EQ(sampling(R"("seed":-5,)").seed, static_cast<uint64_t>(-5));
  EXPECT_NE(sampling("").seed, sampling("").seed);
  EXPECT_GT(sampling(R"("top_p":0,)").top_p, 0);
  for (const char* value : {"-2", "0", "2", "1.5"}) {
    EXPECT_NO_THROW(sampling(std::string(R"("presence_penalty":)") + value + ","));
  }
  const auto refuse = [&](const std::string& fields, const std::string& field) {
    expect_refused([&](const std::string& json) { sampling(json); }, fields + ",", field);
  };
  refuse(R"("presence_penalty":2.5)", "presence_penalty");
  refuse(R"("presence_penalty":"1.5")", "presence_penalty");
  refuse(R"("temperature":2.1)", "temperature");
  refuse(R"("top_k":1.5)", "top_k");
  refuse(R"("seed":18446744073709551615)", "seed");
  refuse(R"("repetition_penalty":0)", "repetition_penalty");
}

// Not as the floats that the sampler has.
TEST(Requests, ResponsesRepeatTheNumbersAsTheyWereSent) {
  SamplingParams defaults;
  defaults.temperature = 0.6f;
  defaults.top_p = 0.95f;
  const auto echoed = [&](const std::string& fields) {
    const Json all = responses::parse_response_request(parse_json("{" + fields + R"("input":"Hi"})"), defaults).echoed;
    return compact_json({all["temperature"], all["top_p"]});
  };
  EXPECT_EQ(echoed(R"("temperature":0.7,"top_p":0.123456789,)"), "[0.7,0.123456789]");
  EXPECT_EQ(echoed(R"("temperature":1,"top_p":0,)"), "[1,0]");
  EXPECT_EQ(echoed(R"("temperature":null,)"), "[0.6,0.95]");
  defaults.temperature = 1;
  defaults.top_p = 1e-6f;
  EXPECT_EQ(echoed(""), "[1.0,1e-06]");
}

TEST(Requests, ThinkingSwitches) {
  const auto thinking = [](const std::string& fields) { return chat("{" + fields + kHi + "}").render.enable_thinking; };
  EXPECT_TRUE(thinking(""));
  EXPECT_FALSE(thinking(R"("enable_thinking":false,)"));
  EXPECT_FALSE(thinking(R"("chat_template_kwargs":{"enable_thinking":false},)"));
  EXPECT_FALSE(thinking(R"("reasoning_effort":"none",)"));
  EXPECT_TRUE(thinking(R"("reasoning_effort":"low",)"));
  EXPECT_FALSE(thinking(R"("reasoning_effort":"none","enable_thinking":false,)"));
  expect_refused(chat, R"({"enable_thinking":true,"reasoning_effort":"none",)" + kHi + "}", "reasoning_effort",
                 "enable_thinking");
  expect_refused(chat, R"({"reasoning_effort":"hard",)" + kHi + "}", "reasoning_effort", "hard");
  expect_refused(messages, R"({"max_tokens":1,"enable_thinking":true,"thinking":{"type":"disabled"},)" + kHi + "}",
                 "thinking", "enable_thinking");
}

TEST(Requests, ToolChoice) {
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"f"}},{"type":"function","function":{"name":"g"}}],)";
  EXPECT_EQ(chat("{" + tools + kHi + "}").tool_choice, ToolChoice::kAuto);
  EXPECT_TRUE(chat(R"({"tool_choice":"none",)" + tools + kHi + "}").tools.empty());
  EXPECT_EQ(chat(R"({"tool_choice":"required",)" + tools + kHi + "}").tool_choice, ToolChoice::kRequired);
  EXPECT_EQ(chat(R"({"tool_choice":{"type":"function","function":{"name":"g"}},)" + tools + kHi + "}").tool_name, "g");
  expect_refused(chat, R"({"tool_choice":{"type":"function","function":{"name":"h"}},)" + tools + kHi + "}",
                 "tool_choice", "'h'");
  expect_refused(chat, R"({"tool_choice":"required",)" + kHi + "}", "tool_choice", "tools is empty");
  expect_refused(chat, R"({"tool_choice":"always",)" + tools + kHi + "}", "tool_choice");
  expect_refused(chat, R"({"tool_choice":"required","response_format":{"type":"json_object"},)" + tools + kHi + "}",
                 "tool_choice", "response_format");
}

TEST(Requests, MistakesAreNamed) {
  expect_refused(chat, "[]", "the request", "JSON object");
  expect_refused(chat, "{}", "messages", "missing");
  // Beyond 64 bits, and beyond any number.
  expect_refused(chat, R"({"seed":99999999999999999999,)" + kHi + "}", "seed", "found 99999999999999999999");
  expect_refused(chat, R"({"temperature":-99999999999999999999,)" + kHi + "}", "temperature", "found -999999");
  expect_refused(chat, R"({"stream":99999999999999999999,)" + kHi + "}", "stream", "found number");
  expect_refused(chat, R"({"stream":1,)" + kHi + "}", "stream");
  expect_refused(chat, R"({"response_format":{"type":"json_schema"},)" + kHi + "}", "response_format.json_schema");
  expect_refused(messages, "{" + kHi + "}", "max_tokens", "missing");
  expect_refused(messages, R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]})",
                 "messages[0].content[0]", "text only");
  expect_refused(
      messages,
      R"({"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"image"}]}]}]})",
      "messages[0].content[0].content[0]", "text only");
  expect_refused(messages,
                 R"({"max_tokens":1,"tools":[{"type":"web_search_20250305","name":"web_search"}],)" + kHi + "}",
                 "tools[0].type");
  expect_refused(response, R"({"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]})",
                 "input[0].content[0]", "text only");
  expect_refused(response, R"({"input":[{"role":"user","content":"a"},{"type":"computer_call"}]})", "input[1].type");
  expect_refused(response, R"({"input":"a","previous_response_id":"resp_1"})", "previous_response_id", "state");
  expect_refused(response, R"({"input":"a","tools":[{"type":"web_search"}]})", "tools[0].type");
  expect_refused(response, "{}", "input", "missing");
}

}  // namespace
}  // namespace calla
