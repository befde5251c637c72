// BackgroundCopies: every copy is whole when wait() returns, whatever its size, and in whatever order they are waited for;
// without work its threads sleep, and an allocation that fails leaves it usable.
#include "base/background_copies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

namespace {

thread_local int allocations_left = -1;  // of this thread, before one fails; negative: no limit

}  // namespace

// Not inlined: g++ would warn of free() for what a new-expression has given.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace calla {
namespace {

std::vector<uint32_t> numbers(size_t count, uint32_t first) {
  std::vector<uint32_t> v(count);
  std::iota(v.begin(), v.end(), first);
  return v;
}

uint64_t start(BackgroundCopies& copies, void* to, const void* from, size_t bytes) {
  const BackgroundCopies::Copy copy{to, from, bytes};
  return copies.start({&copy, 1});
}

TEST(BackgroundCopies, MakesCopiesOfAnySize) {
  // Around a thread's piece of 512 KiB, and none at all.
  const std::vector<size_t> counts = {1, 0, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 5, 5 << 17, 0};
  for (const int threads : {1, 4}) {
    BackgroundCopies copies(threads);
    std::vector<std::vector<uint32_t>> from, to;
    for (size_t i = 0; i < counts.size(); ++i) {
      from.push_back(numbers(counts[i], static_cast<uint32_t>(i * 1000)));
      to.emplace_back(counts[i]);
    }
    std::vector<uint64_t> started;
    for (size_t i = 0; i < counts.size(); ++i)
      started.push_back(start(copies, to[i].data(), from[i].data(), counts[i] * sizeof(uint32_t)));
    for (size_t i = counts.size(); i-- > 0;) {  // the last first
      copies.wait(started[i]);
      EXPECT_EQ(to[i], from[i]) << "copy " << i << " with " << threads << " threads";
    }
    for (const uint64_t copy : started) copies.wait(copy);  // once more costs nothing
  }
}

// As an upload does it: a few buffers in turn, each used again when its contents have gone.
TEST(BackgroundCopies, BuffersAreUsedAgain) {
  constexpr size_t kPart = size_t{1} << 19, kParts = 64, kBuffers = 4;
  const std::vector<uint32_t> from = numbers(kPart * kParts, 7);
  std::vector<uint32_t> to(from.size());
  std::vector<std::vector<uint32_t>> buffers(kBuffers, std::vector<uint32_t>(kPart));
  BackgroundCopies copies(3);
  std::vector<uint64_t> started;
  const auto finish = [&](size_t part) {
    copies.wait(started[part]);
    std::copy_n(buffers[part % kBuffers].begin(), kPart, to.begin() + static_cast<std::ptrdiff_t>(part * kPart));
  };
  for (size_t part = 0; part < kParts; ++part) {
    if (part >= kBuffers) finish(part - kBuffers);
    started.push_back(start(copies, buffers[part % kBuffers].data(), from.data() + part * kPart, kPart * 4));
  }
  for (size_t part = kParts - kBuffers; part < kParts; ++part) finish(part);
  EXPECT_EQ(to, from);
}

TEST(BackgroundCopies, BatchesOfManyCopies) {
  constexpr size_t kEach = 40000, kCopies = 100;
  const std::vector<uint32_t> from = numbers(kEach * kCopies, 5);
  std::vector<uint32_t> to(from.size());
  BackgroundCopies copies(4);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> expected = from;
    std::vector<BackgroundCopies::Copy> batch;
    for (size_t i = 0; i < kCopies; ++i) {
      const bool zeros = i % 3 == 0;
      batch.push_back({&to[i * kEach], zeros ? nullptr : &from[i * kEach], (kEach - 1) * sizeof(uint32_t)});
      if (zeros) std::fill_n(&expected[i * kEach], kEach - 1, 0);
      expected[(i + 1) * kEach - 1] = 0;  // nobody touches it
    }
    const uint64_t started = copies.start(batch);
    copies.wait(copies.start({}));
    copies.wait(started);
    ASSERT_EQ(to, expected);
    std::fill_n(to.begin(), to.size() - 1, 1);
    for (size_t i = 0; i < kCopies; ++i) to[(i + 1) * kEach - 1] = 0;
  }
}

// Threads and caller have gone to sleep by then.
TEST(BackgroundCopies, AfterAPause) {
  const std::vector<uint32_t> from = numbers(size_t{1} << 20, 3);
  BackgroundCopies copies(4);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint32_t> to(from.size());
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    copies.wait(start(copies, to.data(), from.data(), from.size() * sizeof(uint32_t)));
    ASSERT_EQ(to, from);
  }
}

// An empty copy is made as soon as it is started, and may be taken away while a thread is about to look at it.
TEST(BackgroundCopies, EmptyOnesAmongOthers) {
  const std::vector<uint32_t> from = numbers(16, 3);
  std::vector<uint32_t> to(from.size());
  BackgroundCopies copies(4);
  for (int round = 0; round < 4000; ++round) {
    std::vector<uint64_t> started;
    for (size_t i = 0; i < from.size(); ++i) {
      started.push_back(start(copies, nullptr, nullptr, 0));
      started.push_back(start(copies, &to[i], &from[i], sizeof(uint32_t)));
    }
    for (const uint64_t copy : started) copies.wait(copy);
  }
  EXPECT_EQ(to, from);
}

// The caller has gone to sleep before the end: by one thread this takes milliseconds.
TEST(BackgroundCopies, ALongCopy) {
  std::vector<std::byte> to(size_t{64} << 20, std::byte{1});
  BackgroundCopies copies(1);
  copies.wait(start(copies, to.data(), nullptr, to.size()));
  EXPECT_TRUE(std::all_of(to.begin(), to.end(), [](std::byte b) { return b == std::byte{0}; }));
}

// One thread, and a caller that does not look meanwhile: where cores turn out to be scarce threads sleep at once.
TEST(BackgroundCopies, SleepsWithoutWork) {
  const std::vector<uint32_t> from = numbers(16, 3);
  std::vector<uint32_t> to(from.size());
  BackgroundCopies copies(1);
  const uint64_t started = start(copies, to.data(), from.data(), from.size() * sizeof(uint32_t));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::clock_t before = std::clock();  // processor time of all threads
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  const double used_ms = static_cast<double>(std::clock() - before) * 1e3 / CLOCKS_PER_SEC;
  EXPECT_LT(used_ms, 15) << "of 60 ms without work";
  copies.wait(started);
  EXPECT_EQ(to, from);
}

TEST(BackgroundCopies, NoMemoryForABatch) {
  const std::vector<uint32_t> from = numbers(300, 3);
  std::vector<uint32_t> to(from.size()), to_if_refused(from.size());  // some of which may be written at any time
  std::vector<BackgroundCopies::Copy> batch, refused;  // so long that the list of pieces grows several times
  for (size_t i = 0; i < from.size(); ++i) {
    batch.push_back({&to[i], &from[i], sizeof(uint32_t)});
    refused.push_back({&to_if_refused[i], &from[i], sizeof(uint32_t)});
  }
  BackgroundCopies copies(2);
  int allocations = 0;
  for (bool done = false; !done; ++allocations) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the threads sleep
    allocations_left = allocations;
    try {
      copies.wait(copies.start(refused));
      done = true;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
    copies.wait(copies.start({}));  // behind what is left of the refused one
    std::fill(to.begin(), to.end(), 0);
    copies.wait(copies.start(batch));
    ASSERT_EQ(to, from) << "after a batch that had " << allocations << " allocations";
  }
  EXPECT_GT(allocations, 3);
}

// Threads that run already must be joined, or the program ends.
TEST(BackgroundCopies, NoMemoryForThreads) {
  int allocations = 0;
  for (bool done = false; !done; ++allocations) {
    allocations_left = allocations;
    try {
      const BackgroundCopies copies(4);
      done = true;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
  }
  EXPECT_GT(allocations, 4);
}

TEST(BackgroundCopies, EndsWithCopiesLeft) {
  constexpr size_t kEach = size_t{1} << 18;
  const std::vector<uint32_t> from = numbers(kEach * 20, 1);
  std::vector<uint32_t> to(from.size());
  BackgroundCopies copies(2);
  for (size_t i = 0; i < 20; ++i) start(copies, to.data() + i * kEach, from.data() + i * kEach, kEach * 4);
}

}  // namespace
}  // namespace calla
