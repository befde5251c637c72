#include "registry.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string_view>

namespace softmetal {
namespace {

struct Registry {
  std::mutex mutex;
  std::deque<Unit> units;                             // addresses stay
  std::map<const void*, uint32_t> threadgroup_bytes;  // by kernel function
};

Registry& registry() {
  static Registry& r = *new Registry;  // filled by static initialisers, read until the process ends
  return r;
}

size_t constant_bytes(ConstantType type) {
  switch (type) {
    case ConstantType::kBool:
    case ConstantType::kChar:
    case ConstantType::kUChar:
      return 1;
    case ConstantType::kShort:
    case ConstantType::kUShort:
    case ConstantType::kHalf:
      return 2;
    case ConstantType::kInt:
    case ConstantType::kUInt:
    case ConstantType::kFloat:
      return 4;
    case ConstantType::kLong:
    case ConstantType::kULong:
      return 8;
  }
  return 0;
}

const ConstantValue* value_of(const FunctionConstant& constant, const ConstantValues& values) {
  if (const auto it = values.by_index.find(constant.index); it != values.by_index.end()) return &it->second;
  if (const auto it = values.by_name.find(constant.name); it != values.by_name.end()) return &it->second;
  return nullptr;
}

}  // namespace

RegisterUnit::RegisterUnit(const Unit& unit) {
  std::lock_guard lock(registry().mutex);
  registry().units.push_back(unit);
}

ThreadgroupSite::ThreadgroupSite(const void* kernel_function, uint32_t bytes, uint32_t align, const char*) {
  std::lock_guard lock(registry().mutex);
  uint32_t& used = registry().threadgroup_bytes[kernel_function];
  const uint32_t boundary = std::max(align, 16u);
  offset = (used + boundary - 1) / boundary * boundary;
  used = offset + bytes;
}

uint32_t static_threadgroup_bytes(const KernelInfo& kernel) {
  std::lock_guard lock(registry().mutex);
  const auto it = registry().threadgroup_bytes.find(kernel.function);
  return it == registry().threadgroup_bytes.end() ? 0 : (it->second + 15) / 16 * 16;
}

std::set<std::string> library_names() {
  std::lock_guard lock(registry().mutex);
  std::set<std::string> names;
  for (const Unit& unit : registry().units) names.insert(unit.library);
  return names;
}

std::vector<std::string> kernel_names(const std::string& library) {
  std::lock_guard lock(registry().mutex);
  std::set<std::string> names;
  for (const Unit& unit : registry().units)
    if (unit.library == library)
      for (int i = 0; i < unit.kernel_count; ++i) names.insert(unit.kernels[i].name);
  return {names.begin(), names.end()};
}

std::optional<KernelRef> find_kernel(const std::string& library, const std::string& name, bool instrumented) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  for (const Unit& unit : r.units) {
    if (unit.library != library || unit.instrumented != instrumented) continue;
    for (int i = 0; i < unit.kernel_count; ++i)
      if (unit.kernels[i].name == name) return KernelRef{&unit, &unit.kernels[i]};
  }
  return std::nullopt;
}

std::vector<std::string> files_missing_in(const std::string& library, const std::string& source) {
  std::lock_guard lock(registry().mutex);
  std::set<std::string> missing;
  for (const Unit& unit : registry().units) {
    if (unit.library != library) continue;
    // Pieces between include lines, in order: a host that inlines headers keeps the rest as it is.
    const std::string_view text = unit.source;
    size_t at = 0, line = 0, piece = 0;
    bool found = true;
    const auto look_for = [&](std::string_view part) {
      while (!part.empty() && part.back() == '\n') part.remove_suffix(1);
      if (part.empty()) return;
      const size_t where = source.find(part, at);
      if (where == std::string::npos) {
        found = false;
      } else {
        at = where + part.size();
      }
    };
    while (found && line < text.size()) {
      const size_t end = std::min(text.find('\n', line), text.size());
      const std::string_view content = text.substr(line, end - line);
      if (content.find("#include") != std::string_view::npos ||
          content.find("#pragma once") != std::string_view::npos) {
        look_for(text.substr(piece, line - piece));
        piece = std::min(end + 1, text.size());
      }
      line = end + 1;
    }
    if (found) look_for(text.substr(piece));
    if (!found) missing.insert(unit.file);
  }
  return {missing.begin(), missing.end()};
}

std::string check_constants(const KernelRef& ref, const ConstantValues& values) {
  for (int i = 0; i < ref.unit->constant_count; ++i) {
    const FunctionConstant& constant = ref.unit->constants[i];
    const ConstantValue* value = value_of(constant, values);
    const std::string what = "kernel " + std::string(ref.kernel->name) + ": function constant " + constant.name +
                             " (index " + std::to_string(constant.index) + ")";
    if (value) {
      if (value->type != constant.type) return what + " was set with another type than the source declares";
      continue;
    }
    for (int k = 0; k < ref.kernel->constant_count; ++k)
      if (std::string_view(ref.kernel->constants[k]) == constant.name) return what + " has no value";
  }
  return "";
}

void apply_constants(const Unit& unit, const ConstantValues& values) {
  for (int i = 0; i < unit.constant_count; ++i) {
    const FunctionConstant& constant = unit.constants[i];
    const ConstantValue* value = value_of(constant, values);
    const uint64_t bits = value ? value->bits : 0;
    std::memcpy(constant.value, &bits, constant_bytes(constant.type));
    *constant.defined = value != nullptr;
  }
  unit.derive_constants();
}

}  // namespace softmetal
