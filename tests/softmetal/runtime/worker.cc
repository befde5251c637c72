#include "worker.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstring>
#include <new>

#include "checker.h"
#include "findings.h"

namespace softmetal {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kMaxFibers = 1024;

// The first set bit of mask at or after `rotation`, going round.
uint32_t first_from(uint32_t mask, uint32_t rotation) {
  return (static_cast<uint32_t>(std::countr_zero(std::rotr(mask, static_cast<int>(rotation)))) + rotation) % 32;
}

}  // namespace

constinit thread_local Worker* running_worker = nullptr;

std::string lane_list(uint32_t mask, uint32_t base) {
  std::string text;
  for (uint32_t i = 0; i < 32; ++i) {
    if (!((mask >> i) & 1u)) continue;
    uint32_t last = i;
    while (last + 1 < 32 && ((mask >> (last + 1)) & 1u)) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(base + i);
    if (last > i) text += "-" + std::to_string(base + last);
    i = last;
  }
  return text;
}

Worker::Worker() {
  const size_t slot = kStackBytes + kGuardBytes;
  stacks_bytes_ = slot * kMaxFibers;
  void* stacks =
      mmap(nullptr, stacks_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena_bytes_ = size_t{1} << 20;
  void* arena = mmap(nullptr, arena_bytes_ + 2 * kGuardBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stacks == MAP_FAILED || arena == MAP_FAILED) throw std::bad_alloc();
  stacks_ = static_cast<char*>(stacks);
  arena_ = static_cast<char*>(arena) + kGuardBytes;
  if (mprotect(arena_, arena_bytes_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

Worker::~Worker() {
  munmap(stacks_, stacks_bytes_);
  munmap(arena_ - kGuardBytes, arena_bytes_ + 2 * kGuardBytes);
}

uint64_t Worker::random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_;
}

// --- fibers --------------------------------------------------------------------------------------------------------

void Worker::entry(boost::context::detail::transfer_t from) {
  static_cast<Fiber*>(from.data)->context = from.fctx;
  running_worker->fiber_loop();
}

void Worker::start_fiber(Fiber& fiber) {
  fiber.context = boost::context::detail::make_fcontext(fiber.stack_top, kStackBytes, &Worker::entry);
}

Fiber& Worker::idle_fiber() {
  if (idle_.empty()) {
    char* slot = stacks_ + fibers_.size() * (kStackBytes + kGuardBytes);
    mprotect(slot, kGuardBytes, PROT_NONE);  // a stack that overflows hits this
    fibers_.push_back(std::make_unique<Fiber>());
    fibers_.back()->stack_top = slot + kGuardBytes + kStackBytes;
    start_fiber(*fibers_.back());
    return *fibers_.back();
  }
  Fiber* fiber = idle_.back();
  idle_.pop_back();
  return *fiber;
}

void Worker::switch_to(Fiber& to) {
  Fiber* from = running_;
  running_ = &to;
  const auto back = boost::context::detail::jump_fcontext(to.context, from);
  static_cast<Fiber*>(back.data)->context = back.fctx;
}

// A fiber runs lanes to their end, one after another, as long as new ones are next.
void Worker::fiber_loop() {
  while (true) {
    run_lane();
    finish_lane();
    const int next = pick();
    if (next < 0) {
      if (done_ != threads_) diverged("threads wait for threads that have returned");
      idle_.push_back(running_);
      switch_to(main_);
      continue;
    }
    Lane& lane = lanes_[static_cast<size_t>(next)];
    lane_ = static_cast<uint32_t>(next);
    if (!lane.fiber) {
      lane.fiber = running_;
    } else {
      idle_.push_back(running_);
      switch_to(*lane.fiber);
    }
  }
}

void Worker::run_lane() {
  Invocation in = invocation_;
  in.thread_index = lane_;
  dispatch_->kernel->run(in);
}

void Worker::finish_lane() {
  Simdgroup& s = simdgroups_[lane_ / kSimdWidth];
  s.done |= 1u << (lane_ % kSimdWidth);
  lanes_[lane_].fiber = nullptr;
  ++done_;
  if (s.waiting && (s.waiting | s.done) == s.all) {
    complete(s);
    s.ready |= s.waiting;
    s.waiting = 0;
    ready_simdgroups_ |= 1u << (lane_ / kSimdWidth);
  }
  check_barrier();
}

int Worker::pick() {
  const uint32_t own = lane_ / kSimdWidth;
  uint32_t chosen = own;
  if (simdgroups_[own].ready == 0) {
    if (ready_simdgroups_ == 0) return -1;
    chosen = first_from(ready_simdgroups_, simdgroup_rotation_);
  }
  Simdgroup& s = simdgroups_[chosen];
  const uint32_t lane = first_from(s.ready, s.rotation);
  s.ready &= ~(1u << lane);
  if (s.ready == 0) ready_simdgroups_ &= ~(1u << chosen);
  return static_cast<int>(chosen * kSimdWidth + lane);
}

void Worker::resume(uint32_t lane) {
  Lane& next = lanes_[lane];
  lane_ = lane;
  if (!next.fiber) next.fiber = &idle_fiber();
  if (next.fiber != running_) switch_to(*next.fiber);
}

void Worker::yield_lane() {
  const uint32_t self = lane_;
  const int next = pick();
  if (next < 0) diverged("no thread of the threadgroup can go on");
  resume(static_cast<uint32_t>(next));
  lane_ = self;
}

void Worker::abandon() {
  abandoned_ = true;
  switch_to(main_);
  __builtin_unreachable();
}

// --- collectives ---------------------------------------------------------------------------------------------------

void Worker::collective(const CollectiveKind& kind, void* value, uint64_t param, const std::source_location& at) {
  tick();
  const uint32_t group = lane_ / kSimdWidth, bit = 1u << (lane_ % kSimdWidth);
  Simdgroup& s = simdgroups_[group];
  Lane& lane = lanes_[lane_];
  lane.at = &at;
  lane.kind = &kind;
  s.lanes.value[lane_ % kSimdWidth] = value;
  s.lanes.param[lane_ % kSimdWidth] = param;
  s.waiting |= bit;
  if ((s.waiting | s.done) != s.all) {
    if (s.barrier && (s.waiting | s.done | s.barrier) == s.all)
      diverged("lanes of a simdgroup wait in " + std::string(kind.name) + " for lanes that wait at a barrier");
    yield_lane();
    return;
  }
  complete(s);
  s.ready |= s.waiting & ~bit;
  s.waiting = 0;
  if (s.ready) ready_simdgroups_ |= 1u << group;
  if (dispatch_->preempt && (random() & 7u) == 0) {  // let another lane, perhaps of another simdgroup, go first
    s.ready |= bit;
    ready_simdgroups_ |= 1u << group;
    const uint32_t self = lane_;
    const uint32_t chosen = first_from(ready_simdgroups_, static_cast<uint32_t>(random() % 32));
    lane_ = chosen * kSimdWidth;  // pick() prefers the simdgroup of the running lane
    const int next = pick();
    if (static_cast<uint32_t>(next) != self) resume(static_cast<uint32_t>(next));
    lane_ = self;
  }
}

void Worker::complete(Simdgroup& s) {
  const uint32_t base = static_cast<uint32_t>(&s - simdgroups_.data()) * kSimdWidth;
  const uint32_t first = static_cast<uint32_t>(std::countr_zero(s.waiting));
  const Lane& reference = lanes_[base + first];
  for (uint32_t rest = s.waiting & (s.waiting - 1); rest; rest &= rest - 1) {
    const Lane& other = lanes_[base + static_cast<uint32_t>(std::countr_zero(rest))];
    if (other.kind != reference.kind || other.at->line() != reference.at->line() ||
        other.at->column() != reference.at->column())
      diverged("lanes of a simdgroup meet in different collectives");
  }
  if (reference.kind->needs_all_lanes && s.waiting != 0xFFFFFFFFu)
    fault(Fault::kDivergence,
          std::string(reference.kind->name) + " needs all 32 lanes; there are: " + lane_list(s.waiting, base),
          place_of(*reference.at), lane_list(s.waiting, base));
  s.lanes.active = s.waiting;
  if (reference.kind->apply) reference.kind->apply(s.lanes);
  if (dispatch_->checker) dispatch_->checker->round_complete(base / kSimdWidth, s.done == 0);
  s.rotation = static_cast<uint32_t>(random() % 32);
  ++collectives_run_;
}

void Worker::barrier(uint32_t fences, const std::source_location& at) {
  tick();
  const uint32_t group = lane_ / kSimdWidth, bit = 1u << (lane_ % kSimdWidth);
  Simdgroup& s = simdgroups_[group];
  Lane& lane = lanes_[lane_];
  lane.at = &at;
  lane.kind = nullptr;
  lane.fences = fences;
  s.barrier |= bit;
  ++at_barrier_;
  if (s.waiting && (s.waiting | s.done | s.barrier) == s.all)
    diverged("lanes of a simdgroup wait at a barrier for lanes that wait in a collective");
  const uint32_t self = lane_;
  check_barrier();
  if (at_barrier_ == 0) {  // this lane was the last; it may go on, or let others go first
    s.ready |= bit;
    ready_simdgroups_ |= 1u << group;
    lane_ = first_from(ready_simdgroups_, simdgroup_rotation_) * kSimdWidth;  // where pick() looks first
  }
  const int next = pick();
  if (next < 0) diverged("no thread of the threadgroup can go on");
  if (static_cast<uint32_t>(next) != self) resume(static_cast<uint32_t>(next));
  lane_ = self;
}

void Worker::check_barrier() {
  if (at_barrier_ == 0 || at_barrier_ + done_ != threads_) return;
  if (done_ != 0) diverged("some threads wait at a threadgroup barrier, others have returned");
  const Lane& first = lanes_[0];
  for (const Lane& lane : lanes_)
    if (lane.at->line() != first.at->line() || lane.at->column() != first.at->column() || lane.fences != first.fences)
      diverged("threads of a threadgroup meet at different barriers");
  if (first.fences & kFenceThreadgroup) ++epoch_threadgroup_;
  if (first.fences & kFenceDevice) ++epoch_device_;
  ++barriers_run_;
  at_barrier_ = 0;
  simdgroup_rotation_ = static_cast<uint32_t>(random() % 32);
  ready_simdgroups_ = 0;
  for (size_t i = 0; i < simdgroups_.size(); ++i) {
    Simdgroup& s = simdgroups_[i];
    if (dispatch_->checker) dispatch_->checker->round_complete(static_cast<uint32_t>(i), true);
    s.ready = s.barrier;
    s.barrier = 0;
    s.rotation = static_cast<uint32_t>(random() % 32);
    // the running lane is the caller's to schedule
    if (i == lane_ / kSimdWidth) s.ready &= ~(1u << (lane_ % kSimdWidth));
    if (s.ready) ready_simdgroups_ |= 1u << i;
  }
}

void Worker::simd_barrier(uint32_t fences, const std::source_location& at) {
  static constexpr CollectiveKind kind{"simdgroup_barrier", nullptr};
  Simdgroup& s = simdgroups_[lane_ / kSimdWidth];
  const bool last = (s.waiting | s.done | (1u << (lane_ % kSimdWidth))) == s.all;
  if (last) {  // before the others go on
    if (fences & kFenceThreadgroup) ++s.epoch_threadgroup;
    if (fences & kFenceDevice) ++s.epoch_device;
  }
  collective(kind, nullptr, fences, at);
}

void Worker::fault(Fault fault, const std::string& message, const std::string& place, const std::string& lanes) {
  report_finding(
      {fault, dispatch_->kernel->name, group_, lanes.empty() ? std::to_string(lane_) : lanes, place, message});
  abandon();
}

void Worker::check_deadline() {
  if (std::chrono::steady_clock::now() > dispatch_->deadline)
    fault(Fault::kEndless, "the dispatch takes longer than Options::dispatch_timeout_seconds", "");
}

void Worker::missing(uint32_t lane, uint64_t source) {
  const uint32_t base = lane_ / kSimdWidth * kSimdWidth;
  const Lane& asking = lanes_[base + lane];
  fault(Fault::kMissingLane,
        std::string(asking.kind->name) + ": lane " + std::to_string(lane) + " reads from lane " +
            std::to_string(source) + ", which is not active (active: " + lane_list(simdgroup().lanes.active, 0) + ")",
        place_of(*asking.at), std::to_string(base + lane));
}

void Worker::diverged(const std::string& message) {
  // Says for every place where threads wait who they are; the first place goes into the finding.
  std::string text = message;
  std::string first_place, first_lanes;
  uint32_t listed = 0;
  std::vector<std::pair<std::string, std::string>> waits;  // what and where -> threads
  for (size_t i = 0; i < simdgroups_.size(); ++i) {
    const Simdgroup& s = simdgroups_[i];
    const uint32_t base = static_cast<uint32_t>(i) * kSimdWidth;
    uint32_t rest = s.waiting | s.barrier;
    while (rest) {
      const Lane& lane = lanes_[base + static_cast<uint32_t>(std::countr_zero(rest))];
      uint32_t same = 0;
      for (uint32_t k = 0; k < kSimdWidth; ++k)
        if (((rest >> k) & 1u) && lanes_[base + k].kind == lane.kind &&
            lanes_[base + k].at->line() == lane.at->line() && lanes_[base + k].at->column() == lane.at->column())
          same |= 1u << k;
      rest &= ~same;
      const std::string what =
          std::string(lane.kind ? lane.kind->name : "threadgroup_barrier") + " at " + place_of(*lane.at);
      if (first_place.empty()) {
        first_place = place_of(*lane.at);
        first_lanes = lane_list(same, base);
      }
      if (++listed <= 8) waits.emplace_back(what, lane_list(same, base));
    }
    if (s.done && listed <= 8) waits.emplace_back("returned", lane_list(s.done, base));
  }
  for (const auto& [what, who] : waits) text += "; threads " + who + ": " + what;
  fault(Fault::kDivergence, text, first_place, first_lanes);
}

// --- a threadgroup ---------------------------------------------------------------------------------------------------

void Worker::prepare_threadgroup_memory() {
  constexpr uint32_t kGap = 64;
  threadgroup_spans_ = *dispatch_->threadgroup_variables;
  uint32_t offset = dispatch_->threadgroup_variables_end;
  for (int i = 0; i < kMaxThreadgroupArguments; ++i) {
    const uint32_t length = dispatch_->threadgroup_lengths[i];
    threadgroup_arguments_[i] = nullptr;
    if (length == 0) continue;
    offset = (offset + kGap + 15) / 16 * 16;
    threadgroup_arguments_[i] = arena_ + offset;
    threadgroup_spans_.emplace_back(offset, length);
    offset += length;
  }
  arena_used_ = offset + kGap;
  for (const auto& [begin, length] : threadgroup_spans_)
    std::memset(arena_ + begin, 0xFF, length);  // NaN in every float type
}

bool Worker::run(const DispatchView& dispatch, Size3 group) {
  Worker* const outer = running_worker;
  running_worker = this;
  dispatch_ = &dispatch;
  group_ = group;
  const auto edge = [](uint32_t grid, uint32_t size, uint32_t index) { return std::min(size, grid - index * size); };
  const Size3 threads{edge(dispatch.threads_in_grid.x, dispatch.threads.x, group.x),
                      edge(dispatch.threads_in_grid.y, dispatch.threads.y, group.y),
                      edge(dispatch.threads_in_grid.z, dispatch.threads.z, group.z)};
  threads_ = threads.x * threads.y * threads.z;
  random_ = (dispatch.seed ^ (uint64_t{group_number()} * 0x9E3779B97F4A7C15u)) | 1;
  for (int i = 0; i < 3; ++i) random();

  prepare_threadgroup_memory();
  invocation_ = Invocation{dispatch.buffers,
                           threadgroup_arguments_,
                           dispatch.buffer_bytes,
                           group,
                           dispatch.threadgroups,
                           dispatch.threads_in_grid,
                           threads,
                           dispatch.threads,
                           dispatch.exact_bytes,
                           0};
  lanes_.assign(threads_, Lane{});
  simdgroups_.resize((threads_ + kSimdWidth - 1) / kSimdWidth);
  ready_simdgroups_ = 0;
  for (size_t i = 0; i < simdgroups_.size(); ++i) {
    Simdgroup& s = simdgroups_[i];
    const uint32_t count = std::min(kSimdWidth, threads_ - static_cast<uint32_t>(i) * kSimdWidth);
    s.all = count == 32 ? 0xFFFFFFFFu : (1u << count) - 1;
    s.ready = s.all;
    s.waiting = s.barrier = s.done = 0;
    s.epoch_threadgroup = s.epoch_device = 0;
    s.rotation = static_cast<uint32_t>(random() % 32);
    ready_simdgroups_ |= 1u << i;
  }
  simdgroup_rotation_ = static_cast<uint32_t>(random() % 32);
  at_barrier_ = done_ = epoch_threadgroup_ = epoch_device_ = 0;
  abandoned_ = false;
  if (dispatch.checker) dispatch.checker->start_group(*this);

  lane_ = first_from(ready_simdgroups_, simdgroup_rotation_) * kSimdWidth;
  const int first = pick();
  running_ = &main_;
  resume(static_cast<uint32_t>(first));

  if (abandoned_) {  // fibers hold half-run lanes: start them afresh
    idle_.clear();
    for (const auto& fiber : fibers_) {
      start_fiber(*fiber);
      idle_.push_back(fiber.get());
    }
  }
  if (dispatch.checker) dispatch.checker->end_group(*this);
  running_worker = outer;
  return !abandoned_;
}

// --- called by kernels -------------------------------------------------------------------------------------------------

void simd_collective(const CollectiveKind& kind, void* value, uint64_t param, const std::source_location& at) {
  running_worker->collective(kind, value, param, at);
}
void threadgroup_barrier(uint32_t fences, const std::source_location& at) { running_worker->barrier(fences, at); }
void simdgroup_barrier(uint32_t fences, const std::source_location& at) { running_worker->simd_barrier(fences, at); }
void thread_fence(uint32_t, bool) {}
uint32_t lane_index() { return running_worker->lane() % kSimdWidth; }
bool points_to_thread(const volatile void* p) { return running_worker->on_stack(const_cast<const void*>(p)); }
bool points_to_threadgroup(const volatile void* p) {
  const auto* at = static_cast<const char*>(const_cast<const void*>(p));
  return static_cast<size_t>(at - running_worker->threadgroup_memory()) < running_worker->threadgroup_bytes();
}

void missing_lane(uint32_t lane, uint64_t source) { running_worker->missing(lane, source); }

void kernel_fault(const char* message, const std::source_location& at) {
  running_worker->fault(Fault::kUndefined, message, place_of(at));
}

void require_bound_bytes(const Invocation& in, int index, size_t bytes) {
  const bool exact = (in.exact_bytes >> index) & 1u;
  if (exact ? in.buffer_bytes[index] == bytes : in.buffer_bytes[index] >= bytes) return;
  if (exact)
    running_worker->fault(Fault::kBadCall,
                          "setBytes passed " + std::to_string(in.buffer_bytes[index]) + " bytes at index " +
                              std::to_string(index) + "; the parameter's type has " + std::to_string(bytes),
                          "");
  running_worker->fault(Fault::kOutOfBounds,
                        "buffer " + std::to_string(index) + " has " + std::to_string(in.buffer_bytes[index]) +
                            " bytes from its offset on; the parameter's type has " + std::to_string(bytes),
                        "");
}

void* bound_buffer(const Invocation& in, int index) { return in.buffers[index]; }
void* bound_threadgroup_memory(const Invocation& in, int index) { return in.threadgroup[index]; }

void* threadgroup_address(const ThreadgroupSite& site) { return running_worker->threadgroup_memory() + site.offset; }

}  // namespace softmetal
