#include "base/background_copies.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <system_error>

#include "base/check.h"
#include "base/error.h"

namespace calla {

BackgroundCopies::BackgroundCopies(int threads) {
  check(threads > 0, "copies need a thread");
  try {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    throw DeviceError("the system refuses a thread for copies (" + std::string(error.what()) +
                      "); close other programs, or raise the limit of processes");
  }
}

BackgroundCopies::~BackgroundCopies() { stop(); }

void BackgroundCopies::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

uint64_t BackgroundCopies::start(void* to, const void* from, size_t bytes) {
  uint64_t number;
  {
    const std::lock_guard lock(mutex_);
    number = first_ + copies_.size();
    copies_.push_back({static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes});
  }
  if (bytes > kPiece) {
    started_.notify_all();
  } else {  // one thread's work
    started_.notify_one();
  }
  return number;
}

void BackgroundCopies::wait(uint64_t copy) {
  std::unique_lock lock(mutex_);
  check(copy < first_ + copies_.size(), "only a copy that was started can be waited for");
  finished_.wait(lock, [&] {
    if (copy < first_) return true;
    const Copy& c = copies_[copy - first_];
    return c.made == c.bytes;
  });
}

void BackgroundCopies::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [&] { return stop_ || next_ < first_ + copies_.size(); });
    if (stop_) return;
    const uint64_t number = next_;
    Copy& c = copies_[number - first_];
    const size_t begin = c.taken, bytes = std::min(kPiece, c.bytes - begin);
    std::byte* to = c.to + begin;
    const std::byte* from = c.from + begin;
    c.taken += bytes;
    if (c.taken == c.bytes) ++next_;
    if (bytes > 0) {  // an empty copy is made already, and may be gone by then
      lock.unlock();
      std::memcpy(to, from, bytes);
      lock.lock();
    }
    Copy& now = copies_[number - first_];  // others may have come and gone
    now.made += bytes;
    if (now.made < now.bytes) continue;
    while (!copies_.empty() && first_ < next_ && copies_.front().made == copies_.front().bytes) {
      copies_.pop_front();
      ++first_;
    }
    finished_.notify_all();
  }
}

}  // namespace calla
