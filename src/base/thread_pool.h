#pragma once
// ThreadPool: a fixed set of threads that run one parallel loop at a time, made for thousands of short loops
// a second (a decode step has several per layer): workers spin for a moment before they sleep, and a loop whose work is
// done does not wait for a worker that has not come yet (other programs may have its core).
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "base/function_ref.h"

namespace calla {

class ThreadPool {
 public:
  // `threads` includes the calling thread; 0 means every core this process may use. Throws DeviceError if the system
  // refuses threads.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(thread) once on each thread, thread in [0, threads()), and returns when all have finished. One
  // caller at a time. The body must not throw.
  void run(FunctionRef<void(int thread)> body);

  // Calls body(begin, end, thread) over disjoint ranges that cover [0, count), handed out in pieces of
  // `grain`, so that a slow thread takes fewer. The pieces do not depend on the number of threads.
  void parallel_for(size_t count, size_t grain, FunctionRef<void(size_t begin, size_t end, int thread)> body);

  // Calls body(index, next, thread) once for each index in [0, count). Each thread starts with a run of neighbouring
  // indices, so that what lies side by side in memory is read by one thread in order, and takes half of what another
  // has left when its own are done. `next` is the index that this thread will most likely do next (count: none): a
  // hint for fetching ahead.
  void for_each(size_t count, FunctionRef<void(size_t index, size_t next, int thread)> body);

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 31;
  // A thread's share of for_each: the first index not yet taken (upper half) and the end.
  struct alignas(64) Share {
    std::atomic<uint64_t> range{0};
  };
  // Lets the workers in, calls body(0), and returns when all who came are out; `all`: waits for everyone to come.
  void open(FunctionRef<void(int thread)> body, bool all);
  void work(int thread);
  void stop();
  bool take(size_t thread, uint32_t& index, bool& more);
  bool steal(size_t thread);

  std::vector<Share> shares_;  // one per thread
  std::vector<std::thread> workers_;
  const FunctionRef<void(int)>* body_ = nullptr;
  // The loop that runs: its number (upper half), whether it is closed to newcomers, and how many workers are in it.
  std::atomic<uint64_t> loop_{kClosed};
  std::atomic<int> came_{0};  // workers that entered the loop
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Cores that this process may run on (its affinity mask), at least 1.
int available_cores();

}  // namespace calla
