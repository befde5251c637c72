// tokenizer_ids TOKENIZER_JSON: a filter for comparisons with other tokenizers (tools/tokenizer_compare.py).
// In: texts, each a decimal byte count, a newline and so many bytes. Out: for each text a line of ids, spaces
// between. With --bench N: encodes each text N times instead, each time with its own clock, and prints the
// best total seconds.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace {

std::vector<std::string> read_texts(std::istream& in) {
  std::vector<std::string> texts;
  size_t bytes = 0;
  while (in >> bytes) {
    in.get();
    std::string text(bytes, '\0');
    in.read(text.data(), static_cast<std::streamsize>(bytes));
    texts.push_back(std::move(text));
  }
  return texts;
}

double best_seconds(const calla::Tokenizer& tokenizer, const std::vector<std::string>& texts, int rounds) {
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (const std::string& text : texts) tokenizer.encode(text, calla::AddedTokens::kRecognise);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = round == 0 ? took.count() : std::min(best, took.count());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2 && !(argc == 4 && std::strcmp(argv[2], "--bench") == 0)) {
    std::cerr << "usage: tokenizer_ids TOKENIZER_JSON [--bench ROUNDS] < texts\n";
    return 2;
  }
  const auto tokenizer = calla::Tokenizer::load(argv[1]);
  std::ios::sync_with_stdio(false);
  const auto texts = read_texts(std::cin);
  if (argc == 4) {
    std::cout << best_seconds(tokenizer, texts, std::atoi(argv[3])) << "\n";
    return 0;
  }
  for (const std::string& text : texts) {
    for (const auto id : tokenizer.encode(text, calla::AddedTokens::kRecognise)) std::cout << id << ' ';
    std::cout << '\n';
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "tokenizer_ids: " << error.what() << "\n";
  return 1;
}
