#include "records.h"

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>

namespace softmetal {
namespace {
std::atomic<bool> on{false};
std::mutex mutex;
std::vector<DispatchRecord>& records() {
  static auto& list = *new std::vector<DispatchRecord>;
  return list;
}

void add(Traffic& sum, const Traffic& t) {
  sum.loaded_bytes += t.loaded_bytes;
  sum.stored_bytes += t.stored_bytes;
  sum.load_lines += t.load_lines;
  sum.store_lines += t.store_lines;
  sum.load_instructions += t.load_instructions;
  sum.store_instructions += t.store_instructions;
  sum.unique_load_lines += t.unique_load_lines;
  sum.unique_store_lines += t.unique_store_lines;
}
}  // namespace

bool recording() { return on; }
void record_dispatches(bool record) { on = record; }

void add_record(DispatchRecord record) {
  std::lock_guard lock(mutex);
  records().push_back(std::move(record));
}

std::vector<DispatchRecord> take_dispatches() {
  std::lock_guard lock(mutex);
  return std::exchange(records(), {});
}

std::string report(const std::vector<DispatchRecord>& dispatches) {
  struct Row {
    uint64_t count = 0;
    double seconds = 0;
    Traffic device, threadgroup;
    uint64_t barriers = 0, collectives = 0;
  };
  std::map<std::string, Row> rows;
  for (const DispatchRecord& d : dispatches) {
    for (const std::string& name : {d.kernel, std::string("~ total")}) {
      Row& row = rows[name];
      ++row.count;
      row.seconds += d.seconds;
      add(row.device, d.device);
      add(row.threadgroup, d.threadgroup_memory);
      row.barriers += d.barriers;
      row.collectives += d.collectives;
    }
  }
  std::string text =
      "kernel                                    dispatches   loaded bytes   stored bytes    load lines   store lines"
      "  distinct lines  lines/load  threadgroup bytes   barriers  collectives\n";
  for (const auto& [name, row] : rows) {
    char line[400];
    const Traffic& t = row.device;
    std::snprintf(
        line, sizeof line, "%-42s %9llu %14llu %14llu %13llu %13llu %15llu %11.2f %18llu %10llu %12llu\n", name.c_str(),
        static_cast<unsigned long long>(row.count), static_cast<unsigned long long>(t.loaded_bytes),
        static_cast<unsigned long long>(t.stored_bytes), static_cast<unsigned long long>(t.load_lines),
        static_cast<unsigned long long>(t.store_lines),
        static_cast<unsigned long long>(t.unique_load_lines + t.unique_store_lines),
        t.load_instructions ? static_cast<double>(t.load_lines) / static_cast<double>(t.load_instructions) : 0.0,
        static_cast<unsigned long long>(row.threadgroup.loaded_bytes + row.threadgroup.stored_bytes),
        static_cast<unsigned long long>(row.barriers), static_cast<unsigned long long>(row.collectives));
    text += line;
  }
  return text;
}

}  // namespace softmetal
