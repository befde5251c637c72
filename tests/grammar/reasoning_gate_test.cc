// Case O11: with thinking on, the schema binds only after the think block has closed.
#include "grammar/reasoning_gate.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grammar/schema.h"
#include "tests/grammar/vocabulary.h"

namespace calla {
namespace {

class Gate : public testing::Test {
 protected:
  Gate() : vocabulary_(made_up_vocabulary(900, 13)) { build(); }
  void build() {
    trie_ = std::make_shared<const TokenTrie>(vocabulary_.trie());
    mask_.resize((vocabulary_.texts.size() + 31) / 32);
  }
  std::unique_ptr<GrammarConstraint> inner() {
    const auto grammar = compile_schema(
        R"({"type":"object","properties":{"answer":{"type":"integer"}},"required":["answer"],"additionalProperties":false})");
    return std::make_unique<GrammarConstraint>(trie_, grammar, stops());
  }
  ReasoningGate gate(ReasoningGateOptions options = {}) {
    return ReasoningGate(trie_, inner(), stops(), std::move(options));
  }
  std::vector<TokenId> stops() const { return {vocabulary_.stop}; }
  TokenId token(std::string_view text) const {
    for (TokenId id = 0; id < static_cast<TokenId>(vocabulary_.texts.size()); ++id)
      if (vocabulary_.texts[static_cast<size_t>(id)] == text) return id;
    ADD_FAILURE() << "no token " << text;
    return 0;
  }
  bool allows(TokenConstraint& constraint, TokenId id) {
    if (!constraint.allowed(mask_)) return true;
    return (mask_[static_cast<size_t>(id) / 32] >> (id % 32) & 1u) != 0;
  }
  // Greedy decoding of a model that wants `text`: byte by byte, but a tag is its token. False if a byte is
  // masked.
  bool write(TokenConstraint& constraint, std::string_view text) {
    for (const char c : text) {
      const TokenId id = token(std::string_view(&c, 1));
      if (!allows(constraint, id)) return false;
      constraint.accept(id);
    }
    return true;
  }

  TestVocabulary vocabulary_;
  std::shared_ptr<const TokenTrie> trie_;
  std::vector<uint32_t> mask_;
};

TEST_F(Gate, ThinksFreelyThenFollowsTheSchema) {
  ReasoningGate constraint = gate();
  for (const char c : std::string("17-6=11 ... {\"x\": ] } \xff")) constraint.accept(token(std::string_view(&c, 1)));
  EXPECT_TRUE(constraint.is_thinking());
  EXPECT_TRUE(allows(constraint, vocabulary_.stop));
  EXPECT_TRUE(allows(constraint, token("</think>")));
  constraint.accept(token("</think>"));
  EXPECT_FALSE(constraint.is_thinking());
  EXPECT_FALSE(allows(constraint, vocabulary_.stop));
  EXPECT_FALSE(allows(constraint, 'x'));
  EXPECT_TRUE(write(constraint, "\n\n{\"answer\":17}"));
  EXPECT_TRUE(allows(constraint, vocabulary_.stop));
  EXPECT_FALSE(allows(constraint, '{'));
  constraint.accept(vocabulary_.stop);
  EXPECT_TRUE(constraint.inner().complete());
}

TEST_F(Gate, WithoutThinkingTheFirstTokenIsBound) {
  const auto constraint = inner();
  EXPECT_FALSE(allows(*constraint, '1'));
  EXPECT_FALSE(allows(*constraint, token("</think>")));
  EXPECT_TRUE(write(*constraint, "{\"answer\":17}"));
  EXPECT_TRUE(constraint->complete());
}

TEST_F(Gate, CutBeforeTheBlockClosesNothingIsMadeUp) {
  ReasoningGate constraint = gate();
  for (const char c : std::string("hm")) constraint.accept(token(std::string_view(&c, 1)));
  EXPECT_FALSE(constraint.allowed(mask_));
  EXPECT_FALSE(constraint.inner().complete());
}

TEST_F(Gate, SeesATagSplitOverTokens) {
  for (const std::vector<std::string>& pieces :
       std::vector<std::vector<std::string>>{{"</thi", "nk>"},
                                             {"<", "/", "t", "h", "i", "n", "k", ">"},
                                             {"</thi", "n", "k>{\""},
                                             {"<", "</thi", "nk>"}}) {
    ReasoningGate constraint = gate();
    for (const std::string& piece : pieces) {
      EXPECT_TRUE(constraint.is_thinking());
      EXPECT_TRUE(allows(constraint, token(piece))) << piece;
      constraint.accept(token(piece));
    }
    EXPECT_FALSE(constraint.is_thinking());
    EXPECT_TRUE(write(constraint, pieces.back().back() == '"' ? "answer\":1}" : "{\"answer\":1}"));
    EXPECT_TRUE(constraint.inner().complete());
  }
}

TEST_F(Gate, ATokenThatClosesAndGoesOnWronglyIsMasked) {
  // No real token has the whole tag and more in it, but the gate must hold.
  for (const char* text : {"nk>x", "so</think>nothing"}) vocabulary_.texts.emplace_back(text);
  build();
  ReasoningGate constraint = gate();
  EXPECT_FALSE(allows(constraint, token("so</think>nothing")));
  EXPECT_TRUE(allows(constraint, token("nk>x")));  // no tag has begun
  EXPECT_TRUE(allows(constraint, token("</think>\n\n{")));
  constraint.accept(token("</thi"));
  EXPECT_FALSE(allows(constraint, token("nk>x")));
  EXPECT_FALSE(allows(constraint, token("so</think>nothing")));
  EXPECT_TRUE(allows(constraint, token("nk>")));
  EXPECT_TRUE(allows(constraint, token("k>{\"")));  // not at its place: plain text
  constraint.accept('x');
  EXPECT_TRUE(allows(constraint, token("nk>x")));
  EXPECT_TRUE(constraint.is_thinking());
}

TEST_F(Gate, CanForbidToStopWhileThinking) {
  ReasoningGate constraint = gate({.close_tag = "</think>", .keep_thinking_open = true});
  EXPECT_FALSE(allows(constraint, vocabulary_.stop));
  EXPECT_TRUE(allows(constraint, 'x'));
}

}  // namespace
}  // namespace calla
