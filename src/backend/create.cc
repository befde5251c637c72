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

std::unique_ptr<Backend> create_backend(const std::string& name, const ModelShape& shape, const ModelWeights& weights,
                                        const BackendOptions& options) {
  std::string known;
  for (const BackendInfo& info : list_backends()) {
    known += (known.empty() ? "" : ", ") + info.name;
    if (name == "auto" ? info.software : name != info.name) continue;
    if (!info.available) {
      if (name == "auto") continue;
      throw UsageError("backend '" + name + "' is not available: " + info.reason);
    }
    if (info.name == "cuda") return create_cuda_backend(shape, weights, options);
    if (info.name == "metal") return create_metal_backend(shape, weights, options);
    if (info.name == "cpu") return create_cpu_backend(shape, weights, options);
    return create_reference_backend(shape, weights, options);
  }
  throw UsageError("unknown backend '" + name + "'; known: auto, " + known);
}

}  // namespace calla
