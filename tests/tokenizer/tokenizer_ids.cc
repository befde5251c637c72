// tokenizer_ids TOKENIZER_JSON: a filter for comparisons with other tokenizers (tools/tokenizer_compare.py).
// In: texts, each a decimal byte count, a newline and so many bytes. Out: for each text a line of ids, spaces
// between. With --bench N: encodes each text N times instead, each time with its own clock, and prints the
// best total seconds.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <limits>
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

template <class Action>
double best_seconds(int rounds, Action&& action) {
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    action();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    best = std::min(best, took.count());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string option = argc == 4 ? argv[2] : "";
  if (argc != 2 && option != "--bench" && option != "--bench-load") {
    std::cerr << "usage: tokenizer_ids TOKENIZER_JSON [--bench ROUNDS | --bench-load ROUNDS] < texts\n";
    return 2;
  }
  if (option == "--bench-load") {
    std::cout << best_seconds(std::atoi(argv[3]), [&] { calla::Tokenizer::load(argv[1]); }) << "\n";
    return 0;
  }
  const auto tokenizer = calla::Tokenizer::load(argv[1]);
  std::ios::sync_with_stdio(false);
  const auto texts = read_texts(std::cin);
  const auto encode = [&](const std::string& text) {
    return tokenizer.encode_lossy(text, calla::AddedTokens::kRecognise);
  };
  if (option == "--bench") {
    size_t ids = 0;
    const double seconds = best_seconds(std::atoi(argv[3]), [&] {
      for (const std::string& text : texts) ids += encode(text).size();
    });
    std::cout << seconds << "\n";
    return ids > 0 || texts.empty() ? 0 : 1;
  }
  for (const std::string& text : texts) {
    for (const auto id : encode(text)) std::cout << id << ' ';
    std::cout << '\n';
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "tokenizer_ids: " << error.what() << "\n";
  return 1;
}
