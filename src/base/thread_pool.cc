#include "base/thread_pool.h"

#include <algorithm>
#ifdef __linux__
#include <sched.h>
#endif

namespace calla {
namespace {

constexpr int kSpins = 20000;  // roughly 50-100 us: longer than the gap between two loops of one step

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  generation_.fetch_add(1);
  {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(FunctionRef<void(int)> body) {
  if (!workers_.empty()) {
    body_ = &body;
    running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1);  // seq_cst: ordered before the look at sleepers_
    if (sleepers_.load() > 0) {
      std::lock_guard lock(mutex_);
      wake_.notify_all();
    }
  }
  body(0);
  for (int spin = 0; running_.load(std::memory_order_acquire) > 0; ++spin) {
    if (spin < kSpins)
      pause();
    else
      std::this_thread::yield();
  }
}

void ThreadPool::parallel_for(size_t count, size_t grain, FunctionRef<void(size_t, size_t, int)> body) {
  if (count == 0) return;
  grain = std::max<size_t>(grain, 1);
  if (workers_.empty() || count <= grain) {
    for (size_t begin = 0; begin < count; begin += grain) body(begin, std::min(count, begin + grain), 0);
    return;
  }
  std::atomic<size_t> next{0};
  run([&](int thread) {
    for (;;) {
      const size_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      body(begin, std::min(count, begin + grain), thread);
    }
  });
}

void ThreadPool::for_each(size_t count, FunctionRef<void(size_t, size_t, int)> body) {
  if (count == 0) return;
  if (workers_.empty() || count == 1) {
    for (size_t i = 0; i < count; ++i) body(i, i + 1, 0);
    return;
  }
  std::atomic<size_t> unclaimed{0};
  run([&](int thread) {
    size_t index = unclaimed.fetch_add(1, std::memory_order_relaxed);
    while (index < count) {
      const size_t next = unclaimed.fetch_add(1, std::memory_order_relaxed);
      body(index, next < count ? next : count, thread);
      index = next;
    }
  });
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    int spin = 0;
    while (generation_.load(std::memory_order_acquire) == seen) {
      if (++spin < kSpins) {
        pause();
        continue;
      }
      std::unique_lock lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return generation_.load() != seen; });
      sleepers_.fetch_sub(1);
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_) return;
    (*body_)(thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace calla
