#include "engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "backend/create.h"
#include "engine/scheduler.h"
#include "selftest/random_model.h"

namespace calla {
namespace {

// The tree without device state: empty handles.
Snapshot snapshot(std::vector<TokenId> tokens) { return {std::move(tokens), {}, {}}; }

TEST(PrefixCache, FindsTheLongestPrefixWithinTheLimit) {
  PrefixCache cache;
  cache.insert(snapshot({1, 2, 3}));
  cache.insert(snapshot({1, 2, 3, 4, 5}));
  cache.insert(snapshot({1, 9}));
  const std::vector<TokenId> prompt = {1, 2, 3, 4, 5, 6};
  auto match = cache.find(prompt, 5);
  ASSERT_TRUE(match.snapshot);
  EXPECT_EQ(match.snapshot->tokens.size(), 5u);
  EXPECT_EQ(match.shared_tokens, 5);
  match = cache.find(prompt, 4);
  ASSERT_TRUE(match.snapshot);
  EXPECT_EQ(match.snapshot->tokens.size(), 3u);
  match = cache.find(std::vector<TokenId>{1, 2, 7}, 2);
  EXPECT_FALSE(match.snapshot);
  EXPECT_EQ(match.shared_tokens, 2);
}

TEST(PrefixCache, EvictsTheLeastRecentlyUsed) {
  PrefixCache cache;
  cache.insert(snapshot({1}));
  cache.insert(snapshot({2}));
  cache.insert(snapshot({3}));
  cache.find(std::vector<TokenId>{1, 5}, 1);
  EXPECT_TRUE(cache.evict_one());
  EXPECT_FALSE(cache.contains(std::vector<TokenId>{2}));
  EXPECT_TRUE(cache.contains(std::vector<TokenId>{1}));
  EXPECT_TRUE(cache.evict_one());
  EXPECT_TRUE(cache.evict_one());
  EXPECT_FALSE(cache.evict_one());
}

// Against a plain list of token strings, over random insertions and evictions on a small alphabet.
TEST(PrefixCache, AgreesWithAPlainList) {
  std::mt19937 random(5);
  const auto tokens = [&] {
    std::vector<TokenId> t(1 + random() % 9);
    for (TokenId& x : t) x = static_cast<TokenId>(random() % 3);
    return t;
  };
  PrefixCache cache;
  std::vector<std::vector<TokenId>> list;  // most recently used last
  const auto touch = [&](const std::vector<TokenId>& t) {
    std::erase(list, t);
    list.push_back(t);
  };
  for (int round = 0; round < 20000; ++round) {
    switch (random() % 4) {
      case 0: {
        const auto t = tokens();
        touch(t);
        cache.insert(snapshot(t));
        break;
      }
      case 1:
        EXPECT_EQ(cache.evict_one(), !list.empty());
        if (!list.empty()) list.erase(list.begin());
        break;
      default: {
        const auto prompt = tokens();
        const int limit = static_cast<int>(random() % 10);
        const std::vector<TokenId>* best = nullptr;
        for (const auto& t : list)
          if (static_cast<int>(t.size()) <= limit && t.size() <= prompt.size() &&
              std::equal(t.begin(), t.end(), prompt.begin()) && (!best || t.size() > best->size()))
            best = &t;
        const auto match = cache.find(prompt, limit);
        ASSERT_EQ(match.snapshot != nullptr, best != nullptr);
        if (best) {
          ASSERT_EQ(match.snapshot->tokens, *best);
          touch(std::vector<TokenId>(*best));
        }
      }
    }
    ASSERT_EQ(cache.size(), list.size());
  }
}

TEST(SnapshotPositions, KeepsTheFirstTheLastTwoAndSpacedOnes) {
  const std::vector<int> boundaries = {50, 60, 70, 700, 710, 5000, 5010, 5020};
  EXPECT_EQ(snapshot_positions(boundaries, 0, 5030, 4096), (std::vector<int>{50, 700, 4096, 5000, 5010, 5020}));
  EXPECT_EQ(snapshot_positions(boundaries, 5005, 5030, 4096), (std::vector<int>{5010, 5020}));
  EXPECT_TRUE(snapshot_positions({}, 0, 100, 4096).empty());
}

TEST(StatePool, SharedPagesAreCopiedOnWriteAndComeBack) {
  const RandomModel model(tiny_shape(4), 1);
  BackendOptions options;
  options.max_rows = 4;
  const auto backend = create_reference_backend(model.shape(), model.weights(), options);
  StatePool pool(*backend, {2, 4});
  {
    PageList a;
    ASSERT_TRUE(pool.append_page(a));
    ASSERT_TRUE(pool.append_page(a));
    EXPECT_TRUE(pool.make_last_page_private(a, 10));
    EXPECT_EQ(pool.free_pages(), 2);
    PageList b = a;
    EXPECT_EQ(pool.free_pages(), 2);
    ASSERT_TRUE(pool.make_last_page_private(b, 10));
    EXPECT_EQ(a.ids()[0], b.ids()[0]);
    EXPECT_NE(a.ids()[1], b.ids()[1]);
    EXPECT_EQ(pool.free_pages(), 1);
  }
  EXPECT_EQ(pool.free_pages(), 4);
  auto one = pool.take_slot(), two = pool.take_slot();
  EXPECT_TRUE(one && two);
  EXPECT_FALSE(pool.take_slot());
  one.reset();
  EXPECT_TRUE(pool.take_slot());
}

}  // namespace
}  // namespace calla
