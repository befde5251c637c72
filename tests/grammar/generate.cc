#include "tests/grammar/generate.h"

#include <map>

namespace calla {
namespace {

// Picks among the allowed tokens: for `wild` steps any, then those that lead to the end soonest.
TokenId pick(const std::string& text, const std::vector<uint32_t>& mask, const TestVocabulary& vocabulary, bool wild,
             std::mt19937_64& random) {
  std::vector<TokenId> allowed;
  for (TokenId token = 0; token < static_cast<TokenId>(vocabulary.texts.size()); ++token)
    if ((mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) != 0) allowed.push_back(token);
  if (allowed.empty()) return -1;
  if (!wild) {
    std::map<char, TokenId> single;
    for (const TokenId token : allowed) {
      if (token == vocabulary.stop) return token;
      const std::string& bytes = vocabulary.texts[static_cast<size_t>(token)];
      if (bytes.size() == 1) single[bytes[0]] = token;
    }
    const bool in_text = single.contains('q') && single.contains('}');
    if (in_text && single.contains('\n')) {  // the raw text of a parameter
      const std::string close = "\n</parameter>";
      size_t written = close.size() - 1;
      while (!text.ends_with(close.substr(0, written))) --written;
      if (single.contains(close[written])) return single[close[written]];
    }
    if (in_text)  // a string
      for (const char c : {'"', '0'})
        if (single.contains(c)) return single[c];
    for (const char c : std::string("}]\":,-0123456789nul"))
      if (single.contains(c)) return single[c];
  }
  return allowed[random() % allowed.size()];
}

}  // namespace

std::string generate(TokenConstraint& constraint, const TestVocabulary& vocabulary, int wild_steps,
                     std::mt19937_64& random) {
  std::vector<uint32_t> mask((vocabulary.texts.size() + 31) / 32);
  std::string text;
  for (int step = 0; step < 3000; ++step) {
    if (!constraint.allowed(mask)) mask.assign(mask.size(), 0xffffffffu);
    const TokenId token = pick(text, mask, vocabulary, step < wild_steps, random);
    if (token < 0) return "dead end after " + text;
    constraint.accept(token);
    if (token == vocabulary.stop) return text;
    text += vocabulary.texts[static_cast<size_t>(token)];
  }
  return "no end of " + text;
}

}  // namespace calla
