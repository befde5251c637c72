#include "checkpoint/machine_memory.h"

#include <unistd.h>

#include <fstream>
#include <string>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

namespace calla {

MachineMemory machine_memory() {
  MachineMemory memory;
#ifdef __APPLE__
  size_t size = sizeof(memory.total);
  if (::sysctlbyname("hw.memsize", &memory.total, &size, nullptr, 0) != 0) return {};
  memory.available = memory.total / 4 * 3;  // what macOS lets one process wire for a GPU, by default
#else
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0) memory.total = static_cast<uint64_t>(pages) * static_cast<uint64_t>(page);
  memory.available = memory.total;
  std::ifstream info("/proc/meminfo");
  for (std::string key, unit; info >> key;) {
    uint64_t kib = 0;
    if (!(info >> kib)) break;
    std::getline(info, unit);
    if (key == "MemAvailable:") memory.available = kib * 1024;
  }
#endif
  return memory;
}

}  // namespace calla
