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
  std::deque<Unit> units;                                // addresses stay
  std::map<const void*, ThreadgroupLayout> threadgroup;  // by kernel function
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

ThreadgroupSite::ThreadgroupSite(const void* kernel_function, uint32_t bytes, uint32_t align) {
  constexpr uint32_t kGap = 64;
  std::lock_guard lock(registry().mutex);
  ThreadgroupLayout& layout = registry().threadgroup[kernel_function];
  const uint32_t boundary = std::max(align, 16u);
  offset = (layout.end + kGap + boundary - 1) / boundary * boundary;
  layout.end = offset + bytes;
  layout.device_bytes += (bytes + 15) / 16 * 16;
  layout.spans.emplace_back(offset, bytes);
}

ThreadgroupLayout threadgroup_layout(const KernelInfo& kernel) {
  std::lock_guard lock(registry().mutex);
  const auto it = registry().threadgroup.find(kernel.function);
  return it == registry().threadgroup.end() ? ThreadgroupLayout{} : it->second;
}

std::set<std::string> library_names() {
  std::lock_guard lock(registry().mutex);
  std::set<std::string> names;
  for (const Unit& unit : registry().units) names.insert(unit.library);
  return names;
}

Files files_of(const std::string& library) {
  std::lock_guard lock(registry().mutex);
  Files files;
  for (const Unit& unit : registry().units)
    if (unit.library == library) files.insert(unit.file);
  return files;
}

std::vector<std::string> kernel_names(const Files& files) {
  std::lock_guard lock(registry().mutex);
  std::set<std::string> names;
  for (const Unit& unit : registry().units)
    if (files.contains(unit.file))
      for (int i = 0; i < unit.kernel_count; ++i) names.insert(unit.kernels[i].name);
  return {names.begin(), names.end()};
}

std::optional<KernelRef> find_kernel(const Files& files, const std::string& name, bool instrumented) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  for (const Unit& unit : r.units) {
    if (unit.instrumented != instrumented || !files.contains(unit.file)) continue;
    for (int i = 0; i < unit.kernel_count; ++i)
      if (unit.kernels[i].name == name) return KernelRef{&unit, &unit.kernels[i]};
  }
  return std::nullopt;
}

namespace {

// Are the pieces of `text` between its include lines in `source`, in order? Hosts put their headers in those places.
bool contains_pieces(std::string_view source, std::string_view text) {
  size_t at = 0, line = 0, piece = 0;
  const auto found = [&](std::string_view part) {
    while (!part.empty() && part.back() == '\n') part.remove_suffix(1);
    if (part.empty()) return true;
    const size_t where = source.find(part, at);
    if (where == std::string_view::npos) return false;
    at = where + part.size();
    return true;
  };
  while (line < text.size()) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const std::string_view content = text.substr(line, end - line);
    if (content.starts_with("#include") || content.starts_with("#pragma once")) {
      if (!found(text.substr(piece, line - piece))) return false;
      piece = std::min(end + 1, text.size());
    }
    line = end + 1;
  }
  return found(text.substr(piece));
}

}  // namespace

Files files_in(const std::string& source) {
  std::lock_guard lock(registry().mutex);
  Files files;
  for (const Unit& unit : registry().units)
    if (!files.contains(unit.file) && contains_pieces(source, unit.source)) files.insert(unit.file);
  return files;
}

bool uses_tensors(const Files& files) {
  std::lock_guard lock(registry().mutex);
  return std::any_of(registry().units.begin(), registry().units.end(), [&](const Unit& unit) {
    const std::string_view text = unit.source;
    return files.contains(unit.file) && (text.find("<metal_tensor>") != std::string_view::npos ||
                                         text.find("<MetalPerformancePrimitives/") != std::string_view::npos);
  });
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
