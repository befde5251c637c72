#include "base/machine.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

namespace calla {
namespace {

#ifdef __APPLE__
std::string system_string(const char* name) {
  char text[256] = "";
  size_t size = sizeof(text) - 1;
  return ::sysctlbyname(name, text, &size, nullptr, 0) == 0 ? text : "unknown";
}

std::string system_and_chip() {
  return "macOS " + system_string("kern.osproductversion") + ", " + system_string("machdep.cpu.brand_string");
}
#else
// What follows `key` and its separator in the first line of `path` that starts with it.
std::string value_in(const char* path, const std::string& key, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    std::string value = line.substr(line.find(separator) + 1);
    std::erase(value, '"');
    const size_t first = value.find_first_not_of(' ');
    return first == std::string::npos ? "" : value.substr(first);
  }
  return "";
}

std::string system_and_chip() {
  utsname system = {};
  ::uname(&system);
  std::string text = std::string(system.sysname) + " " + system.release;
  for (const std::string& part :
       {value_in("/etc/os-release", "PRETTY_NAME", '='), value_in("/proc/cpuinfo", "model name", ':')})
    if (!part.empty()) text += ", " + part;
  return text;
}
#endif

}  // namespace

std::string machine_description() {
  return system_and_chip() + ", " + std::to_string(::sysconf(_SC_NPROCESSORS_ONLN)) + " cores";
}

}  // namespace calla
