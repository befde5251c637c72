#include "base/thread_pool.h"

#include <algorithm>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/error.h"
#ifdef __linux__
#include <sched.h>
#endif

namespace calla {
namespace {

constexpr int kSpins = 20000;  // roughly 50-100 us: longer than the gap between two loops of one step

uint32_t number_of(uint64_t loop) { return static_cast<uint32_t>(loop >> 32); }
uint32_t workers_in(uint64_t loop) { return static_cast<uint32_t>(loop & 0x7fffffff); }

uint64_t pack(uint32_t begin, uint32_t end) { return (static_cast<uint64_t>(begin) << 32) | end; }
uint32_t begin_of(uint64_t range) { return static_cast<uint32_t>(range >> 32); }
uint32_t end_of(uint64_t range) { return static_cast<uint32_t>(range); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits a moment; longer and longer ones go to whoever else wants the core.
void wait_a_moment(int& spins) {
  if (++spins < kSpins)
    pause();
  else
    std::this_thread::yield();
}

}  // namespace

int available_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = available_cores();
  shares_ = std::vector<Share>(static_cast<size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    stop();
    throw DeviceError("only " + std::to_string(workers_.size() + 1) + " of " + std::to_string(threads) +
                      " threads can be started: " + error.code().message() + "; use fewer --threads");
  } catch (...) {  // no memory: the threads that run must end before they go
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stop_ = true;
  loop_.fetch_add(uint64_t{1} << 32);
  {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(FunctionRef<void(int)> body) { open(body, true); }

void ThreadPool::open(FunctionRef<void(int)> body, bool all) {
  if (workers_.empty()) return body(0);
  body_ = &body;
  came_.store(0, std::memory_order_relaxed);
  const uint64_t number = number_of(loop_.load(std::memory_order_relaxed)) + 1;
  loop_.store(number << 32);  // seq_cst: ordered before the look at sleepers_
  if (sleepers_.load() > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  body(0);
  int spins = 0;
  while (all && came_.load(std::memory_order_acquire) < static_cast<int>(workers_.size())) wait_a_moment(spins);
  loop_.fetch_or(kClosed, std::memory_order_relaxed);
  spins = 0;
  while (workers_in(loop_.load(std::memory_order_acquire)) > 0) wait_a_moment(spins);
}

void ThreadPool::parallel_for(size_t count, size_t grain, FunctionRef<void(size_t, size_t, int)> body) {
  if (count == 0) return;
  grain = std::max<size_t>(grain, 1);
  if (workers_.empty() || count <= grain) {
    for (size_t begin = 0; begin < count; begin += grain) body(begin, std::min(count, begin + grain), 0);
    return;
  }
  std::atomic<size_t> next{0};
  open(
      [&](int thread) {
        for (;;) {
          const size_t begin = next.fetch_add(grain, std::memory_order_relaxed);
          if (begin >= count) return;
          body(begin, std::min(count, begin + grain), thread);
        }
      },
      false);
}

void ThreadPool::for_each(size_t count, FunctionRef<void(size_t, size_t, int)> body) {
  if (count == 0) return;
  if (workers_.empty() || count == 1) {
    for (size_t i = 0; i < count; ++i) body(i, i + 1, 0);
    return;
  }
  check(count <= UINT32_MAX, "indices of a parallel loop fit 32 bits");
  const size_t n = shares_.size();
  for (size_t t = 0; t < n; ++t)
    shares_[t].range.store(pack(static_cast<uint32_t>(count * t / n), static_cast<uint32_t>(count * (t + 1) / n)),
                           std::memory_order_relaxed);
  open(
      [&](int thread) {
        const auto self = static_cast<size_t>(thread);
        do {
          uint32_t index = 0;
          bool more = false;
          while (take(self, index, more)) body(index, more ? index + 1 : count, thread);
        } while (steal(self));
      },
      false);
}

// Takes the first index of a thread's own share; `more`: the share has another one.
bool ThreadPool::take(size_t thread, uint32_t& index, bool& more) {
  std::atomic<uint64_t>& range = shares_[thread].range;
  uint64_t now = range.load(std::memory_order_relaxed);
  while (begin_of(now) < end_of(now)) {
    if (!range.compare_exchange_weak(now, pack(begin_of(now) + 1, end_of(now)), std::memory_order_relaxed)) continue;
    index = begin_of(now);
    more = index + 1 < end_of(now);
    return true;
  }
  return false;
}

// Moves the back half of the largest share to this thread's, which is empty; false: nothing is left. A share never gets
// an index back, so two equal ranges seen at different times hold the same indices.
bool ThreadPool::steal(size_t thread) {
  for (;;) {
    size_t victim = thread;
    uint64_t largest = 0;
    for (size_t t = 0; t < shares_.size(); ++t) {
      const uint64_t range = shares_[t].range.load(std::memory_order_relaxed);
      if (end_of(range) > begin_of(range) && end_of(range) - begin_of(range) > end_of(largest) - begin_of(largest)) {
        victim = t;
        largest = range;
      }
    }
    if (victim == thread) return false;
    const uint32_t begin = begin_of(largest), end = end_of(largest), middle = begin + (end - begin) / 2;
    if (!shares_[victim].range.compare_exchange_strong(largest, pack(begin, middle), std::memory_order_relaxed))
      continue;
    shares_[thread].range.store(pack(middle, end), std::memory_order_relaxed);
    return true;
  }
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spin = 0;
    uint64_t loop = loop_.load(std::memory_order_acquire);
    for (; number_of(loop) == seen; loop = loop_.load(std::memory_order_acquire)) {
      if (++spin < kSpins) {
        pause();
        continue;
      }
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return number_of(loop_.load()) != seen; });
      sleepers_.fetch_sub(1);
    }
    if (stop_) return;
    seen = number_of(loop);
    // Enters unless the loop is over; a newer one is seen next time.
    bool entered = false;
    while (number_of(loop) == seen && (loop & kClosed) == 0 && !entered)
      entered = loop_.compare_exchange_weak(loop, loop + 1, std::memory_order_acquire);
    if (!entered) continue;
    came_.fetch_add(1, std::memory_order_relaxed);
    (*body_)(thread);
    loop_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace calla
