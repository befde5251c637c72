#include "backend/metal/residency.h"

#include <cstdio>

namespace calla::metal {
namespace {

constexpr std::chrono::milliseconds kBeat{500};       // macOS unwires after about a second
constexpr int64_t kKeepMilliseconds = 3 * 60 * 1000;  // then an idle engine gives the memory back

std::string gigabytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

}  // namespace

Residency::Residency(Device& device) : device_(device) {
#ifdef __APPLE__
  if (__builtin_available(macOS 15.0, *)) {
  } else {
    return;  // no residency sets yet: memory may be unwired when idle
  }
#endif
  const AutoreleaseScope pool;
  auto descriptor = NS::TransferPtr(MTL::ResidencySetDescriptor::alloc()->init());
  NS::Error* error = nullptr;
  set_ = NS::TransferPtr(device.metal()->newResidencySet(descriptor.get(), &error));
  if (!set_) return;
  device.queue()->addResidencySet(set_.get());
  touch();
  thread_ = std::thread([this] { heartbeat(); });
}

Residency::~Residency() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (set_) set_->endResidency();
}

void Residency::hold_all() {
  if (!set_) return;
  const std::lock_guard lock(mutex_);
  const auto& buffers = device_.buffers();
  for (; held_ < buffers.size(); ++held_) set_->addAllocation(buffers[held_].get());
  set_->commit();
  set_->requestResidency();
}

int64_t Residency::now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Residency::heartbeat() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kBeat, [this] { return stop_; })) {
    if (now() - last_use_.load(std::memory_order_relaxed) > kKeepMilliseconds) continue;
    const AutoreleaseScope pool;
    set_->requestResidency();
  }
}

std::string working_set_refusal(const DeviceTraits& traits, size_t needed_bytes, const std::string& what) {
  if (needed_bytes <= traits.working_set_bytes) return "";
  constexpr size_t kSpare = size_t{512} << 20;  // for the system's own use of the GPU
  constexpr size_t kStep = size_t{256} << 20;
  const size_t megabytes = (needed_bytes + kSpare + kStep - 1) / kStep * (kStep >> 20);
  return "Metal: " + what + " needs " + gigabytes(needed_bytes) + " of GPU memory, but macOS lets the GPU hold " +
         gigabytes(traits.working_set_bytes) + " on this machine (" + traits.name +
         "). Use a shorter context or fewer sequences or, if the machine has that much memory and a few GB more for "
         "the "
         "system, raise the limit until the next restart:\n  sudo sysctl iogpu.wired_limit_mb=" +
         std::to_string(megabytes);
}

}  // namespace calla::metal
