#include "tokenizer/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace calla {
namespace {

using Merges = std::vector<std::pair<std::string, std::string>>;

// A model over the bytes with chosen merges, each written "left right"; new tokens get the ids 256, 257, ...
class Model {
 public:
  explicit Model(const Merges& merges) {
    std::vector<std::string> bytes;
    for (int b = 0; b < 256; ++b) bytes.push_back(std::string(1, static_cast<char>(b)));
    for (const auto& [left, right] : merges) {
      if (!id_of(bytes, left + right)) bytes.push_back(left + right);
    }
    table_ = TokenTable(bytes);
    std::array<TokenId, 256> byte_tokens;
    for (int b = 0; b < 256; ++b) byte_tokens[b] = b;
    for (const auto& [left, right] : merges)
      merges_.push_back({*table_.find(left), *table_.find(right), *table_.find(left + right)});
    bpe_ = std::make_unique<Bpe>(table_, byte_tokens, merges_);
  }

  std::vector<std::string> encode(const std::string& word) const {
    std::vector<TokenId> ids;
    bpe_->encode(word, ids);
    std::vector<std::string> out;
    for (const TokenId id : ids) out.emplace_back(table_.bytes(id));
    return out;
  }

  // The definition, slowly: again and again the leftmost of the pairs with the lowest rank.
  std::vector<std::string> encode_by_definition(const std::string& word) const {
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    while (true) {
      size_t best_rank = merges_.size(), best = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        for (size_t rank = 0; rank < best_rank; ++rank) {
          if (table_.bytes(merges_[rank].left) == parts[i] && table_.bytes(merges_[rank].right) == parts[i + 1]) {
            best_rank = rank;
            best = i;
          }
        }
      }
      if (best_rank == merges_.size()) return parts;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(best) + 1);
    }
  }

 private:
  static bool id_of(const std::vector<std::string>& bytes, const std::string& token) {
    return std::find(bytes.begin(), bytes.end(), token) != bytes.end();
  }
  TokenTable table_;
  std::vector<BpeMerge> merges_;
  std::unique_ptr<Bpe> bpe_;
};

using Parts = std::vector<std::string>;

TEST(Bpe, MergesByRankNotByPosition) {
  const Model model({{"b", "c"}, {"a", "b"}, {"a", "bc"}});
  EXPECT_EQ(model.encode("abc"), (Parts{"abc"}));
  EXPECT_EQ(model.encode("ab"), (Parts{"ab"}));
  EXPECT_EQ(model.encode("abab"), (Parts{"ab", "ab"}));
  EXPECT_EQ(model.encode("x"), (Parts{"x"}));
}

TEST(Bpe, TakesTheLeftmostOfEqualRanks) {
  const Model model(Merges{{"a", "a"}});
  EXPECT_EQ(model.encode("aaa"), (Parts{"aa", "a"}));
  EXPECT_EQ(model.encode("aaaaa"), (Parts{"aa", "aa", "a"}));
}

// "abc" is a token, but its bytes do not merge to it; the second look must give the same answer as the first.
TEST(Bpe, DoesNotTakeATokenThatMergesCannotReach) {
  const Model model({{"a", "b"}, {"b", "c"}, {"a", "bc"}});
  for (int round = 0; round < 3; ++round) EXPECT_EQ(model.encode("abc"), (Parts{"ab", "c"}));
}

TEST(Bpe, AgreesWithTheDefinitionOnRandomMerges) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 30; ++trial) {
    Parts tokens = {"a", "b", "c"};
    Merges merges;
    for (int i = 0; i < 25; ++i) {
      const std::string left = tokens[random() % tokens.size()], right = tokens[random() % tokens.size()];
      const auto same = [&](const auto& m) { return m.first == left && m.second == right; };
      if (left.size() + right.size() > 12 || std::any_of(merges.begin(), merges.end(), same)) continue;
      merges.emplace_back(left, right);
      tokens.push_back(left + right);
    }
    const Model model(merges);
    // Lengths around the change of algorithm (kShortWord) and small ones.
    for (const size_t length : {2, 3, 5, 8, 13, 21, 40, 63, 64, 65, 66, 100, 300}) {
      std::string word;
      for (size_t i = 0; i < length; ++i) word += static_cast<char>('a' + random() % 3);
      EXPECT_EQ(model.encode(word), model.encode_by_definition(word)) << word;
    }
  }
}

TEST(Bpe, LongWordsTakeNearlyLinearTime) {
  Merges merges;
  for (size_t length = 1; length <= 64; length *= 2)
    merges.emplace_back(std::string(length, 'a'), std::string(length, 'a'));
  const Model model(merges);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(model.encode(std::string(2 << 20, 'a')).size(), size_t{2 << 20} / 128);
  // Quadratic time would be hours; the limit only has to be far from both.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

TEST(Bpe, ManyThreadsMayEncodeAtOnce) {
  const Model model({{"b", "c"}, {"a", "b"}, {"a", "bc"}, {"c", "c"}});
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        wrong += model.encode("abc") != Parts{"abc"};
        wrong += model.encode("bcc") != Parts{"bc", "c"};
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace calla
