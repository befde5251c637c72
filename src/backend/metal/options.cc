#include "backend/metal/options.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace calla::metal {
namespace {

constexpr std::array<std::pair<const char*, bool Ablations::*>, 12> kNames = {{
    {"fused-dequant", &Ablations::fused_dequant},
    {"gpu-routing", &Ablations::gpu_routing},
    {"wide-tiles", &Ablations::wide_tiles},
    {"register-scan", &Ablations::register_scan},
    {"tensor-ops", &Ablations::tensor_ops},
    {"row-parallel", &Ablations::row_parallel},
    {"gpu-handover", &Ablations::gpu_handover},
    {"concurrent", &Ablations::concurrent},
    {"fused-chains", &Ablations::fused_chains},
    {"coalesced-kv", &Ablations::coalesced_kv},
    {"gqa-packing", &Ablations::gqa_packing},
    {"split-kv", &Ablations::split_kv},
}};

}  // namespace

Ablations parse_ablations(const std::vector<std::string>& names) {
  Ablations ablations;
  for (const std::string& name : names) {
    const auto found =
        std::find_if(kNames.begin(), kNames.end(), [&](const auto& entry) { return name == entry.first; });
    if (found == kNames.end()) {
      std::string known;
      for (const auto& entry : kNames) known += (known.empty() ? "" : ", ") + std::string(entry.first);
      throw UsageError("--ablate " + name + ": the metal backend has no such mechanism; it has " + known);
    }
    ablations.*(found->second) = true;
  }
  return ablations;
}

std::vector<std::string> ablation_names() {
  std::vector<std::string> names;
  for (const auto& entry : kNames) names.emplace_back(entry.first);
  return names;
}

}  // namespace calla::metal
