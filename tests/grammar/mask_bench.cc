// Time of the steps of constrained decoding at the size of the real vocabulary. Run: mask_bench [tokens]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "grammar/forced_call.h"
#include "grammar/schema.h"
#include "grammar/token_constraint.h"
#include "tests/grammar/vocabulary.h"

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  using namespace calla;
  const size_t size = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 248'320;
  const TestVocabulary vocabulary = made_up_vocabulary(size, 1);
  Clock::time_point begin = Clock::now();
  const auto trie = std::make_shared<const TokenTrie>(vocabulary.trie());
  std::printf("trie of %zu tokens: %.1f ms, %.1f MB, %zu nodes\n", size, ms_since(begin),
              static_cast<double>(trie->memory_bytes()) / 1e6, trie->nodes().size());
  const std::vector<TokenId> stops{vocabulary.stop};
  std::vector<uint32_t> mask((size + 31) / 32);

  const auto show = [&](const char* what, const std::shared_ptr<const Grammar>& grammar, const char* before) {
    GrammarConstraint constraint(trie, grammar, stops);
    constraint.accept_text(before);
    begin = Clock::now();
    constraint.allowed(mask);
    const double first = ms_since(begin);
    begin = Clock::now();
    for (int i = 0; i < 100; ++i) constraint.allowed(mask);
    const double again = ms_since(begin) / 100;
    size_t allowed = 0;
    for (const uint32_t word : mask) allowed += static_cast<size_t>(__builtin_popcount(word));
    std::printf("%-44s first %7.3f ms, again %7.3f ms, %zu tokens allowed\n", what, first, again, allowed);
  };
  begin = Clock::now();
  const auto object = json_object_grammar();
  const auto typed = compile_schema(
      R"({"type":"object","properties":{"name":{"type":"string"},"short":{"type":"string","maxLength":60},
      "code":{"type":"string","pattern":"^[a-z_]+$"},"n":{"type":"number","minimum":0,"maximum":1}}})");
  std::printf("two grammars: %.2f ms\n", ms_since(begin));
  show("object: start", object, "");
  show("object: after the brace", object, "{");
  show("object: in a key", object, "{\"ke");
  show("object: before a value", object, "{\"key\": ");
  show("object: in a string", object, "{\"key\": \"va");
  show("object: in a character of a string", object, "{\"key\": \"\xe6");
  show("object: in a nested string", object, R"({"k": [{"l": [[{"m": "x)");
  show("object: in a number", object, "{\"key\": 12");
  show("typed: before a key", typed, "{");
  show("typed: in another key", typed, "{\"other");
  show("typed: in a string with a limit, far from it", typed, R"({"short": ")");
  show("typed: in a string with a limit, near it", typed,
       R"({"short": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa)");
  show("typed: in a pattern", typed, R"({"code": "ab)");
  show("typed: in a bounded number", typed, R"({"n": 0.)");
  const std::vector<CallableTool> tools{{"write", R"({"properties":{"text":{"type":"string"}},"required":["text"]})"}};
  const auto call = forced_call_grammar(tools, *trie);
  GrammarConstraint probe(trie, call, stops);
  const auto show_call = [&](const char* what, const char* before) {
    GrammarConstraint constraint(trie, call, stops);
    constraint.accept(trie->find_markup("<tool_call>"));
    constraint.accept_text(before);
    begin = Clock::now();
    constraint.allowed(mask);
    std::printf("%-44s first %7.3f ms\n", what, ms_since(begin));
  };
  show_call("call: name", "\n<function=");
  show_call("call: in a text value", "\n<function=write>\n<parameter=text>\nsome");
  show_call("call: in a text value, after a line break", "\n<function=write>\n<parameter=text>\nsome\n");
}
