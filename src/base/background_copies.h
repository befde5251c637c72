#pragma once
// BackgroundCopies: copies of memory that several threads make while the caller goes on; for large pieces that one thread
// after another would bring at a fraction of the memory's rate (an upload out of a mapped file, page faults included).
//
// While batches follow each other closely nobody sleeps or is woken: threads without work, and the caller in wait(), look
// for 0.2 ms before they sleep, and let others have the core between looks. They sleep at once if there is one core, where
// who looks keeps from work whom it waits for, and as soon as cores turn out to be scarce.
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace calla {

class BackgroundCopies {
 public:
  struct Copy {
    void* to;
    const void* from;  // null: zeros are written
    size_t bytes;
  };

  // Throws DeviceError if the system refuses threads.
  explicit BackgroundCopies(int threads);
  // Gives up what has not begun.
  ~BackgroundCopies();
  BackgroundCopies(const BackgroundCopies&) = delete;
  BackgroundCopies& operator=(const BackgroundCopies&) = delete;

  // Both memories of each copy must last until wait() has returned. Copies begin in the order in which they are given, each
  // by all threads that are free. Returns the batch's number for wait(). One caller at a time. If memory for the list runs
  // out (std::bad_alloc), some of the batch may be copied nevertheless, until this is destroyed.
  uint64_t start(std::span<const Copy> batch);
  // Returns when all copies of the batch, and of those before it, have been made.
  void wait(uint64_t batch);

 private:
  struct Piece {
    Copy copy;
    uint64_t batch;
  };

  std::unique_lock<std::mutex> lock();
  void forget_made();
  void work();
  void stop();

  std::atomic<bool> looks_;  // before it sleeps
  std::mutex mutex_;
  std::deque<Piece> pieces_;         // that no thread has taken
  std::deque<size_t> left_;          // pieces that have not been made, of each batch from number first_ on
  std::atomic<uint64_t> first_ = 0;  // all before it have been made
  uint64_t next_ = 0;                // that start() returns
  bool stop_ = false;
  std::atomic<bool> calls_ = false;  // a thread without work has something to do: pieces, or the end
  int sleeping_ = 0;                 // threads
  bool caller_sleeps_ = false;
  std::condition_variable started_, made_;
  std::vector<std::thread> workers_;
};

}  // namespace calla
