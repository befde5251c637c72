#include "base/background_copies.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/thread_pool.h"

namespace calla {
namespace {

// What a thread takes at a time: so little that a few MiB occupy a dozen threads, and 0.1 ms of work beside a lock.
constexpr size_t kPiece = size_t{512} << 10;
// Longer than an upload's buffer is on the bus (0.08 ms), after which the next batch comes.
constexpr auto kLook = std::chrono::microseconds(200);
// A slice of a core that somebody else has takes 2 to 4 ms.
constexpr auto kLongYield = std::chrono::milliseconds(1);

// True as soon as ready() is, false if that takes long. What it waits for may want this very core, so it yields. Where
// somebody has then had the core for a whole slice, `looks` becomes false: who sleeps is let in sooner.
template <class Ready>
bool comes_soon(std::atomic<bool>& looks, Ready ready) {
  if (!looks) return false;
  auto now = std::chrono::steady_clock::now();
  const auto end = now + kLook;
  while (now < end) {
    for (int i = 0; i < 64; ++i)
      if (ready()) return true;
    std::this_thread::yield();
    const auto before = std::exchange(now, std::chrono::steady_clock::now());
    if (now - before > kLongYield) looks = false;
  }
  return false;
}

void make(const BackgroundCopies::Copy& copy) {
  if (copy.from != nullptr) {
    std::memcpy(copy.to, copy.from, copy.bytes);
  } else {
    std::memset(copy.to, 0, copy.bytes);
  }
}

}  // namespace

BackgroundCopies::BackgroundCopies(int threads) : looks_(available_cores() > 1) {
  check(threads > 0, "copies need a thread");
  try {
    for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    throw DeviceError("the system refuses a thread for copies (" + std::string(error.what()) +
                      "); close other programs, or raise the limit of processes");
  } catch (...) {  // out of memory
    stop();
    throw;
  }
}

BackgroundCopies::~BackgroundCopies() { stop(); }

void BackgroundCopies::stop() {
  {
    const std::unique_lock held = lock();
    stop_ = calls_ = true;
  }
  started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

uint64_t BackgroundCopies::start(std::span<const Copy> batch) {
  std::unique_lock held = lock();
  // Batch and count keep up with the pieces, so that they agree if there is no memory for the next one.
  const uint64_t number = next_;
  left_.push_back(0);
  ++next_;
  for (const Copy& copy : batch) {
    auto* const to = static_cast<std::byte*>(copy.to);
    const auto* const from = static_cast<const std::byte*>(copy.from);
    for (size_t at = 0; at < copy.bytes; at += kPiece) {
      pieces_.push_back({{to + at, from == nullptr ? nullptr : from + at, std::min(kPiece, copy.bytes - at)}, number});
      ++left_.back();
    }
  }
  forget_made();  // this one, if it is empty and the last
  // Of all batches: one that ran out of memory has woken nobody.
  if (!pieces_.empty()) calls_ = true;
  const size_t wake = std::min(pieces_.size(), static_cast<size_t>(sleeping_));
  held.unlock();
  for (size_t i = 0; i < wake; ++i) started_.notify_one();
  return number;
}

void BackgroundCopies::wait(uint64_t batch) {
  check(batch < next_, "only copies that were started can be waited for");
  if (comes_soon(looks_, [&] { return batch < first_; })) return;
  std::unique_lock held = lock();
  caller_sleeps_ = true;
  made_.wait(held, [&] { return batch < first_; });
  caller_sleeps_ = false;
}

// It is held for a few instructions, so trying again is sooner than sleeping.
std::unique_lock<std::mutex> BackgroundCopies::lock() {
  std::unique_lock held(mutex_, std::try_to_lock);
  for (int i = 0; i < 1000 && !held; ++i) held.try_lock();
  if (!held) held.lock();
  return held;
}

void BackgroundCopies::forget_made() {
  while (!left_.empty() && left_.front() == 0) {
    left_.pop_front();
    ++first_;
  }
}

void BackgroundCopies::work() {
  std::unique_lock held = lock();
  while (true) {
    while (!stop_ && pieces_.empty()) {
      held.unlock();
      const bool soon = comes_soon(looks_, [&] { return calls_.load(); });
      held = lock();
      if (soon) continue;  // unless others were faster
      ++sleeping_;
      started_.wait(held, [&] { return stop_ || !pieces_.empty(); });
      --sleeping_;
    }
    if (stop_) return;
    const Piece piece = pieces_.front();
    pieces_.pop_front();
    calls_ = !pieces_.empty();
    held.unlock();
    make(piece.copy);
    held = lock();
    if (--left_[piece.batch - first_] > 0) continue;
    forget_made();
    if (caller_sleeps_) made_.notify_one();
  }
}

}  // namespace calla
