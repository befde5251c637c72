#pragma once
// Worker: runs threadgroups on one OS thread, a fiber per thread of the group. Lanes meet in collectives and barriers;
// between those they run to completion one after another, in an order drawn from the group's seed.
#include <boost/context/detail/fcontext.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "softmetal/softmetal.h"

namespace softmetal {

class MemoryChecker;

// What every threadgroup of a dispatch shares.
struct DispatchView {
  const KernelInfo* kernel = nullptr;
  void* const* buffers = nullptr;
  const size_t* buffer_bytes = nullptr;
  const uint32_t* threadgroup_lengths = nullptr;  // [kMaxThreadgroupArguments], bytes
  const std::vector<std::pair<uint32_t, uint32_t>>* threadgroup_variables = nullptr;  // offset, bytes
  uint32_t threadgroup_variables_end = 0;
  Size3 threadgroups;
  Size3 threads;  // per threadgroup
  Size3 threads_in_grid;
  uint32_t exact_bytes = 0;  // of Invocation
  uint64_t seed = 0;
  bool preempt = false;  // switch simdgroups at random collectives
  MemoryChecker* checker = nullptr;
  std::chrono::steady_clock::time_point deadline{};
};

struct Fiber {
  boost::context::detail::fcontext_t context = nullptr;
  void* stack_top = nullptr;
};

struct Lane {
  Fiber* fiber = nullptr;                    // null until it starts, and after it returned
  const std::source_location* at = nullptr;  // where it waits
  const CollectiveKind* kind = nullptr;      // null: at a barrier
  uint32_t fences = 0;
};

struct Simdgroup {
  uint32_t all = 0;                // bit per lane
  uint32_t ready = 0;              // may run
  uint32_t waiting = 0;            // in a collective
  uint32_t barrier = 0;            // at a threadgroup barrier
  uint32_t done = 0;               // returned
  uint32_t rotation = 0;           // where the order of lanes starts
  uint32_t epoch_threadgroup = 0;  // counts simdgroup barriers that order threadgroup memory
  uint32_t epoch_device = 0;
  Lanes lanes;
};

class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs one threadgroup to its end. False if it had to be abandoned; the finding has been reported.
  bool run(const DispatchView& dispatch, Size3 group);

  static inline Worker* current();

  // Called by kernels, on a fiber.
  void collective(const CollectiveKind& kind, void* value, uint64_t param, const std::source_location& at);
  void barrier(uint32_t fences, const std::source_location& at);
  void simd_barrier(uint32_t fences, const std::source_location& at);
  [[noreturn]] void abandon();
  // Reports and abandons. `lanes` and `place` default to the running lane's.
  [[noreturn]] void fault(Fault fault, const std::string& message, const std::string& place,
                          const std::string& lanes = "");
  [[noreturn]] void missing(uint32_t lane, uint64_t source);
  // At every collective, barrier and seen access: now and then looks at the clock, so that no kernel runs forever.
  void tick() {
    if ((++ticks_ & 0xFFFu) == 0) check_deadline();
  }

  // For the checker.
  const DispatchView& dispatch() const { return *dispatch_; }
  uint32_t lane() const { return lane_; }
  Size3 group() const { return group_; }
  uint32_t group_number() const {
    return (group_.z * dispatch_->threadgroups.y + group_.y) * dispatch_->threadgroups.x + group_.x;
  }
  const Simdgroup& simdgroup() const { return simdgroups_[lane_ / kSimdWidth]; }
  uint32_t epoch_threadgroup() const { return epoch_threadgroup_; }
  uint32_t epoch_device() const { return epoch_device_; }
  bool on_stack(const void* p) const {
    return static_cast<size_t>(static_cast<const char*>(p) - stacks_) < stacks_bytes_;
  }
  char* threadgroup_memory() const { return arena_; }
  uint32_t threadgroup_bytes() const { return arena_used_; }
  const std::vector<std::pair<uint32_t, uint32_t>>& threadgroup_spans() const { return threadgroup_spans_; }
  uint32_t thread_count() const { return threads_; }
  uint64_t collectives_run() const { return collectives_run_; }
  uint64_t barriers_run() const { return barriers_run_; }

 private:
  static void entry(boost::context::detail::transfer_t from);
  void fiber_loop();
  void run_lane();
  void finish_lane();
  void start_fiber(Fiber& fiber);
  Fiber& idle_fiber();
  void switch_to(Fiber& to);
  int pick();         // the next lane to run, or -1
  void yield_lane();  // gives up the running lane, which waits
  void resume(uint32_t lane);
  void complete(Simdgroup& s);
  void check_barrier();  // releases it when all have arrived
  [[noreturn]] void diverged(const std::string& message);
  uint64_t random();
  void prepare_threadgroup_memory();
  void check_deadline();

  char* stacks_ = nullptr;
  size_t stacks_bytes_ = 0;
  size_t stack_count_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Fiber main_;
  Fiber* running_ = nullptr;

  const DispatchView* dispatch_ = nullptr;
  Size3 group_;
  uint32_t threads_ = 0;
  Invocation invocation_;
  std::vector<Lane> lanes_;
  std::vector<Simdgroup> simdgroups_;
  uint32_t ready_simdgroups_ = 0;
  uint32_t simdgroup_rotation_ = 0;
  uint32_t lane_ = 0;        // running
  uint32_t at_barrier_ = 0;  // lanes
  uint32_t done_ = 0;
  uint32_t epoch_threadgroup_ = 0;
  uint32_t epoch_device_ = 0;
  bool abandoned_ = false;
  uint64_t random_ = 1;
  uint32_t ticks_ = 0;
  uint64_t collectives_run_ = 0;
  uint64_t barriers_run_ = 0;

  char* arena_ = nullptr;
  size_t arena_bytes_ = 0;
  uint32_t arena_used_ = 0;
  void* threadgroup_arguments_[kMaxThreadgroupArguments] = {};
  std::vector<std::pair<uint32_t, uint32_t>> threadgroup_spans_;  // variables and arguments: offset, bytes
};

// The worker that runs on this OS thread. Every hook asks for it, hence no function call and no search for the variable.
extern constinit thread_local Worker* running_worker __attribute__((tls_model("initial-exec"), visibility("hidden")));
inline Worker* Worker::current() { return running_worker; }

// "0-15, 20": the set bits of a mask, shifted by base.
std::string lane_list(uint32_t mask, uint32_t base);

}  // namespace softmetal
