#pragma once
// Keeps the backend's memory wired while it is in use. macOS unwires what the GPU has not touched for about a second,
// and the next token then takes several times as long; so one static residency set holds every buffer, and a thread
// asks for it again at intervals until the backend has been idle for a while.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "backend/metal/device.h"

namespace calla::metal {

class Residency {
 public:
  explicit Residency(Device& device);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Adds the device's buffers that are not in the set yet, and wires them. At start and after allocate_state only.
  void hold_all();
  // The backend has work: keep the memory for another while.
  void touch() { last_use_.store(now(), std::memory_order_relaxed); }

 private:
  static int64_t now();
  void heartbeat();

  Device& device_;
  NS::SharedPtr<MTL::ResidencySet> set_;  // none before macOS 15
  size_t held_ = 0;
  std::atomic<int64_t> last_use_{0};  // milliseconds
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

// Why `needed` bytes do not fit what the GPU may hold, with the command that raises the limit; empty if they fit.
std::string working_set_refusal(const DeviceTraits& traits, size_t needed_bytes, const std::string& what);

}  // namespace calla::metal
