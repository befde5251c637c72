#pragma once
// ThreadPool: a fixed set of threads that run one parallel loop at a time, made for thousands of short loops a second
// (a decode step has several per layer): workers spin for a moment before they sleep.
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace calla {

class ThreadPool {
 public:
  // `threads` includes the calling thread; 0 means every core this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(thread) once on each thread, thread in [0, threads()), and returns when all have finished. One caller at
  // a time. The body must not throw.
  void run(const std::function<void(int thread)>& body);

  // Calls body(begin, end, thread) over disjoint ranges that cover [0, count), handed out in pieces of `grain`, so that
  // a slow thread takes fewer. The pieces do not depend on the number of threads.
  void parallel_for(size_t count, size_t grain, const std::function<void(size_t begin, size_t end, int thread)>& body);

 private:
  void work(int thread);

  std::vector<std::thread> workers_;
  const std::function<void(int)>* body_ = nullptr;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Cores that this process may run on (its affinity mask), at least 1.
int available_cores();

}  // namespace calla
