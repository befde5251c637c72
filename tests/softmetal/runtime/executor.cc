#include "executor.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>

#include "checker.h"
#include "findings.h"
#include "records.h"

namespace softmetal {
namespace {

uint64_t volume(const Size3& s) { return uint64_t{s.x} * s.y * s.z; }

Shadow& shadow_of(Memory& memory) {
  if (!memory.shadow) memory.shadow = std::make_unique<Shadow>(memory);
  return *memory.shadow;
}

// The loaded segments of the module that `address` lies in: kernels may read their own constants.
void allow_module_reads(MemoryChecker& checker, const void* address) {
  struct Search {
    MemoryChecker& checker;
    uintptr_t address;
  } search{checker, reinterpret_cast<uintptr_t>(address)};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& s = *static_cast<Search*>(data);
        const auto inside = [&](const ElfW(Phdr) & p) {
          return p.p_type == PT_LOAD && s.address - (info->dlpi_addr + p.p_vaddr) < p.p_memsz;
        };
        if (!std::any_of(info->dlpi_phdr, info->dlpi_phdr + info->dlpi_phnum, inside)) return 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& p = info->dlpi_phdr[i];
          if (p.p_type != PT_LOAD) continue;
          const char* begin = reinterpret_cast<const char*>(info->dlpi_addr + p.p_vaddr);
          s.checker.allow_reads(begin, begin + p.p_memsz);
        }
        return 1;
      },
      &search);
}

// Order of commands: between barriers, shuffled (concurrent encoders only).
std::vector<size_t> execution_order(const EncoderRecord& encoder, bool shuffle, uint64_t seed) {
  std::vector<size_t> order(encoder.commands.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (!shuffle || !encoder.concurrent) return order;
  std::mt19937_64 random(seed);
  auto begin = order.begin();
  for (auto it = order.begin(); it != order.end(); ++it) {
    if (!std::holds_alternative<Barrier>(encoder.commands[*it])) continue;
    std::shuffle(begin, it, random);
    begin = it + 1;
  }
  std::shuffle(begin, order.end(), random);
  return order;
}

// Options::strict_bindings: what differs between the buffers bound anew and those that the kernel takes; "" if nothing.
std::string binding_mismatch(const KernelInfo& kernel, uint32_t bound_anew) {
  uint32_t taken = 0;
  for (int i = 0; i < kernel.argument_count; ++i) {
    const ArgumentInfo& a = kernel.arguments[i];
    if (a.kind != ArgumentKind::kBuffer || (a.enabled && !*a.enabled)) continue;
    taken |= 1u << a.index;
    if (!((bound_anew >> a.index) & 1u))
      return std::string("parameter ") + a.name + " at buffer(" + std::to_string(a.index) +
             ") was not bound for this dispatch";
  }
  if (const uint32_t extra = bound_anew & ~taken)
    return "buffer index " + std::to_string(std::countr_zero(extra)) +
           " was bound, and the kernel has no parameter there";
  return "";
}

}  // namespace

Executor& Executor::instance() {
  static Executor& executor = *new Executor;  // its threads end with the process
  return executor;
}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& t : helpers_) t.join();
}

void Executor::command_buffer_committed(uint64_t command_buffer) { hazards_.command_buffer_committed(command_buffer); }

void Executor::command_buffer_ended(uint64_t command_buffer) { hazards_.command_buffer_ended(command_buffer); }

std::string Executor::run(const EncoderRecord& encoder, uint64_t id, uint64_t command_buffer,
                          const std::vector<uint64_t>& ordered_before) {
  std::lock_guard lock(device_);
  const Options o = options();
  if (o.check) hazards_.begin_encoder(encoder, id, command_buffer, ordered_before);
  std::string error;
  for (const size_t i : execution_order(encoder, o.shuffle, next_seed())) {
    error = run_command(encoder, i, command_buffer, o.check);
    if (!error.empty()) break;
  }
  if (o.check) hazards_.end_encoder();
  return error;
}

std::string Executor::run_command(const EncoderRecord& encoder, size_t index, uint64_t command_buffer, bool check) {
  const auto& command = encoder.commands[index];
  if (const auto* dispatch = std::get_if<Dispatch>(&command)) return run_dispatch(*dispatch, command_buffer);
  if (const auto* copy = std::get_if<Copy>(&command)) return run_copy(*copy, check);
  if (const auto* fill = std::get_if<Fill>(&command)) return run_fill(*fill, check);
  if (check) hazards_.barrier(std::get<Barrier>(command));
  return "";
}

std::string Executor::run_copy(const Copy& copy, bool check) {
  Memory& from = *copy.from.memory;
  Memory& to = *copy.to.memory;
  std::string error;
  if (check) {
    AccessSet set;
    Shadow& source = shadow_of(from);
    Shadow& target = shadow_of(to);
    source.note(copy.from.offset, copy.bytes, false, false);
    target.note(copy.to.offset, copy.bytes, true, false);
    for (size_t i = 0; i < copy.bytes; ++i)  // what was not written is not written in the copy either
      if (!source.read_is_uninitialised(copy.from.offset + i, 1)) target.mark_written(copy.to.offset + i, 1);
    source.take_sets(set);
    if (&from != &to) target.take_sets(set);
    error = hazards_.add("copyFromBuffer", std::move(set), {{from.id, &from}, {to.id, &to}});
  }
  std::memmove(to.data() + copy.to.offset, from.data() + copy.from.offset, copy.bytes);
  return error;
}

std::string Executor::run_fill(const Fill& fill, bool check) {
  Memory& to = *fill.to.memory;
  std::string error;
  if (check) {
    AccessSet set;
    Shadow& target = shadow_of(to);
    target.note(fill.to.offset, fill.bytes, true, false);
    target.mark_written(fill.to.offset, fill.bytes);
    target.take_sets(set);
    error = hazards_.add("fillBuffer", std::move(set), {{to.id, &to}});
  }
  std::memset(to.data() + fill.to.offset, fill.value, fill.bytes);
  return error;
}

std::string Executor::run_dispatch(const Dispatch& d, uint64_t command_buffer) {
  const Options o = options();
  const PipelineInfo& pipeline = *d.pipeline;
  const auto& ref = o.check ? pipeline.instrumented : pipeline.plain;
  if (!ref)
    return "kernel " + pipeline.kernel + " was not compiled " + (o.check ? "with" : "without") + " instrumentation";
  apply_constants(*ref->unit, pipeline.constants);

  void* buffers[kMaxBuffers] = {};
  size_t bytes[kMaxBuffers] = {};
  for (int i = 0; i < kMaxBuffers; ++i) {
    const Binding& b = d.buffers[static_cast<size_t>(i)];
    if (!b.memory) continue;
    buffers[i] = b.memory->data() + b.offset;
    bytes[i] = b.memory->bytes() - b.offset;
  }
  const KernelInfo& kernel = *ref->kernel;
  for (int i = 0; i < kernel.argument_count; ++i) {
    const ArgumentInfo& a = kernel.arguments[i];
    if (a.enabled && !*a.enabled) continue;
    const bool bound = a.kind == ArgumentKind::kBuffer ? buffers[a.index] != nullptr
                                                       : d.threadgroup_lengths[static_cast<size_t>(a.index)] != 0;
    if (!bound)
      return "kernel " + pipeline.kernel + ": nothing is bound at " +
             (a.kind == ArgumentKind::kBuffer ? "buffer(" : "threadgroup(") + std::to_string(a.index) +
             "), parameter " + a.name;
  }

  if (o.strict_bindings) {
    const std::string mismatch = binding_mismatch(kernel, d.bound_anew);
    if (!mismatch.empty()) {
      report_finding({Fault::kBadCall, pipeline.kernel, {}, "", "", "kernel " + pipeline.kernel + ": " + mismatch});
      return "kernel " + pipeline.kernel + ": " + mismatch;
    }
  }

  DispatchView view;
  view.kernel = &kernel;
  view.exact_bytes = o.strict_bindings ? d.from_bytes : 0;
  view.buffers = buffers;
  view.buffer_bytes = bytes;
  view.threadgroup_lengths = d.threadgroup_lengths.data();
  const ThreadgroupLayout layout = threadgroup_layout(kernel);
  view.threadgroup_variables = &layout.spans;
  view.threadgroup_variables_end = layout.end;
  view.threadgroups = d.threadgroups;
  view.threads = d.threads;
  view.threads_in_grid = d.threads_in_grid;
  if (d.indirect.memory) {
    uint32_t groups[3];
    std::memcpy(groups, d.indirect.memory->data() + d.indirect.offset, sizeof groups);
    view.threadgroups = {groups[0], groups[1], groups[2]};
    view.threads_in_grid = {groups[0] * d.threads.x, groups[1] * d.threads.y, groups[2] * d.threads.z};
  }
  view.seed = next_seed();
  view.deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                         std::chrono::duration<double>(o.dispatch_timeout_seconds));
  view.preempt = o.check && o.shuffle;

  std::optional<MemoryChecker> checker;
  std::map<uint64_t, const Memory*> memories;
  if (o.check) {
    checker.emplace(++dispatches_, pipeline.kernel, o.count);
    for (int i = 0; i < kernel.argument_count; ++i) {
      const ArgumentInfo& a = kernel.arguments[i];
      if (a.kind != ArgumentKind::kBuffer || (a.enabled && !*a.enabled)) continue;
      const Binding& b = d.buffers[static_cast<size_t>(a.index)];
      checker->bind(*b.memory, b.offset, a.index, a);
      memories[b.memory->id] = b.memory.get();
    }
    allow_module_reads(*checker, ref->unit->module_address);
    if (d.indirect.memory) {
      checker->device_read(*d.indirect.memory, d.indirect.offset, 12);
      memories[d.indirect.memory->id] = d.indirect.memory.get();
    }
    view.checker = &*checker;
  }

  const auto start = std::chrono::steady_clock::now();
  const bool ok = volume(view.threadgroups) == 0 || run_groups(view, o.check ? 1 : o.threads);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (recording()) {
    DispatchRecord record;
    record.kernel = pipeline.kernel;
    record.threadgroups = view.threadgroups;
    record.threads = view.threads;
    record.max_threads = pipeline.max_threads;
    record.command_buffer = command_buffer;
    record.phase = d.phase;
    record.seconds = took.count();
    if (checker) checker->finish(record);
    add_record(std::move(record));
  }
  std::string error;
  if (checker) error = hazards_.add(pipeline.kernel, checker->take_access_set(), memories);
  if (!ok) return "kernel " + pipeline.kernel + " was abandoned: " + last_finding();
  if (checker && checker->findings() > 0) return "kernel " + pipeline.kernel + ": " + last_finding();
  return error;
}

bool Executor::run_groups(const DispatchView& view, int threads) {
  Job job;
  job.view = &view;
  job.groups = volume(view.threadgroups);
  if (options().shuffle && job.groups > 1) {  // a stride prime to the count visits every group once
    job.stride = view.seed % std::min(job.groups, uint64_t{1} << 31) | 1;  // the product below stays in 64 bits
    while (std::gcd(job.stride, job.groups) != 1) ++job.stride;
    job.offset = (view.seed >> 32) % job.groups;
  }
  const size_t limit = threads > 0 ? static_cast<size_t>(threads) : std::max(1u, std::thread::hardware_concurrency());
  const size_t wanted = std::min<uint64_t>(limit, job.groups);
  while (workers_.size() < limit) workers_.push_back(std::make_unique<Worker>());
  while (helpers_.size() + 1 < limit) {
    const size_t index = helpers_.size() + 1;
    helpers_.emplace_back([this, index] { helper(index); });
  }
  if (wanted > 1) {
    std::lock_guard lock(mutex_);
    job_ = &job;
    ++generation_;
    running_ = helpers_.size();
  }
  if (wanted > 1) wake_.notify_all();
  work(*workers_[0], job);
  if (wanted > 1) {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
  }
  return job.ok;
}

void Executor::work(Worker& worker, Job& job) {
  const Size3 grid = job.view->threadgroups;
  while (job.ok) {
    const uint64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= job.groups) return;
    const uint64_t n = (i * job.stride + job.offset) % job.groups;
    const Size3 group{static_cast<uint32_t>(n % grid.x), static_cast<uint32_t>(n / grid.x % grid.y),
                      static_cast<uint32_t>(n / (uint64_t{grid.x} * grid.y))};
    if (!worker.run(*job.view, group)) job.ok = false;
  }
}

void Executor::helper(size_t index) {
  uint64_t seen = 0;
  while (true) {
    Job* job = nullptr;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      job = job_;
    }
    if (job) work(*workers_[index], *job);
    {
      std::lock_guard lock(mutex_);
      --running_;
    }
    idle_.notify_one();
  }
}

}  // namespace softmetal
