#pragma once
// Vocabularies for the tests: calla-tiny's own and made-up ones.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/token_trie.h"

namespace calla {

struct TestVocabulary {
  std::vector<std::string> texts;  // empty for control tokens
  std::vector<TokenId> markup;
  TokenId stop = 0;

  TokenTrie trie() const { return TokenTrie(std::vector<std::string_view>(texts.begin(), texts.end()), markup); }
};

// calla-tiny's tokenizer.json, with the byte alphabet of byte-level BPE undone.
TestVocabulary calla_tiny_vocabulary();

// All single bytes, pieces of JSON and of the tool-call format, words, parts of multi-byte characters; then
// random tokens up to `size`. The last ids are <think> </think> <tool_call> </tool_call> as markup, and a
// stop token.
TestVocabulary made_up_vocabulary(size_t size, uint64_t seed);

// Reads a file of the repository.
std::string read_repository_file(const std::string& path);

}  // namespace calla
