#pragma once
// What host calls leave behind: plain records that a queue's thread executes after commit.
#include <array>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "memory.h"
#include "registry.h"
#include "softmetal/softmetal.h"

namespace softmetal {

struct PipelineInfo {
  std::string kernel;
  ConstantValues constants;
  std::optional<KernelRef> plain;
  std::optional<KernelRef> instrumented;
  uint32_t static_threadgroup_bytes = 0;
  uint32_t max_threads = 1024;
};

struct Binding {
  std::shared_ptr<Memory> memory;
  size_t offset = 0;
};

struct Dispatch {
  std::shared_ptr<const PipelineInfo> pipeline;
  std::array<Binding, kMaxBuffers> buffers;
  std::array<uint32_t, kMaxThreadgroupArguments> threadgroup_lengths{};
  Size3 threadgroups;
  Size3 threads;
  Size3 threads_in_grid;  // dispatchThreads; else threadgroups * threads
  Binding indirect;       // if it has memory: threadgroups are read from it when the dispatch starts
  int phase = 0;
  uint32_t bound_anew = 0;  // bit per buffer index: set since the dispatch before
  uint32_t from_bytes = 0;  // bit per buffer index: bound by setBytes
};

struct Barrier {
  std::vector<std::shared_ptr<Memory>> resources;  // empty: all buffers
};

struct Copy {
  Binding from, to;
  size_t bytes = 0;
};
struct Fill {
  Binding to;
  size_t bytes = 0;
  uint8_t value = 0;
};

// A fence is the set of encoders that must have ended; the hazard tracker fills it (hazards.h).
struct FenceState {
  std::mutex mutex;
  std::vector<uint64_t> encoders;
};

struct EncoderRecord {
  std::string label;
  bool concurrent = false;
  std::vector<std::variant<Dispatch, Barrier, Copy, Fill>> commands;
  std::vector<std::shared_ptr<FenceState>> waits;
  std::vector<std::shared_ptr<FenceState>> updates;
};

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t value = 0;
  std::vector<uint64_t> encoders;  // whose end the latest signals stand for
  struct Listener {
    uint64_t value;
    std::function<void(uint64_t)> call;
  };
  std::vector<Listener> listeners;
  void signal(uint64_t to, const std::vector<uint64_t>& by);
};

struct SignalEvent {
  std::shared_ptr<EventState> event;
  uint64_t value = 0;
};
struct WaitEvent {
  std::shared_ptr<EventState> event;
  uint64_t value = 0;
};

using CommandBufferItem = std::variant<std::shared_ptr<EncoderRecord>, SignalEvent, WaitEvent>;

// How a command buffer ended: code 0 is success, else MTL::CommandBufferError (14: interactivity).
struct Outcome {
  int code = 0;
  std::string message;
};

}  // namespace softmetal
