#include "server/reply_run.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "server/anthropic.h"
#include "server/openai.h"
#include "server/responses.h"
#include "tests/server/fake_service.h"

namespace calla {
namespace {

using std::chrono::milliseconds;

constexpr const char* kCall = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>";

class ReplyRunTest : public ::testing::Test {
 protected:
  ChatRequest request(const std::string& fields = "") {
    return openai::parse_chat_request(parse_json("{" + fields + R"("messages":[{"role":"user","content":"Hi"}]})"), {});
  }

  std::vector<CollectedReply> collect(ReplyRun& run) {
    std::vector<CollectedReply> replies(static_cast<size_t>(run.choices()));
    while (!run.finished()) {
      service_.play();
      while (const auto update = run.wait(milliseconds(0))) replies[static_cast<size_t>(update->choice)].add(*update);
    }
    for (CollectedReply& reply : replies) reply.drop_unfinished_calls();
    return replies;
  }

  CollectedReply reply(const std::string& script, const std::string& fields = "") {
    service_.scripts = {script};
    const ChatRequest parsed = request(fields);
    const auto run = start_chat(model_, parsed);
    return collect(*run).front();
  }

  std::string stream(const std::string& script, ReplyDialect& dialect, const ChatRequest& parsed) {
    service_.scripts = {script};
    const auto run = start_chat(model_, parsed);
    std::string text = dialect.begin(run->choices());
    while (!run->finished()) {
      service_.play();
      while (const auto update = run->wait(milliseconds(0))) text += dialect.update(*update);
    }
    return text + dialect.end();
  }

  static std::vector<Json> events(const std::string& stream) {
    std::vector<Json> result;
    for (size_t at = 0; (at = stream.find("data: {", at)) != std::string::npos; at++) {
      result.push_back(parse_json(stream.substr(at + 6, stream.find("\n\n", at) - at - 6)));
    }
    return result;
  }

  FakeService service_;
  const ServedModel model_ = fake_model(service_);
  const std::string tools_ =
      R"("tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{"type":"integer"}}}}}],)";
};

TEST_F(ReplyRunTest, Ends) {
  EXPECT_EQ(reply("R\n</think>\n\nA").summary.end, ReplyEnd::kStop);
  EXPECT_EQ(reply("R\n</think>\n\nA", R"("max_tokens":2,)").summary.end, ReplyEnd::kLength);
  const CollectedReply stopped = reply("R\n</think>\n\nA stop here", R"("stop":" stop",)");
  EXPECT_EQ(stopped.summary.end, ReplyEnd::kStopString);
  EXPECT_EQ(stopped.summary.stop_string, " stop");
  EXPECT_EQ(stopped.content, "A");
  EXPECT_EQ(reply(std::string("R\n</think>\n\n") + kCall, tools_).summary.end, ReplyEnd::kToolCalls);
  EXPECT_EQ(reply(std::string("R\n") + kCall, tools_).summary.end, ReplyEnd::kToolCalls);
}

TEST_F(ReplyRunTest, CutCallsAreLeftOut) {
  const auto n_tokens = tiny_tokenizer().encode(kCall, AddedTokens::kRecognise).size();
  for (size_t n = 1; n < n_tokens; n++) {
    const CollectedReply cut =
        reply(kCall, tools_ + R"("enable_thinking":false,"max_tokens":)" + std::to_string(n) + ",");
    EXPECT_EQ(cut.summary.end, ReplyEnd::kLength);
    // Complete once </function> has come, though its last token may hold more.
    for (const auto& call : cut.calls) EXPECT_EQ(call.arguments, R"({"a":1})");
    EXPECT_EQ(cut.content, "");
  }
}

TEST_F(ReplyRunTest, OneCallIfNotParallel) {
  const std::string two = std::string(kCall) + "\n" + kCall;
  EXPECT_EQ(reply(two, tools_ + R"("enable_thinking":false,)").calls.size(), 2u);
  const CollectedReply one = reply(two, tools_ + R"("enable_thinking":false,"parallel_tool_calls":false,)");
  EXPECT_EQ(one.calls.size(), 1u);
  EXPECT_EQ(one.summary.end, ReplyEnd::kToolCalls);
  EXPECT_LT(one.summary.result.generated_tokens, reply(two, tools_).summary.result.generated_tokens);
}

TEST_F(ReplyRunTest, LogprobsAreThoseOfTheContent) {
  const CollectedReply scored = reply("R\n</think>\n\nAbc def", R"("logprobs":true,"top_logprobs":1,)");
  std::string text;
  for (const TokenLogprobs& token : scored.logprobs) text += token.bytes;
  EXPECT_TRUE(text.ends_with("Abc def")) << text;
  EXPECT_EQ(text.find('R'), std::string::npos);
  EXPECT_TRUE(reply("A").logprobs.empty());
}

TEST_F(ReplyRunTest, FurtherRepliesWaitForTheFirst) {
  service_.scripts = {"a\n</think>\n\n0", "b\n</think>\n\n1", "c\n</think>\n\n2"};
  const ChatRequest parsed = request(R"("n":3,"seed":5,)");
  const auto run = start_chat(model_, parsed);
  EXPECT_EQ(service_.submitted.size(), 1u);
  const auto replies = collect(*run);
  ASSERT_EQ(service_.submitted.size(), 3u);
  for (size_t i = 0; i < 3; i++) {
    EXPECT_EQ(replies[i].content, std::to_string(i));
    EXPECT_EQ(service_.submitted[i]->request().sampling.seed, 5 + i);
  }
}

TEST_F(ReplyRunTest, AFullQueueRefusesTheFirstAndDelaysTheOthers) {
  service_.refuse_after = 0;
  const ChatRequest parsed = request(R"("n":2,)");
  EXPECT_THROW(start_chat(model_, parsed), RequestError);
  service_.refuse_after = 1;
  const auto run = start_chat(model_, parsed);
  service_.play();
  while (run->wait(milliseconds(0))) {
  }
  EXPECT_EQ(service_.submitted.size(), 1u);
  EXPECT_FALSE(run->finished());
  service_.refuse_after = -1;
  EXPECT_EQ(collect(*run).size(), 2u);
}

TEST_F(ReplyRunTest, LeavingCancels) {
  const ChatRequest parsed = request();
  start_chat(model_, parsed).reset();
  ASSERT_EQ(service_.submitted.size(), 1u);
  EXPECT_TRUE(service_.submitted[0]->cancelled());
}

TEST_F(ReplyRunTest, TheEngineGetsTheRequest) {
  const ChatRequest parsed = request(R"("max_tokens":7,"cache_prompt":false,"logprobs":true,"top_logprobs":4,)");
  const auto run = start_chat(model_, parsed);
  const GenerationRequest& sent = service_.submitted[0]->request();
  EXPECT_EQ(sent.max_tokens, 7);
  EXPECT_FALSE(sent.use_cache);
  EXPECT_EQ(sent.top_logprobs, 4);
  EXPECT_EQ(tiny_tokenizer().decode(sent.prompt, false),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n");
  ASSERT_EQ(sent.boundaries.size(), 1u);
  EXPECT_EQ(tiny_tokenizer().decode(std::vector<TokenId>(sent.prompt.begin(), sent.prompt.begin() + sent.boundaries[0]),
                                    false),
            "<|im_start|>user\nHi<|im_end|>\n");
  EXPECT_FALSE(sent.constraint);
  const ChatRequest strict = request(R"("response_format":{"type":"json_object"},)");
  start_chat(model_, strict);
  EXPECT_TRUE(service_.submitted[1]->request().constraint);
}

TEST_F(ReplyRunTest, ChatStream) {
  const ChatRequest parsed =
      request(tools_ + R"("stream":true,"stream_options":{"include_usage":true},"return_progress":true,)");
  openai::ChatDialect dialect({"id", "m", 1}, parsed.settings);
  const std::string text = stream(std::string("Hm.\n</think>\n\nText\n\n") + kCall, dialect, parsed);
  EXPECT_TRUE(text.ends_with("data: [DONE]\n\n"));
  std::string reasoning, content, arguments, name, finish;
  const auto chunks = events(text);
  for (const Json& chunk : chunks) {
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    if (chunk["choices"].empty()) continue;
    const Json& choice = chunk["choices"][0];
    const Json& delta = choice["delta"];
    if (delta.contains("reasoning_content")) reasoning += delta["reasoning_content"].get<std::string>();
    if (delta.contains("content")) content += delta["content"].get<std::string>();
    if (delta.contains("tool_calls")) {
      const Json& function = delta["tool_calls"][0]["function"];
      if (function.contains("name")) name += function["name"].get<std::string>();
      arguments += function["arguments"].get<std::string>();
    }
    if (!choice["finish_reason"].is_null()) finish = choice["finish_reason"].get<std::string>();
  }
  EXPECT_EQ(chunks[0]["choices"][0]["delta"]["role"], "assistant");
  EXPECT_TRUE(chunks[1].contains("prompt_progress"));
  EXPECT_EQ(reasoning, "Hm.");
  EXPECT_EQ(content, "Text");
  EXPECT_EQ(name, "f");
  EXPECT_EQ(arguments, R"({"a":1})");
  EXPECT_EQ(finish, "tool_calls");
  EXPECT_EQ(chunks.back()["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
  EXPECT_TRUE(chunks[0]["usage"].is_null());
}

TEST_F(ReplyRunTest, ChatResponse) {
  const ChatRequest parsed = request(tools_);
  const Json json =
      openai::chat_response({"id", "m", 1}, parsed.settings, {reply(std::string("Hm.\n</think>\n\n") + kCall, tools_)});
  const Json& message = json["choices"][0]["message"];
  EXPECT_TRUE(message["content"].is_null());
  EXPECT_EQ(message["reasoning_content"], "Hm.");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], R"({"a":1})");
  EXPECT_EQ(json["choices"][0]["finish_reason"], "tool_calls");
  EXPECT_EQ(json["timings"]["cache_n"], 2);
  EXPECT_EQ(json["timings"]["prompt_ms"], 500.0);
  EXPECT_EQ(json["usage"]["total_tokens"].get<int>(),
            json["usage"]["prompt_tokens"].get<int>() + json["usage"]["completion_tokens"].get<int>());
}

// The further choices find the prompt in the cache, and usage and timings count it once.
TEST_F(ReplyRunTest, UsageAndTimingsCountTheSameTokens) {
  const ChatRequest parsed = request(R"("n":3,"stream":true,"stream_options":{"include_usage":true},)");
  const auto run = start_chat(model_, parsed);
  const auto replies = collect(*run);
  openai::ChatDialect dialect({"id", "m", 1}, parsed.settings);
  const Json streamed = events(stream("Hello.", dialect, parsed)).back();
  int generated = 0;
  for (const CollectedReply& reply : replies) generated += reply.summary.result.generated_tokens;
  const int prompt = run->prompt_tokens();
  for (const Json& json : {openai::chat_response({"id", "m", 1}, parsed.settings, replies), streamed}) {
    const Json &usage = json["usage"], &timings = json["timings"];
    EXPECT_EQ(usage["prompt_tokens"], prompt);
    EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], 2);
    EXPECT_EQ(usage["completion_tokens"], generated);
    EXPECT_EQ(timings["cache_n"], 2);
    EXPECT_EQ(timings["prompt_n"], prompt - 2);
    EXPECT_EQ(timings["prompt_ms"], 500.0);
    EXPECT_EQ(timings["predicted_n"], generated);
    EXPECT_EQ(timings["predicted_ms"], 750.0);
  }
}

TEST_F(ReplyRunTest, AnthropicStream) {
  const ChatRequest parsed = request(tools_);
  anthropic::MessageDialect dialect({"id", "m"}, 7);
  const auto list = events(stream(std::string("Hm.\n</think>\n\nText\n\n") + kCall, dialect, parsed));
  std::vector<std::string> kinds;
  std::string input;
  for (const Json& event : list) {
    const std::string type = event["type"];
    if (type == "content_block_start") kinds.push_back(event["content_block"]["type"]);
    if (type == "content_block_delta" && event["delta"]["type"] == "input_json_delta") {
      input += event["delta"]["partial_json"].get<std::string>();
    }
    if (type.starts_with("content_block")) {
      EXPECT_EQ(event["index"].get<size_t>() + 1, kinds.size());
    }
  }
  EXPECT_EQ(list.front()["type"], "message_start");
  EXPECT_EQ(list.front()["message"]["usage"]["input_tokens"], 7);
  EXPECT_EQ(list.back()["type"], "message_stop");
  EXPECT_EQ(kinds, (std::vector<std::string>{"thinking", "text", "tool_use"}));
  EXPECT_EQ(input, R"({"a":1})");
  EXPECT_EQ(list[list.size() - 2]["delta"]["stop_reason"], "tool_use");
}

TEST_F(ReplyRunTest, ResponsesStream) {
  const auto parsed = responses::parse_response_request(
      parse_json(
          R"({"input":"Hi","stream":true,"tools":[{"type":"function","name":"f","parameters":{"properties":{"a":{"type":"integer"}}}}]})"),
      {});
  responses::ResponseDialect dialect({"x", "m", 1}, parsed);
  const auto list = events(stream(std::string("Hm.\n</think>\n\nText\n\n") + kCall, dialect, parsed.chat));
  for (size_t i = 0; i < list.size(); i++) EXPECT_EQ(list[i]["sequence_number"], i);
  const Json& response = list.back()["response"];
  EXPECT_EQ(list.back()["type"], "response.completed");
  ASSERT_EQ(response["output"].size(), 3u);
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "Hm.");
  EXPECT_EQ(response["output"][1]["content"][0]["text"], "Text");
  EXPECT_EQ(response["output"][2]["arguments"], R"({"a":1})");

  CollectedReply whole;
  whole.reasoning = "Hm.";
  whole.content = "Text";
  whole.calls.push_back({response["output"][2]["call_id"], "f", R"({"a":1})", true});
  const Json unstreamed = responses::response_json({"x", "m", 1}, parsed, whole);
  EXPECT_EQ(unstreamed["output"], response["output"]);
}

}  // namespace
}  // namespace calla
