#include "cli/machine.h"

#include <sys/utsname.h>

#include <array>
#include <fstream>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include "base/thread_pool.h"

namespace calla {
namespace {

std::string processor() {
#ifdef __APPLE__
  std::array<char, 128> name{};
  size_t size = name.size() - 1;
  if (::sysctlbyname("machdep.cpu.brand_string", name.data(), &size, nullptr, 0) == 0) return name.data();
#else
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name") && line.find(": ") != std::string::npos) return line.substr(line.find(": ") + 2);
#endif
  return "processor unknown";
}

}  // namespace

std::string describe_machine() {
  utsname system = {};
  ::uname(&system);
  const int cores = available_cores();
  return processor() + ", " + std::to_string(cores) + (cores == 1 ? " core, " : " cores, ") + system.sysname + " " +
         system.release + " " + system.machine;
}

}  // namespace calla
