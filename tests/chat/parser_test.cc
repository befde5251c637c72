#include "chat/stream_parser.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/chat/parse_reply.h"

namespace calla {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = ReplyEvent::Kind;

constexpr const char* kTools = R"([
  {"type":"function","function":{"name":"write_file","parameters":{"type":"object","properties":{
     "path":{"type":"string"},"text":{"type":"string"}}}}},
  {"type":"function","function":{"name":"list_dir","parameters":{"type":"object","properties":{
     "path":{"type":"string"}}}}},
  {"type":"function","function":{"name":"search","parameters":{"type":"object","properties":{
     "q":{"type":"string"},"limit":{"type":"integer"},"tag":{"type":["string","null"]}}}}}])";

constexpr const char* kTwoCalls =
    "I'll do "
    "both.\n\n<tool_call>\n<function=write_file>\n<parameter=path>\nnotes/é.txt\n</"
    "parameter>\n<parameter=text>\n"
    "if (a < b && c > d) { puts(\"</div> <tool\"); }\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=list_dir>\n<parameter=path>\n.\n</parameter>\n</function>\n</tool_call>";

// Parses the text whole, byte by byte, split at every position, and in random chunks; all must give the same.
ParsedReply parse(const std::string& text, const ParseRequest& request) {
  const ParsedReply whole = parse_chunks({text}, request);
  std::vector<std::string_view> bytes;
  for (size_t i = 0; i < text.size(); i++) bytes.push_back(std::string_view(text).substr(i, 1));
  EXPECT_EQ(parse_chunks(bytes, request), whole) << "byte by byte: " << text;
  for (size_t i = 1; i < text.size(); i++) {
    const std::string_view view = text;
    EXPECT_EQ(parse_chunks({view.substr(0, i), view.substr(i)}, request), whole) << "split at " << i << ": " << text;
  }
  std::mt19937 random(static_cast<uint32_t>(text.size()));
  for (int run = 0; run < 20; run++) {
    std::vector<std::string_view> chunks;
    for (std::string_view rest = text; !rest.empty();) {
      chunks.push_back(rest.substr(0, 1 + random() % 9));
      rest.remove_prefix(chunks.back().size());
    }
    EXPECT_EQ(parse_chunks(chunks, request), whole) << "random chunks: " << text;
  }
  return whole;
}

ParsedReply parse(const std::string& text) { return parse(text, {.thinking = false, .tools = kTools, .cut = false}); }
ParsedReply parse_thinking(const std::string& text) {
  return parse(text, {.thinking = true, .tools = kTools, .cut = false});
}
ParsedReply parse_cut(const std::string& text, bool thinking = false) {
  return parse(text, {.thinking = thinking, .tools = kTools, .cut = true});
}

ParsedReply text_reply(const std::string& content, const std::string& reasoning = "") {
  return {reasoning, content, {}};
}
ParsedReply::Call call(int index, const std::string& name, const std::string& arguments, bool complete = true) {
  return {"id" + std::to_string(index), name, arguments, complete};
}

TEST(Parser, PlainText) {
  EXPECT_EQ(parse(""), text_reply(""));
  EXPECT_EQ(parse("Hello, wörld < 3 > 2 </b> <tool <toolbox> <think"),
            text_reply("Hello, wörld < 3 > 2 </b> <tool <toolbox> <think"));
  EXPECT_EQ(parse("\n\n  Hello\n\nyou \n"), text_reply("  Hello\n\nyou \n"));
  EXPECT_EQ(parse("    indented"), text_reply("    indented"));
  EXPECT_EQ(parse(" \n \n"), text_reply(""));
}

TEST(Parser, ReasoningThenContent) {
  EXPECT_EQ(parse_thinking("I think.\n</think>\n\nDone."), text_reply("Done.", "I think."));
  EXPECT_EQ(parse_thinking("  I\n\nthink < all > </thin \n\n</think>Done.\n"),
            text_reply("Done.\n", "I\n\nthink < all > </thin"));
  EXPECT_EQ(parse_thinking("\n</think>\n\nDone."), text_reply("Done."));
  EXPECT_EQ(parse_thinking("</think>\n\n    code"), text_reply("    code"));
  EXPECT_EQ(parse_thinking("never closed \n"), text_reply("", "never closed"));
  EXPECT_EQ(parse_thinking(""), text_reply(""));
  EXPECT_EQ(parse_thinking("a</think>\n\nb</think>c <think> d"), text_reply("b</think>c <think> d", "a"));
}

TEST(Parser, ThinkTagsWhereThePromptAlreadyWroteThem) {
  EXPECT_EQ(parse_thinking("<think>\nR\n</think>\n\nA"), text_reply("A", "R"));
  EXPECT_EQ(parse_thinking("R\n</think>\n\n</think>\n\nA"), text_reply("A", "R"));
  EXPECT_EQ(parse("<think>\nR\n</think>\n\nA"), text_reply("A", "R"));
  EXPECT_EQ(parse("</think>\n\nA"), text_reply("A"));
}

// Case: thinking cut by max_tokens.
TEST(Parser, CutWhileThinking) {
  EXPECT_EQ(parse_cut("I need to", true), text_reply("", "I need to"));
  EXPECT_EQ(parse_cut("I need to </thi", true), text_reply("", "I need to </thi"));
  EXPECT_EQ(parse_cut("a < ", true), text_reply("", "a <"));
}

// Case: streamed tool calls are the same as unstreamed, at any chunking.
TEST(Parser, TwoCalls) {
  const ParsedReply reply = parse(kTwoCalls);
  EXPECT_EQ(reply.content, "I'll do both.");
  ASSERT_EQ(reply.calls.size(), 2u);
  EXPECT_EQ(reply.calls[0].name, "write_file");
  EXPECT_EQ(parse_json(reply.calls[0].arguments),
            parse_json(R"({"path":"notes/é.txt","text":"if (a < b && c > d) { puts(\"</div> <tool\"); }"})"));
  EXPECT_EQ(reply.calls[1].name, "list_dir");
  EXPECT_EQ(parse_json(reply.calls[1].arguments), parse_json(R"({"path":"."})"));
  EXPECT_TRUE(reply.calls[0].complete && reply.calls[1].complete);
  EXPECT_NE(reply.calls[0].id, reply.calls[1].id);
}

TEST(Parser, CallIdsAreDistinct) {
  ParserOptions options;
  options.tools = parse_tools(parse_json(kTools));
  StreamParser parser(std::move(options));
  std::vector<ReplyEvent> events;
  parser.push(kTwoCalls, events);
  std::vector<std::string> ids;
  for (const ReplyEvent& event : events) {
    if (event.kind == Kind::kCallStart) ids.push_back(event.id);
  }
  ASSERT_EQ(ids.size(), 2u);
  EXPECT_TRUE(ids[0].starts_with("call_"));
  EXPECT_NE(ids[0], ids[1]);
}

// Nothing is held back but what may still be markup.
TEST(Parser, HoldsBackOnlyPossibleMarkup) {
  ParserOptions options;
  options.tools = parse_tools(parse_json(kTools));
  StreamParser parser(std::move(options));
  std::string content;
  std::string arguments;
  const auto push = [&](std::string_view text) {
    std::vector<ReplyEvent> events;
    parser.push(text, events);
    for (const ReplyEvent& event : events) (event.kind == Kind::kContent ? content : arguments) += event.text;
  };
  push("a <");
  EXPECT_EQ(content, "a");
  push("t");
  push("o");
  EXPECT_EQ(content, "a");
  push("p");
  EXPECT_EQ(content, "a <top");
  push(" b <tool_call> c");
  EXPECT_EQ(content, "a <top b <tool_call> c");
  push("<tool_call>\n<function=write_file>\n<parameter=text>\nfirst line");
  EXPECT_EQ(arguments, R"({"text":"first line)");
  push("\n");
  EXPECT_EQ(arguments, R"({"text":"first line)");
  push("second </p");
  EXPECT_EQ(arguments, R"({"text":"first line\nsecond )");
  push("> third");
  EXPECT_EQ(arguments, R"({"text":"first line\nsecond </p> third)");
  push("\n</parameter>");
  EXPECT_EQ(arguments, R"({"text":"first line\nsecond </p> third)");
  push("\n</function>");
  EXPECT_EQ(arguments, R"({"text":"first line\nsecond </p> third"})");
}

TEST(Parser, NullableStringStreamsOnceItIsNotNull) {
  ParserOptions options;
  options.tools = parse_tools(parse_json(kTools));
  StreamParser parser(std::move(options));
  std::vector<ReplyEvent> events;
  parser.push("<tool_call>\n<function=search>\n<parameter=tag>\nnul", events);
  ASSERT_EQ(events.size(), 1u);
  parser.push("lable", events);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].text, R"({"tag":"nullable)");
}

TEST(Parser, NameComesFirst) {
  ParserOptions options;
  options.tools = parse_tools(parse_json(kTools));
  StreamParser parser(std::move(options));
  std::vector<ReplyEvent> events;
  parser.push("Text\n<tool_call>\n<function=search>\n<parameter=", events);
  ASSERT_EQ(events.size(), 1u);
  parser.push("q>\n", events);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[1].kind, Kind::kCallStart);
  EXPECT_EQ(events[1].name, "search");
  EXPECT_EQ(events[1].call, 0);
}

// Case: tool call inside an unclosed think block, and text that only mentions the tag.
TEST(Parser, CallEndsReasoning) {
  const ParsedReply reply = parse_thinking(
      "I should look it up.\n<tool_call>\n<function=search>\n<parameter=q>\ngated "
      "delta\n</parameter>\n</function>\n"
      "</tool_call>");
  EXPECT_EQ(reply, (ParsedReply{"I should look it up.", "", {call(0, "search", R"({"q":"gated delta"})")}}));
  EXPECT_EQ(parse_thinking("They said the tag <tool_call> starts a call. Fine.\n</think>\n\nDone."),
            text_reply("Done.", "They said the tag <tool_call> starts a call. Fine."));
  EXPECT_EQ(parse_thinking("Like <tool_call><function=search><parameter=q>?\n</think>\n\nDone."),
            text_reply("Done.", "Like <tool_call><function=search><parameter=q>?"));
  EXPECT_EQ(parse_thinking("A line <tool_call>\n<function=search> is next.\n</think>\n\nDone."),
            text_reply("Done.", "A line <tool_call>\n<function=search> is next."));
}

TEST(Parser, CallAfterReasoning) {
  EXPECT_EQ(parse_thinking("R\n</think>\n\n<tool_call>\n<function=search>\n</function>\n</tool_call>"),
            (ParsedReply{"R", "", {call(0, "search", "{}")}}));
}

// Case: tool call cut by max_tokens.
TEST(Parser, CutCallsStayUnfinished) {
  const std::string text = kTwoCalls;
  EXPECT_EQ(parse_cut(text.substr(0, text.find("te_file>"))), text_reply("I'll do both."));

  ParsedReply reply = parse_cut(text.substr(0, text.find(" && c")));
  EXPECT_EQ(reply.content, "I'll do both.");
  EXPECT_THAT(reply.calls, ElementsAre(call(0, "write_file", R"({"path":"notes/é.txt","text":"if (a < b)", false)));

  const std::string last = "puts(\"</div> <tool\"); }\n</parameter>\n";
  reply = parse_cut(text.substr(0, text.find(last) + last.size()));
  ASSERT_EQ(reply.calls.size(), 1u);
  EXPECT_FALSE(reply.calls[0].complete);
  EXPECT_TRUE(try_parse_json(reply.calls[0].arguments).is_discarded());

  reply = parse_cut(text.substr(0, text.rfind("</parameter>")));
  ASSERT_EQ(reply.calls.size(), 2u);
  EXPECT_TRUE(reply.calls[0].complete);
  EXPECT_FALSE(reply.calls[1].complete);
}

TEST(Parser, NoCutEverMakesACallComplete) {
  const std::string text = kTwoCalls;
  const size_t first_end = text.find("</function>") + std::string("</function>").size();
  for (size_t length = 0; length < text.size(); length++) {
    const ParsedReply reply = parse_chunks({std::string_view(text).substr(0, length)}, {false, kTools, true});
    const size_t complete = length < first_end ? 0u : length < text.rfind("\n</tool_call>") ? 1u : 2u;
    size_t n = 0;
    for (const auto& item : reply.calls) {
      n += item.complete;
      EXPECT_EQ(item.complete, !try_parse_json(item.arguments).is_discarded()) << length;
    }
    EXPECT_EQ(n, complete) << length;
    EXPECT_EQ(reply.content.find("<tool_"), std::string::npos) << length;
  }
}

TEST(Parser, CutInJsonCall) { EXPECT_EQ(parse_cut(R"(Hm. <tool_call>{"name": "search", "argum)"), text_reply("Hm.")); }

// A model that ends its turn by itself after the last parameter has only left out closing tags.
TEST(Parser, NaturalEndClosesACallBetweenParameters) {
  EXPECT_THAT(parse("<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>").calls,
              ElementsAre(call(0, "search", R"({"q":"x"})")));
  EXPECT_THAT(parse("<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</function>").calls,
              ElementsAre(call(0, "search", R"({"q":"x"})")));
  EXPECT_THAT(parse("<tool_call>\n<function=search>\n<parameter=q>\nx").calls,
              ElementsAre(call(0, "search", R"({"q":"x)", false)));
}

TEST(Parser, ToleratesDrift) {
  const auto expected = ElementsAre(call(0, "search", R"({"q":"x","limit":3})"));
  for (const char* text : {
           // repeated closing tags
           "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</"
           "parameter>\n<parameter=limit>\n3\n</parameter>\n"
           "</function>\n</function>\n</tool_call>\n</tool_call>",
           // no opening tag
           "<function=search>\n<parameter=q>\nx\n</parameter>\n<parameter=limit>\n3\n</parameter>\n</"
           "function>\n</tool_call>",
           // all on one line
           "<tool_call><function=search><parameter=q>x</parameter><parameter=limit>3</parameter></function></"
           "tool_call>",
           // no </function>
           "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n<parameter=limit>\n3\n</"
           "parameter>\n</tool_call>",
           // no </parameter>
           "<tool_call>\n<function=search>\n<parameter=q>\nx\n<parameter=limit>\n3\n</function>\n</"
           "tool_call>",
           // carriage returns and indentation
           "<tool_call>\r\n  <function=search>\r\n  <parameter=q>\r\nx\r\n</parameter>\r\n "
           "<parameter=limit>\r\n3\r\n"
           "</parameter>\r\n</function>\r\n</tool_call>",
           // quotes around names
           "<tool_call>\n<function=\"search\">\n<parameter='q'>\nx\n</parameter>\n<parameter=limit>\n3\n</"
           "parameter>\n"
           "</function>\n</tool_call>",
           // a parameter twice: the first counts
           "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n<parameter=limit>\n3\n</"
           "parameter>\n"
           "<parameter=q>\ny\n</parameter>\n</function>\n</tool_call>",
           // JSON
           R"(<tool_call>
{"name": "search", "arguments": {"q": "x", "limit": 3}}
</tool_call>)",
           R"(<tool_call>{"name": "search", "arguments": "{\"q\": \"x\", \"limit\": 3}"}</tool_call>)",
       }) {
    const ParsedReply reply = parse(text);
    EXPECT_THAT(reply.calls, expected) << text;
    EXPECT_EQ(reply.content, "") << text;
  }
}

TEST(Parser, SeveralFunctionsInOneCall) {
  const ParsedReply reply = parse(
      "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</function>\n<function=list_dir>\n</"
      "function>\n"
      "</tool_call>");
  EXPECT_THAT(reply.calls, ElementsAre(call(0, "search", R"({"q":"x"})"), call(1, "list_dir", "{}")));
  EXPECT_EQ(reply.content, "");
}

TEST(Parser, NextCallClosesTheOneBefore) {
  const ParsedReply reply = parse(
      "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n<tool_call>\n<function=list_dir>\n</"
      "function>\n"
      "</tool_call>");
  EXPECT_THAT(reply.calls, ElementsAre(call(0, "search", R"({"q":"x"})"), call(1, "list_dir", "{}")));
}

TEST(Parser, UndeclaredNamesArePassedOn) {
  const ParsedReply reply =
      parse("<tool_call>\n<function=unknown>\n<parameter=q>\n12\n</parameter>\n</function>\n</tool_call>");
  EXPECT_THAT(reply.calls, ElementsAre(call(0, "unknown", R"({"q":"12"})")));
}

TEST(Parser, MarkupThatMakesNoCallIsContent) {
  for (const std::string text : {
           "Use <tool_call> like this.",
           "<tool_call>",
           "<tool_call>\n<function=search",
           "<tool_call>\n<function=search>",
           "<tool_call>\n<function=search>\nThen text.\n</function>\n</tool_call>",
           "<tool_call>\n<function=>\n</function>",
           "<tool_call>\nsearch(q=1)\n</tool_call>",
           "<tool_call>{\"name\": 7}</tool_call>",
           "<tool_call>\n{not json}\n</tool_call>",
           "<tool_call>{\"name\": \"search\"",
           "</tool_call> alone",
           "A tag: <function=search>\n<parameter=q>",
           "\n<function=undeclared>\n<parameter=q>\nx\n</parameter>\n</function>",
           "<parameter=q>\nx\n</parameter>",
       }) {
    const ParsedReply reply = parse(text);
    EXPECT_THAT(reply.calls, IsEmpty()) << text;
    const std::string expected = text.starts_with("\n") ? text.substr(1) : text;
    EXPECT_EQ(reply.content, expected);
  }
}

TEST(Parser, WithoutToolsAllMarkupIsContent) {
  const ParsedReply reply = parse(kTwoCalls, {.thinking = false, .tools = "", .cut = false});
  EXPECT_THAT(reply.calls, IsEmpty());
  EXPECT_EQ(reply.content, kTwoCalls);
}

TEST(Parser, ValuesMayHoldMarkup) {
  const std::string value =
      "<dependency>\n<parameter name=\"x\">5</parameter>\n</dependency> </parameter> and "
      "</function>\n</tool_call> here\n"
      "<parameter=other>\n</think> <tool_call>\n<function=f>";
  const ParsedReply reply = parse("<tool_call>\n<function=write_file>\n<parameter=text>\n" + value +
                                  "\n</parameter>\n</function>\n</tool_call>");
  EXPECT_THAT(reply.calls, ElementsAre(call(0, "write_file", compact_json(Json{{"text", value}}))));
  EXPECT_EQ(reply.content, "");
}

TEST(Parser, TextAroundCalls) {
  const std::string one = "<tool_call>\n<function=list_dir>\n</function>\n</tool_call>";
  EXPECT_EQ(parse("A \n\n" + one + "\n\nB\n" + one + "\n").content, "A \n\nB");
  EXPECT_EQ(parse("A" + one + "B").content, "AB");
  EXPECT_EQ(parse(one + "\n\nafter").content, "after");
  EXPECT_EQ(parse(one + " </div>").content, " </div>");
  EXPECT_EQ(parse("A\n\n" + one + "\n").content, "A");
}

TEST(Parser, LongTextIsLinear) {
  std::string text = "<tool_call>\n<function=write_file>\n<parameter=text>\n";
  for (int i = 0; i < 100'000; i++) text += "a <b\n\n";
  text += "\n</parameter>\n</function>\n</tool_call>";
  EXPECT_EQ(parse_chunks({text}, {false, kTools, false}).calls.at(0).complete, true);
  std::vector<std::string_view> chunks;
  for (size_t i = 0; i < text.size(); i += 3) chunks.push_back(std::string_view(text).substr(i, 3));
  EXPECT_EQ(parse_chunks(chunks, {false, kTools, false}).calls.at(0).complete, true);
  const std::string spaces(200'000, '\n');
  EXPECT_EQ(parse_chunks({"x" + spaces + "y"}, {false, kTools, false}).content.size(), spaces.size() + 2);
}

}  // namespace
}  // namespace calla
