#pragma once
// BackgroundCopies: copies of memory that several threads make while the caller goes on; for large pieces that one thread
// after another would bring at a fraction of the memory's rate (an upload out of a mapped file, page faults included).
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace calla {

class BackgroundCopies {
 public:
  // Throws DeviceError if the system refuses threads.
  explicit BackgroundCopies(int threads);
  // Gives up what has not begun.
  ~BackgroundCopies();
  BackgroundCopies(const BackgroundCopies&) = delete;
  BackgroundCopies& operator=(const BackgroundCopies&) = delete;

  // Both memories must last until wait() has returned. Copies begin in the order of these calls, each by all threads that
  // are free. Returns the copy's number for wait(). One caller at a time.
  uint64_t start(void* to, const void* from, size_t bytes);
  // Returns when the copy has been made.
  void wait(uint64_t copy);

 private:
  // What a thread takes at a time: so little that a few MiB occupy a dozen threads, and 0.1 ms of work beside a lock.
  static constexpr size_t kPiece = size_t{512} << 10;
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
    size_t taken = 0, made = 0;  // bytes
  };

  void work();
  void stop();

  std::mutex mutex_;
  std::condition_variable started_, finished_;
  std::deque<Copy> copies_;  // from number first_ on
  uint64_t first_ = 0;       // all before it have been made
  uint64_t next_ = 0;        // the first of which pieces are left to take
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace calla
