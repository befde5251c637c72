#include "checker.h"

#include <algorithm>

#include "findings.h"
#include "registry.h"

namespace softmetal {
namespace {

std::string hex(const void* p) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", p);
  return text;
}

// `g`: the threadgroup's number; of threadgroup memory, whose cells know none, the one that it belongs to.
std::string who(const Toucher& t, const Size3& grid, uint32_t g) {
  if (t.several() == Toucher::kGroups) return "threads of several threadgroups";
  std::string text = "thread " + std::to_string(t.thread()) + " of threadgroup (" + std::to_string(g % grid.x) + ", " +
                     std::to_string(g / grid.x % grid.y) + ", " + std::to_string(g / (grid.x * grid.y)) + ")";
  if (t.several() != Toucher::kOne)
    text += " and others of its " + std::string(t.several() == Toucher::kSimdgroup ? "simdgroup" : "threadgroup");
  return text;
}

}  // namespace

MemoryChecker::MemoryChecker(uint64_t dispatch_number, const std::string& kernel, bool count)
    : dispatch_(dispatch_number), kernel_(kernel), count_(count) {}

void MemoryChecker::bind(Memory& memory, size_t offset, int index, const ArgumentInfo& argument) {
  if (!memory.shadow) memory.shadow = std::make_unique<Shadow>(memory);
  const auto known =
      std::find_if(regions_.begin(), regions_.end(), [&](const Region& r) { return r.memory == &memory; });
  if (known == regions_.end()) {
    regions_.push_back({&memory, memory.data(), offset, argument.writable ? offset : memory.bytes(), memory.bytes(),
                        index, argument.name});
    return;
  }
  known->lowest = std::min(known->lowest, offset);
  if (argument.writable) known->writable_from = std::min(known->writable_from, offset);
}

void MemoryChecker::allow_reads(const void* begin, const void* end) {
  readable_.emplace_back(static_cast<const char*>(begin), static_cast<const char*>(end));
}

void MemoryChecker::start_group(Worker& worker) {
  if (count_) counter_.start_group(static_cast<uint32_t>((worker.thread_count() + 31) / 32));
  const size_t bytes = worker.threadgroup_bytes();
  group_cells_.assign(bytes, Cell{});
  group_states_.assign(bytes, kGap);
  for (const auto& [offset, length] : worker.threadgroup_spans())
    std::fill_n(group_states_.begin() + static_cast<ptrdiff_t>(offset), length, kFresh);
}

void MemoryChecker::end_group(Worker&) {
  if (count_) counter_.end_group();
}

void MemoryChecker::round_complete(uint32_t simdgroup, bool all_lanes) {
  if (count_ && all_lanes) counter_.flush(simdgroup);
}

const Region* MemoryChecker::region_of(const char* address) {
  // A no-copy buffer of whole pages may cover memory that another buffer names too.
  const auto inside = [address](const Region& r) { return address >= r.begin + r.lowest && address < r.begin + r.end; };
  if (last_ && inside(*last_)) return last_;
  for (const Region& r : regions_)
    if (inside(r)) return last_ = &r;
  return nullptr;
}

void MemoryChecker::access(Worker& worker, const void* address, size_t bytes, bool write, const void* pc, bool atomic) {
  const auto* at = static_cast<const char*>(address);
  const auto in_group = static_cast<size_t>(at - worker.threadgroup_memory());
  if (in_group < worker.threadgroup_bytes()) {
    threadgroup_access(worker, in_group, bytes, write, pc, atomic);
    return;
  }
  if (const Region* region = region_of(at)) {
    device_access(worker, *region, static_cast<size_t>(at - region->begin), bytes, write, pc, atomic);
    return;
  }
  if (!write)
    for (const auto& [begin, end] : readable_)
      if (at >= begin && at + bytes <= end) return;
  out_of_bounds(worker, at, bytes, write, pc);
}

void MemoryChecker::device_access(Worker& worker, const Region& region, size_t at, size_t bytes, bool write,
                                  const void* pc, bool atomic) {
  if (at < region.lowest || at + bytes > region.end) out_of_bounds(worker, region.begin + at, bytes, write, pc);
  const auto where = [&] {
    return "byte " + std::to_string(at - region.lowest) + " of buffer " + std::to_string(region.index) + " (" +
           region.name + ")";
  };
  if (write && at < region.writable_from) {
    report(worker, Fault::kReadOnlyWrite,
           "writes " + std::to_string(bytes) + " bytes to " + where() + ", which is bound as constant or const", pc);
    worker.abandon();
  }
  Shadow& shadow = *region.memory->shadow;
  if (!write) {
    if (shadow.read_is_uninitialised(at, bytes))
      report(worker, Fault::kUninitialised,
             "reads " + std::to_string(bytes) + " bytes at " + where() + "; nothing wrote them", pc);
  }
  if (write) shadow.mark_written(at, bytes);
  shadow.note(at, bytes, write, atomic);
  if (region.writable_from < region.end) {  // memory that nobody can write needs no race check
    const Toucher me = Toucher::make(atomic, worker.group_number(), worker.lane(), worker.epoch_device(),
                                     worker.simdgroup().epoch_device);
    // The bytes of an access mostly have one history: it is judged once.
    const Cell first = shadow.cell(at, dispatch_);
    Cell after = first;
    bool ordered = touch(after, me, write);
    Cell raced = first;
    for (size_t i = at; i < at + bytes; ++i) {
      Cell& cell = shadow.cell(i, dispatch_);
      if (cell == first) {
        cell = after;
        continue;
      }
      const Cell before = cell;
      if (!touch(cell, me, write) && ordered) {
        ordered = false;
        raced = before;
      }
    }
    if (!ordered) race(worker, raced, me, write, pc, where(), false);
  }
  if (count_) counter_.device(worker.lane(), region.index, region.name, region.begin + at, bytes, write, pc);
}

void MemoryChecker::threadgroup_access(Worker& worker, size_t at, size_t bytes, bool write, const void* pc,
                                       bool atomic) {
  const auto where = [&] { return "byte " + std::to_string(at) + " of threadgroup memory"; };
  if (at + bytes > group_states_.size()) out_of_bounds(worker, worker.threadgroup_memory() + at, bytes, write, pc);
  const Toucher me =
      Toucher::make(atomic, 0, worker.lane(), worker.epoch_threadgroup(), worker.simdgroup().epoch_threadgroup);
  const Cell first = group_cells_[at];
  Cell after = first, raced = first;
  bool ordered = touch(after, me, write), fresh = false;
  for (size_t i = at; i < at + bytes; ++i) {
    if (group_states_[i] == kGap) {
      report(worker, Fault::kOutOfBounds,
             std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " + where() +
                 ", which is outside every threadgroup variable",
             pc);
      worker.abandon();
    }
    fresh = fresh || group_states_[i] == kFresh;
    if (write) group_states_[i] = kSet;
    Cell& cell = group_cells_[i];
    if (cell == first) {
      cell = after;
      continue;
    }
    const Cell before = cell;
    if (!touch(cell, me, write) && ordered) {
      ordered = false;
      raced = before;
    }
  }
  if (!ordered) race(worker, raced, me, write, pc, where(), true);
  if (fresh && !write)
    report(worker, Fault::kUninitialised,
           "reads " + std::to_string(bytes) + " bytes at " + where() + "; nothing wrote them", pc);
  if (count_) counter_.threadgroup(bytes, write);
}

bool MemoryChecker::touch(Cell& cell, const Toucher& me, bool write) {
  const auto compatible = [&me](const Toucher& other) { return other.before(me) || (other.atomic() && me.atomic()); };
  bool ordered = compatible(cell.write);
  if (write) {
    ordered = ordered && compatible(cell.read);
    cell.write = cell.write.before(me) ? me : cell.write.merged(me);
    if (ordered && !me.atomic()) cell.read = {};
  } else {
    cell.read = cell.read.before(me) ? me : cell.read.merged(me);
  }
  return ordered;
}

void MemoryChecker::race(Worker& worker, const Cell& old, const Toucher& me, bool write, const void* pc,
                         const std::string& where, bool in_group) {
  const bool with_write = !old.write.before(me) && !(old.write.atomic() && me.atomic());
  const Toucher& other = with_write ? old.write : old.read;
  report(worker, Fault::kRace,
         std::string(write ? "writes " : "reads ") + where + ", which " +
             who(other, worker.dispatch().threadgroups, in_group ? worker.group_number() : other.group()) +
             (with_write ? " wrote" : " read") + " with no barrier between",
         pc);
}

void MemoryChecker::report(Worker& worker, Fault fault, const std::string& message, const void* pc,
                           const std::string& lanes) {
  ++findings_;
  report_finding(
      {fault, kernel_, worker.group(), lanes.empty() ? std::to_string(worker.lane()) : lanes, place_of(pc), message});
}

void MemoryChecker::misaligned(Worker& worker, size_t bytes, bool write, const void* pc) {
  report(worker, Fault::kMisaligned,
         std::string(write ? "writes " : "reads ") + std::to_string(bytes) +
             " bytes at an address that is not a multiple of their size",
         pc);
}

void MemoryChecker::out_of_bounds(Worker& worker, const char* address, size_t bytes, bool write, const void* pc) {
  std::string nearest = "no buffer is near";
  ptrdiff_t best = ptrdiff_t{1} << 30;
  for (const Region& r : regions_) {
    const ptrdiff_t past = address - (r.begin + r.end), before = r.begin + r.lowest - address;
    if (past > -static_cast<ptrdiff_t>(bytes) && past < best) {
      best = past;
      nearest = std::to_string(past + static_cast<ptrdiff_t>(bytes)) + " bytes past the end of buffer " +
                std::to_string(r.index) + " (" + r.name + ", " + std::to_string(r.end - r.lowest) +
                " bytes from its offset)";
    }
    if (before > 0 && before < best) {
      best = before;
      nearest = std::to_string(before) + " bytes before buffer " + std::to_string(r.index) + " (" + r.name + ")";
    }
  }
  report(
      worker, Fault::kOutOfBounds,
      std::string(write ? "writes " : "reads ") + std::to_string(bytes) + " bytes at " + hex(address) + ": " + nearest,
      pc);
  worker.abandon();
}

void MemoryChecker::device_read(Memory& memory, size_t at, size_t bytes) {
  if (!memory.shadow) memory.shadow = std::make_unique<Shadow>(memory);
  if (memory.shadow->read_is_uninitialised(at, bytes)) {
    ++findings_;
    report_finding({Fault::kUninitialised, kernel_, {}, "", "", "the indirect dispatch arguments were never written"});
  }
  memory.shadow->note(at, bytes, false, false);
  if (std::none_of(regions_.begin(), regions_.end(), [&](const Region& r) { return r.memory == &memory; }))
    others_.push_back(&memory);
}

AccessSet MemoryChecker::take_access_set() {
  AccessSet set;
  for (const Region& r : regions_) r.memory->shadow->take_sets(set);
  for (Memory* m : others_) m->shadow->take_sets(set);
  return set;
}

void MemoryChecker::finish(DispatchRecord& record) {
  if (!count_) return;
  counter_.finish(record);
}

void atomic_access(const void* address, uint32_t bytes, AtomicKind kind, const void* pc) {
  Worker* worker = Worker::current();
  if (!worker || worker->on_stack(address)) return;
  MemoryChecker* checker = worker->dispatch().checker;
  if (!checker) return;
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    worker->fault(Fault::kMisaligned, "an atomic at an address that is not a multiple of its size", place_of(pc));
  if (kind != AtomicKind::kStore) checker->access(*worker, address, bytes, false, pc, true);
  if (kind != AtomicKind::kLoad) checker->access(*worker, address, bytes, true, pc, true);
}

}  // namespace softmetal
