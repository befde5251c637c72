#pragma once
// Makes a backend by name. Which ones this build has is a link choice: a missing one is a stub that says so.
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace calla {

struct BackendInfo {
  std::string name;             // "cpu"
  std::string what;             // one line for --help
  bool available = false;       // built in, and the device is there
  std::string reason;           // why not, and what to do
  bool fills_outlines = false;  // takes weights without memory (weights_outline.h) and makes random ones on the device
  bool software = false;        // stands in for a device that is not there: only for tests, and `auto` never takes it
  bool built = true;            // false: a stub stands in for it (backend/stub)
  std::vector<std::string> ablations;  // what `--ablate` can switch off
  int prefill_rows = 512;  // of a prompt in a step: enough for speed, few enough for others to have their turn
};

// All backends that Calla knows, in order of preference for `auto`.
std::vector<BackendInfo> list_backends();

// True for the name of a backend whose device is software here (BackendInfo::software).
bool is_software_device(const std::string& backend_name);

// The backend that `name` means here: one of list_backends(), or "auto" for the first available one that is no software
// device. Never falls back silently: a name that is unknown or not built in throws UsageError, one whose device is not
// there DeviceError, with the reason.
BackendInfo choose_backend(const std::string& name);

// Why `auto` goes past a backend of this build, "cuda: no NVIDIA driver is found ..."; "" if it does not.
std::string passed_over_by_auto();

// Makes the backend that choose_backend(name) finds. Throws as that does, or DeviceError. `weights` and the checkpoint behind it must outlive the backend.
std::unique_ptr<Backend> create_backend(const std::string& name, const ModelShape& shape, const ModelWeights& weights,
                                        const BackendOptions& options);

// One factory per backend, defined in its folder (or in backend/stub).
BackendInfo reference_backend_info();
BackendInfo cpu_backend_info();
BackendInfo metal_backend_info();
BackendInfo cuda_backend_info();
std::unique_ptr<Backend> create_reference_backend(const ModelShape&, const ModelWeights&, const BackendOptions&);
std::unique_ptr<Backend> create_cpu_backend(const ModelShape&, const ModelWeights&, const BackendOptions&);
std::unique_ptr<Backend> create_metal_backend(const ModelShape&, const ModelWeights&, const BackendOptions&);
std::unique_ptr<Backend> create_cuda_backend(const ModelShape&, const ModelWeights&, const BackendOptions&);

}  // namespace calla
