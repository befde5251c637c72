// Fuzz target: any bytes as a schema and as the parameters of a tool. What compiles must never lead into a dead end, and
// what it generates must be JSON.
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/error.h"
#include "grammar/forced_call.h"
#include "grammar/matcher.h"
#include "grammar/schema.h"
#include "tests/grammar/vocabulary.h"

namespace {

using namespace calla;

// Writes bytes at random, then those that tend to end it; empty if it did not end in time.
std::string write(const std::shared_ptr<const Grammar>& grammar, uint64_t seed) {
  Matcher matcher(grammar);
  Matcher::StateId state = matcher.start();
  std::mt19937_64 random(seed);
  std::string text;
  for (int step = 0; step < 600; ++step) {
    state = matcher.trim(state);
    if (matcher.accepting(state) && (step > 100 || random() % 8 == 0)) return text;
    std::string possible;
    for (int byte = 0; byte < 256; ++byte)
      if (matcher.step(state, static_cast<uint8_t>(byte)) != Matcher::kDead)
        possible.push_back(static_cast<char>(byte));
    check(!possible.empty() || matcher.accepting(state), "the grammar has a dead end");
    if (possible.empty()) return text;
    char next = possible[random() % possible.size()];
    if (step > 100)
      for (const char c : std::string_view("\"}],:0n"))
        if (possible.find(c) != std::string::npos) {
          next = c;
          break;
        }
    text.push_back(next);
    state = matcher.step(state, static_cast<uint8_t>(next));
  }
  return "";
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const TokenTrie trie = [] {
    TestVocabulary vocabulary = made_up_vocabulary(600, 1);
    vocabulary.markup.clear();  // tags are spelled out, so that bytes alone can write a call
    return vocabulary.trie();
  }();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const std::string written = write(compile_schema(text), size);
    if (!written.empty()) check(nlohmann::json::accept(written), "what was generated is not JSON");
  } catch (const RequestError&) {
  }
  for (const bool strict : {false, true}) try {
      const std::vector<CallableTool> tools{{"f", std::string(text), strict}};
      write(forced_call_grammar(tools, trie), size);
    } catch (const RequestError&) {
    }
  return 0;
}
