// Runs a fuzz target over its seeds and over damaged copies of them, the same ones each time: cut off, with bytes
// changed, pieces repeated, removed or exchanged. With -write DIR it writes the seeds to files instead, as a start for
// libFuzzer; with file names it runs those files, such as the crash files that libFuzzer leaves.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/fuzz_target.h"

namespace {

constexpr int kDamagedCopies = 4000;  // of each seed

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

class Damage {
 public:
  void apply(std::string& text) {
    for (size_t times = 1 + pick(3); times > 0 && !text.empty(); --times) apply_once(text);
  }

 private:
  size_t pick(size_t below) { return random_() % below; }

  void apply_once(std::string& text) {
    const size_t at = pick(text.size());
    const size_t length = std::min<size_t>(1 + pick(16), text.size() - at);
    switch (pick(7)) {
      case 0:
        text.resize(at);
        break;
      case 1:
        text[at] = static_cast<char>(pick(256));
        break;
      case 2:
        text[at] = static_cast<char>(text[at] ^ (1 << pick(8)));
        break;
      case 3:
        text.erase(at, length);
        break;
      case 4:
        text.insert(at, text.substr(pick(text.size()), length));
        break;
      case 5:
        text.insert(at, kWords[pick(std::size(kWords))]);
        break;
      case 6:
        text.replace(at, length, kWords[pick(std::size(kWords))]);
        break;
    }
  }

  static constexpr const char* kWords[] = {"{",
                                           "}",
                                           "[",
                                           "]",
                                           ",",
                                           ":",
                                           "\"",
                                           "0",
                                           "-1",
                                           "1e999",
                                           "18446744073709551615",
                                           "9223372036854775808",
                                           "4294967296",
                                           "null",
                                           "true",
                                           "\\u0000",
                                           "\xff",
                                           "\xed\xa0\x80",
                                           "{\"a\":",
                                           "[[[["};
  std::mt19937 random_{1};
};

int write_seeds(const std::string& directory) {
  int index = 0;
  for (const std::string& seed : calla::fuzz_seeds())
    std::ofstream(directory + "/seed-" + std::to_string(index++), std::ios::binary) << seed;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "-write") return write_seeds(argv[2]);
  for (int i = 1; i < argc; ++i) {
    std::ifstream in(argv[i], std::ios::binary);
    run({std::istreambuf_iterator<char>(in), {}});
  }
  if (argc > 1) return 0;
  Damage damage;
  int runs = 0;
  for (const std::string& seed : calla::fuzz_seeds()) {
    run(seed);
    for (int i = 0; i < kDamagedCopies; ++i, ++runs) {
      std::string copy = seed;
      damage.apply(copy);
      run(copy);
    }
  }
  std::printf("%d inputs\n", runs);
  return 0;
}
