#pragma once
// MemoryChecker: judges every load and store of one dispatch. Bounds, writes to read-only memory, uninitialised reads,
// races between threads; and it counts bytes and lines. One OS thread runs the dispatch, so nothing here locks.
#include <string>
#include <vector>

#include "counters.h"
#include "memory.h"
#include "shadow.h"
#include "softmetal/softmetal.h"
#include "worker.h"

namespace softmetal {

// A Memory as this dispatch may use it: the union of its bindings.
struct Region {
  Memory* memory = nullptr;
  const char* begin = nullptr;  // of the memory
  size_t lowest = 0;            // lowest bound offset
  size_t writable_from = 0;     // lowest offset bound to a writable parameter; the end if there is none
  size_t end = 0;
  int index = 0;  // lowest binding
  const char* name = "";
};

class MemoryChecker {
 public:
  MemoryChecker(uint64_t dispatch_number, const std::string& kernel, bool count);

  void bind(Memory& memory, size_t offset, int index, const ArgumentInfo& argument);
  void allow_reads(const void* begin, const void* end);  // read-only data of the kernels' module

  // Called by the worker.
  void start_group(Worker& worker);
  void end_group(Worker& worker);
  void round_complete(uint32_t simdgroup, bool all_lanes);

  void access(Worker& worker, const void* address, size_t bytes, bool write, const void* pc, bool atomic = false);

  void misaligned(Worker& worker, size_t bytes, bool write, const void* pc);

  // What the device itself reads: indirect dispatch arguments.
  void device_read(Memory& memory, size_t at, size_t bytes);

  size_t findings() const { return findings_; }
  AccessSet take_access_set();
  void finish(DispatchRecord& record);  // fills the counters

 private:
  const Region* region_of(const char* address);
  void device_access(Worker& worker, const Region& region, size_t at, size_t bytes, bool write, const void* pc,
                     bool atomic);
  void threadgroup_access(Worker& worker, size_t at, size_t bytes, bool write, const void* pc, bool atomic);
  void race(Worker& worker, const Cell& old, const Toucher& me, bool write, const void* pc, const std::string& where,
            bool in_group);  // of threadgroup memory
  // Updates a cell; false if the access races with an earlier one.
  static bool touch(Cell& cell, const Toucher& me, bool write);
  void report(Worker& worker, Fault fault, const std::string& message, const void* pc, const std::string& lanes = "");
  [[noreturn]] void out_of_bounds(Worker& worker, const char* address, size_t bytes, bool write, const void* pc);

  const uint64_t dispatch_;
  const std::string kernel_;
  std::vector<Region> regions_;
  std::vector<Memory*> others_;  // read by the device itself
  const Region* last_ = nullptr;
  std::vector<std::pair<const char*, const char*>> readable_;
  size_t findings_ = 0;

  std::vector<Cell> group_cells_;
  enum GroupState : uint8_t { kGap = 0, kFresh = 1, kSet = 2 };
  std::vector<uint8_t> group_states_;

  const bool count_;
  LineCounter counter_;
};

}  // namespace softmetal
