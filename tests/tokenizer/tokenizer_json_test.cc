#include "tokenizer/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tests/tokenizer/tiny_json.h"
#include "tokenizer/tokenizer.h"

namespace calla {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const std::vector<std::pair<std::string, std::string>> kMerges = {{"a", "b"}, {"ab", "c"}};

std::string error_of_text(const std::string& text) {
  try {
    Tokenizer::parse(text, {}, "t.json");
    return "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr("t.json: "));
    return error.what();
  }
}

std::string error_after(const std::function<void(json&)>& change) {
  json file = test::tiny_json(kMerges);
  change(file);
  return error_of_text(file.dump());
}

TEST(TokenizerJson, ReadsMergesAsPairsAndAsStrings) {
  const TokenizerSpec pairs = parse_tokenizer_json(test::tiny_json(kMerges).dump(), "t");
  json file = test::tiny_json(kMerges);
  file["model"]["merges"] = {"a b", "ab c"};
  const TokenizerSpec strings = parse_tokenizer_json(file.dump(), "t");
  for (const TokenizerSpec* spec : {&pairs, &strings}) {
    ASSERT_EQ(spec->merges.size(), 2u);
    EXPECT_EQ(spec->merges[1].left, 256);
    EXPECT_EQ(spec->merges[1].right, 'c');
    EXPECT_EQ(spec->merges[1].result, 257);
    EXPECT_EQ(spec->model_tokens.bytes(257), "abc");
    EXPECT_TRUE(spec->nfc);
    EXPECT_EQ(spec->added_tokens.size(), 2u);
  }
}

TEST(TokenizerJson, AcceptsWhatMayBeLeftOut) {
  EXPECT_EQ(error_after([](json& f) { f.erase("truncation"), f.erase("padding"), f.erase("post_processor"); }),
            "accepted");
  EXPECT_EQ(error_after([](json& f) { f["normalizer"] = nullptr; }), "accepted");
  EXPECT_EQ(error_after([](json& f) { f.erase("added_tokens"); }), "accepted");
  EXPECT_EQ(error_after([](json& f) { f["model"].erase("dropout"), f["model"].erase("ignore_merges"); }), "accepted");
}

TEST(TokenizerJson, RefusesWhatIsNotJson) {
  EXPECT_THAT(error_of_text("[]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of_text("{\"a\": 1, \"a\": 2}"), HasSubstr("\"a\" stands twice"));
  EXPECT_THAT(error_of_text("{\"a\":" + std::string(100000, '[')), HasSubstr("levels deep"));
}

TEST(TokenizerJson, SaysWhereTheJsonEndsToBeValidAndWhatToDo) {
  const std::string whole = test::tiny_json(kMerges).dump();
  const auto with = [&](const std::string& part, const std::string& instead) {
    std::string text = whole;
    const size_t at = text.find(part);
    EXPECT_NE(at, std::string::npos) << part;
    return text.replace(at, part.size(), instead);
  };
  const auto until = [&](const std::string& part) { return whole.substr(0, whole.find(part) + part.size()); };
  const std::pair<std::string, const char*> cases[] = {
      {"", "t.json: not valid JSON at byte 1: the file is empty"},
      {" \n", "the file is empty"},
      {"{\"version\": \"1.0\"", "t.json: version: not valid JSON at byte 18: the file ends too early"},
      {"{\"version\": \"1.", "the file ends too early"},
      {until("\"merges\":[[\"a\",\"b\"],"), "t.json: model.merges[1]: not valid JSON at byte"},
      {until("\"vocab\":{"), "t.json: model.vocab: not valid JSON at byte"},
      {until("\"vocab\":{\"!\":33,"), "t.json: model.vocab after \"!\": not valid JSON at byte"},
      {"{\"a\": \"\xff\"}", "t.json: a: not valid JSON at byte 8: it is not UTF-8 text"},
      {"{\"a\": 1e999}", "the number 1e999 is too large"},
      {"{\"a\" 1}", "t.json: a: not valid JSON at byte 6: unexpected \"1\""},
      {"{\"a\": [1,]}", "unexpected \"]\""},
      {whole + "}", "unexpected \"}\""},
      {whole + std::string("\0x", 2), "a zero byte"},
      {with("\"merges\":[", "\"merges\":[nope,"), "t.json: model.merges[0]: not valid JSON at byte"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string error = error_of_text(text);
    EXPECT_THAT(error, HasSubstr(expected));
    EXPECT_THAT(error, HasSubstr("get the file again"));
    for (const char* foreign : {"json.exception", "parse_error", "syntax error", "last read"})
      EXPECT_THAT(error, testing::Not(HasSubstr(foreign)));
  }
}

TEST(TokenizerJson, RefusesFeaturesItDoesNotHave) {
  EXPECT_THAT(error_after([](json& f) { f["normalizer"]["type"] = "NFKC"; }),
              HasSubstr("normalizer: only type NFC is supported, found \"NFKC\""));
  EXPECT_THAT(error_after([](json& f) { f["truncation"] = {{"max_length", 8}}; }), HasSubstr("truncation: only null"));
  EXPECT_THAT(error_after([](json& f) {
                f["pre_tokenizer"] = {{"type", "Whitespace"}};
              }),
              HasSubstr("only type Sequence"));
  EXPECT_THAT(error_after([](json& f) { f["pre_tokenizer"]["pretokenizers"].erase(1); }),
              HasSubstr("only [Split, ByteLevel]"));
  const auto split = [](json& f) -> json& { return f["pre_tokenizer"]["pretokenizers"][0]; };
  EXPECT_THAT(error_after([&](json& f) { split(f)["behavior"] = "Removed"; }), HasSubstr("only Isolated"));
  EXPECT_THAT(error_after([&](json& f) { split(f)["invert"] = true; }), HasSubstr("invert: only false"));
  EXPECT_THAT(error_after([&](json& f) { split(f)["pattern"] = {{"String", "x"}}; }), HasSubstr("pattern"));
  EXPECT_THAT(error_after([&](json& f) { split(f)["pattern"]["Regex"] = "("; }), HasSubstr("not a regex"));
  EXPECT_THAT(error_after([&](json& f) { split(f)["extra"] = 1; }), HasSubstr("extra: unknown option"));
  const auto bytes = [](json& f) -> json& { return f["pre_tokenizer"]["pretokenizers"][1]; };
  EXPECT_THAT(error_after([&](json& f) { bytes(f)["use_regex"] = true; }), HasSubstr("use_regex: only false"));
  EXPECT_THAT(error_after([&](json& f) { bytes(f).erase("add_prefix_space"); }),
              HasSubstr("add_prefix_space: only false"));
  EXPECT_THAT(error_after([](json& f) {
                f["post_processor"] = {{"type", "TemplateProcessing"}};
              }),
              HasSubstr("post_processor"));
  EXPECT_THAT(error_after([](json& f) { f["decoder"] = nullptr; }), HasSubstr("decoder: only type ByteLevel"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["type"] = "Unigram"; }),
              HasSubstr("model: only type BPE is supported"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["dropout"] = 0.1; }), HasSubstr("model.dropout"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["byte_fallback"] = true; }), HasSubstr("model.byte_fallback"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["ignore_merges"] = true; }), HasSubstr("model.ignore_merges"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }),
              HasSubstr("model.end_of_word_suffix"));
}

TEST(TokenizerJson, RefusesAWrongVocabulary) {
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"].erase("a"); }), HasSubstr("no token for the byte 97"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"]["xyz"] = 7; }), HasSubstr("id 7 stands twice"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"]["xyz"] = -1; }), HasSubstr("\"xyz\" has no token id"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"]["xyz"] = 1.5; }), HasSubstr("\"xyz\" has no token id"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"]["xyz"] = 1u << 30; }), HasSubstr("ids up to 1048575"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"]["\u5929"] = 300; }), HasSubstr("only byte-level"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"][""] = 300; }), HasSubstr("empty text"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["vocab"] = json::array(); }), HasSubstr("model.vocab"));
  EXPECT_THAT(error_after([](json& f) { f["model"].erase("vocab"); }), HasSubstr("model.vocab: expected an object"));
  std::string text = test::tiny_json(kMerges).dump();
  text.insert(text.find("\"vocab\":{") + 9, "\"abc\":400,");
  EXPECT_THAT(error_of_text(text), HasSubstr("stands twice"));
}

TEST(TokenizerJson, KeepsMessagesShort) {
  std::string text;
  for (int i = 0; i < 10000; ++i) text += "\u5929";
  const std::string error = error_after([&](json& f) { f["model"]["merges"].push_back(text); });
  EXPECT_LT(error.size(), size_t{200});
  EXPECT_EQ(utf8_error_offset(error), error.size());
}

TEST(TokenizerJson, RefusesWrongMerges) {
  EXPECT_THAT(error_after([](json& f) {
                f["model"]["merges"].push_back({"a", "zz"});
              }),
              HasSubstr("model.merges[2]: \"zz\" is not a token"));
  EXPECT_THAT(error_after([](json& f) {
                f["model"]["merges"].push_back({"b", "c"});
              }),
              HasSubstr("\"bc\" is not a token"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back({"a", "b"}); }), HasSubstr("merged twice"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back("a"); }), HasSubstr("one space"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back("a b c"); }), HasSubstr("one space"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back({"a"}); }), HasSubstr("found 1"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back({"a", 1}); }), HasSubstr("as strings"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back(nullptr); }), HasSubstr("as strings"));
  EXPECT_THAT(error_after([](json& f) { f["model"]["merges"].push_back({{"a", "b"}}); }), HasSubstr("model.merges[2]"));
  EXPECT_THAT(error_after([](json& f) { f["model"].erase("merges"); }), HasSubstr("model.merges: expected a list"));
}

TEST(TokenizerJson, RefusesWrongAddedTokens) {
  const auto first = [](json& f) -> json& { return f["added_tokens"][0]; };
  EXPECT_THAT(error_after([&](json& f) { first(f)["id"] = 259; }), HasSubstr("259 stands twice"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["id"] = 97; }), HasSubstr("id 97 belongs to another token"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["content"] = "abc"; }),
              HasSubstr("\"abc\" has id 258 here and 257 in model.vocab"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["content"] = "<b>"; }), HasSubstr("\"<b>\" stands twice"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["content"] = ""; }), HasSubstr("not empty"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["id"] = "258"; }),
              HasSubstr("added_tokens[0].id: expected a number"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["lstrip"] = true; }), HasSubstr("lstrip: only false"));
  EXPECT_THAT(error_after([&](json& f) { first(f)["normalized"] = true; }), HasSubstr("normalized: only false"));
  EXPECT_THAT(error_after([&](json& f) { first(f).erase("special"); }), HasSubstr("special: expected true or false"));
  EXPECT_THAT(error_after([&](json& f) { f["added_tokens"] = {1}; }), HasSubstr("added_tokens[0]: expected an object"));
}

TEST(TokenizerJson, AnAddedTokenMayStandInTheVocabularyToo) {
  json file = test::tiny_json(kMerges);
  file["added_tokens"][0]["content"] = "abc";
  file["added_tokens"][0]["id"] = 257;
  file["added_tokens"][1]["content"] = "\u5929";
  file["model"]["vocab"]["\u5929"] = 259;
  const auto tokenizer = Tokenizer::parse(file.dump());
  EXPECT_EQ(tokenizer.encode("xabc\u5929", AddedTokens::kRecognise), (std::vector<TokenId>{'x', 257, 259}));
  EXPECT_TRUE(tokenizer.is_special(257));
  EXPECT_EQ(tokenizer.token_bytes(259), "\u5929");
}

}  // namespace
}  // namespace calla
