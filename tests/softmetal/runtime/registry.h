#pragma once
// What softmetal_library compiled into the program: units (translated .metal files) by library name.
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "softmetal/abi.h"

namespace softmetal {

struct KernelRef {
  const Unit* unit = nullptr;
  const KernelInfo* kernel = nullptr;
};

struct ConstantValue {
  ConstantType type = ConstantType::kInt;
  uint64_t bits = 0;
};
// By index; by name where the host set it so.
struct ConstantValues {
  std::map<int, ConstantValue> by_index;
  std::map<std::string, ConstantValue> by_name;
};

// Libraries are sets of files: all of a softmetal_library target, or those whose text a host passed as source.
using Files = std::set<std::string>;
std::set<std::string> library_names();
Files files_of(const std::string& library);
// Files whose text, include lines aside, is part of `source`.
Files files_in(const std::string& source);
bool uses_tensors(const Files& files);
std::vector<std::string> kernel_names(const Files& files);
// The kernel in the plain or the instrumented build of its file.
std::optional<KernelRef> find_kernel(const Files& files, const std::string& name, bool instrumented);
// What the kernel's threadgroup variables take on a device, and where softmetal puts them: apart from each other, so
// that running over the end of one is seen.
struct ThreadgroupLayout {
  uint32_t device_bytes = 0;
  uint32_t end = 0;
  std::vector<std::pair<uint32_t, uint32_t>> spans;  // offset, bytes
};
ThreadgroupLayout threadgroup_layout(const KernelInfo& kernel);

// Writes the values into the unit's variables. An error text if a value that the kernel needs is missing or has
// another type.
std::string check_constants(const KernelRef& ref, const ConstantValues& values);
void apply_constants(const Unit& unit, const ConstantValues& values);

}  // namespace softmetal
