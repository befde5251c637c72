#include "counters.h"

#include <algorithm>

namespace softmetal {
namespace {
constexpr uint64_t kLine = 128;
constexpr size_t kWidestAccess = 16;
}  // namespace

void LineCounter::start_group(uint32_t simdgroups) {
  simdgroups_.resize(simdgroups);  // what was learnt about sites is kept from group to group
}

void LineCounter::end_group() {
  for (uint32_t i = 0; i < simdgroups_.size(); ++i) flush(i);
}

void LineCounter::flush(uint32_t simdgroup) {
  Simdgroup& s = simdgroups_[simdgroup];
  for (auto& [pc, site] : s.sites) {
    for (const Instruction& i : site.instructions) {
      Traffic& t = buffers_[static_cast<size_t>(i.buffer)].traffic;
      (i.write ? t.store_lines : t.load_lines) += i.lines.size();
      ++(i.write ? t.store_instructions : t.load_instructions);
    }
    site.passes.fill(0);
    site.instructions.clear();
  }
  for (LastAccess& last : s.last) {  // the site stays, as a guess where the lane goes next
    last.instruction = nullptr;
    last.pc = nullptr;
  }
}

LineCounter::Site& LineCounter::site_of(Simdgroup& simdgroup, const LastAccess& last, const void* pc) {
  if (last.site && last.site->following && last.site->following->pc == pc) return *last.site->following;
  Site& site = simdgroup.sites[pc];
  site.pc = pc;
  if (last.site) last.site->following = &site;
  return site;
}

void LineCounter::device(uint32_t thread, int buffer, const char* name, const char* address, size_t bytes, bool write,
                         const void* pc) {
  Totals& totals = buffers_[static_cast<size_t>(buffer)];
  totals.name = name;
  (write ? totals.traffic.stored_bytes : totals.traffic.loaded_bytes) += bytes;
  Simdgroup& s = simdgroups_[thread / kSimdWidth];
  LastAccess& last = s.last[thread % kSimdWidth];
  const bool continues = last.instruction && last.end == address && last.write == write && last.pc != pc &&
                         last.bytes + bytes <= kWidestAccess;
  if (continues) {
    last.bytes += bytes;
  } else {
    Site& site = site_of(s, last, pc);
    last.site = &site;
    const uint32_t pass = site.passes[thread % kSimdWidth]++;
    if (site.instructions.size() <= pass) site.instructions.resize(pass + 1);
    Instruction& i = site.instructions[pass];
    i.buffer = buffer;
    i.write = write;
    last.instruction = &i;
    last.bytes = bytes;
    last.write = write;
  }
  last.pc = pc;
  last.end = address + bytes;
  auto& lines = last.instruction->lines;
  auto& distinct = write ? totals.stored_lines : totals.loaded_lines;
  const auto first_line = reinterpret_cast<uint64_t>(address) / kLine;
  const auto last_line = (reinterpret_cast<uint64_t>(address) + bytes - 1) / kLine;
  for (uint64_t line = first_line; line <= last_line; ++line) {
    if (std::find(lines.begin(), lines.end(), line) != lines.end()) continue;
    lines.push_back(line);
    distinct.insert(line);
  }
}

void LineCounter::threadgroup(size_t bytes, bool write) {
  (write ? threadgroup_.stored_bytes : threadgroup_.loaded_bytes) += bytes;
}

void LineCounter::finish(DispatchRecord& record) {
  record.threadgroup_memory = threadgroup_;
  for (int index = 0; index < kMaxBuffers; ++index) {
    Totals& totals = buffers_[static_cast<size_t>(index)];
    if (!totals.name) continue;
    totals.traffic.unique_load_lines = totals.loaded_lines.size();
    totals.traffic.unique_store_lines = totals.stored_lines.size();
    record.buffers.push_back({index, totals.name, totals.traffic});
    Traffic& sum = record.device;
    const Traffic& t = totals.traffic;
    sum.loaded_bytes += t.loaded_bytes;
    sum.stored_bytes += t.stored_bytes;
    sum.load_lines += t.load_lines;
    sum.store_lines += t.store_lines;
    sum.load_instructions += t.load_instructions;
    sum.store_instructions += t.store_instructions;
    sum.unique_load_lines += t.unique_load_lines;
    sum.unique_store_lines += t.unique_store_lines;
  }
}

}  // namespace softmetal
