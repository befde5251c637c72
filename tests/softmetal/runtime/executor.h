#pragma once
// Executor: the GPU. Runs one dispatch at a time, its threadgroups spread over OS threads.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "commands.h"
#include "hazards.h"
#include "worker.h"

namespace softmetal {

class Executor {
 public:
  static Executor& instance();
  ~Executor();

  // Runs an encoder's commands; unordered dispatches in random order. `number` identifies the command buffer.
  // An error text if something went wrong, which fails the command buffer.
  std::string run(const EncoderRecord& encoder, uint64_t encoder_id, uint64_t command_buffer,
                  const std::vector<uint64_t>& ordered_before);
  // For the hazard tracker.
  void command_buffer_committed(uint64_t command_buffer);
  void command_buffer_ended(uint64_t command_buffer);

 private:
  Executor() = default;
  std::string run_command(const EncoderRecord& encoder, size_t index, uint64_t command_buffer, bool check);
  std::string run_dispatch(const Dispatch& dispatch, uint64_t command_buffer);
  std::string run_copy(const Copy& copy, bool check);
  std::string run_fill(const Fill& fill, bool check);
  bool run_groups(const DispatchView& view, int threads);
  void helper(size_t index);

  std::mutex device_;  // one encoder at a time; guards the tracker too
  HazardTracker hazards_;
  uint64_t dispatches_ = 0;

  struct Job {
    const DispatchView* view = nullptr;
    uint64_t groups = 0, stride = 1, offset = 0;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> ok{true};
  };
  void work(Worker& worker, Job& job);

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  size_t running_ = 0;
  bool stop_ = false;
  std::vector<std::thread> helpers_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace softmetal
