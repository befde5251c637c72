#pragma once
// How much memory this machine has.
#include <cstdint>

namespace calla {

struct MachineMemory {
  uint64_t total = 0;      // bytes; 0: unknown
  uint64_t available = 0;  // without pushing anything but cached files out
};
MachineMemory machine_memory();

}  // namespace calla
