// Any bytes as tokenizer.json: refused with a CheckpointError, or a tokenizer that works.
#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "base/error.h"
#include "tokenizer/tokenizer.h"

using namespace calla;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto tokenizer = Tokenizer::parse({reinterpret_cast<const char*>(data), size}, {}, "fuzz");
    constexpr std::string_view kText = "It's 12  words,\n caf\xc3\xa9 <|a|> \xe5\xa4\xa9 abcabc abababababababab";
    const auto plain = tokenizer.encode(kText, AddedTokens::kPlainText);
    check(tokenizer.decode(plain, false) == kText, "plain text comes back");
    const auto ids = tokenizer.encode(kText, AddedTokens::kRecognise);
    check(tokenizer.decode(ids, false) == kText, "text with added tokens comes back");
    for (const TokenId id : ids) check(!tokenizer.token_bytes(id).empty(), "ids are tokens");
  } catch (const CheckpointError&) {
  } catch (const RequestError&) {  // a split pattern that needs more steps than PCRE2 allows
  }
  return 0;
}
