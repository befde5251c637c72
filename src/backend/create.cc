#include "backend/create.h"

#include <algorithm>

#include "base/error.h"

namespace calla {

std::vector<BackendInfo> list_backends() {
  return {cuda_backend_info(), metal_backend_info(), cpu_backend_info(), reference_backend_info()};
}

bool is_software_device(const std::string& backend_name) {
  const auto all = list_backends();
  return std::any_of(all.begin(), all.end(),
                     [&](const BackendInfo& info) { return info.name == backend_name && info.software; });
}

BackendInfo choose_backend(const std::string& name) {
  std::string known;
  for (const BackendInfo& info : list_backends()) {
    known += (known.empty() ? "" : ", ") + info.name;
    if (name == "auto" ? info.software : name != info.name) continue;
    if (info.available) return info;
    if (name == "auto") continue;
    const std::string message = "backend '" + name + "' is not available: " + info.reason;
    if (info.built) throw DeviceError(message);
    throw UsageError(message);
  }
  throw UsageError("unknown backend '" + name + "'; known: auto, " + known);
}

std::string passed_over_by_auto() {
  for (const BackendInfo& info : list_backends()) {
    if (info.available && !info.software) return "";
    if (info.built && !info.available) return info.name + ": " + info.reason;
  }
  return "";
}

std::unique_ptr<Backend> create_backend(const std::string& name, const ModelShape& shape, const ModelWeights& weights,
                                        const BackendOptions& options) {
  const std::string chosen = choose_backend(name).name;
  if (options.full_precision && chosen != "cpu" && chosen != "reference")
    throw UsageError("--full-precision: the " + chosen + " backend has one precision; use --backend cpu or reference");
  if (chosen == "cuda") return create_cuda_backend(shape, weights, options);
  if (chosen == "metal") return create_metal_backend(shape, weights, options);
  if (chosen == "cpu") return create_cpu_backend(shape, weights, options);
  return create_reference_backend(shape, weights, options);
}

}  // namespace calla
