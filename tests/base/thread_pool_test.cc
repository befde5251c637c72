#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>

namespace calla {
namespace {

TEST(ThreadPool, RunReachesEveryThread) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.threads(), threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<int> calls(static_cast<size_t>(threads));
      pool.run([&](int thread) { ++calls[static_cast<size_t>(thread)]; });
      EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(threads), 1));
    }
  }
}

TEST(ThreadPool, ParallelForCoversEachIndexOnce) {
  ThreadPool pool(3);
  for (size_t count : {0u, 1u, 7u, 64u, 1000u})
    for (size_t grain : {1u, 3u, 64u, 5000u}) {
      std::vector<std::atomic<int>> calls(count);
      pool.parallel_for(count, grain, [&](size_t begin, size_t end, int) {
        EXPECT_LE(end - begin, grain);
        for (size_t i = begin; i < end; ++i) ++calls[i];
      });
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(calls[i], 1) << i;
    }
}

TEST(ThreadPool, ForEachCoversEachIndexOnce) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (size_t count : {0u, 1u, 2u, 3u, 8u, 333u, 4096u}) {
      std::vector<std::atomic<int>> calls(count);
      pool.for_each(count, [&](size_t index, size_t next, int thread) {
        EXPECT_LT(thread, threads);
        EXPECT_GT(next, index);
        EXPECT_LE(next, count);
        ++calls[index];
      });
      for (size_t i = 0; i < count; ++i) EXPECT_EQ(calls[i], 1) << i << " of " << count;
    }
  }
}

// A thread that is stuck on its first index keeps nothing else from being done.
TEST(ThreadPool, ForEachStealsFromASlowThread) {
  ThreadPool pool(2);
  std::atomic<int> done{0};
  pool.for_each(100, [&](size_t index, size_t, int) {
    if (index == 0) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (done < 99 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      EXPECT_EQ(done, 99);
    } else {
      ++done;
    }
  });
  EXPECT_EQ(done, 99);
}

}  // namespace
}  // namespace calla
