#pragma once
// The report behind `calla inspect`: what a checkpoint is, where its bytes go, and whether it fits into this machine.
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"
#include "checkpoint/machine_memory.h"

namespace calla {

// What running the model takes, in bytes. Backends may hold parts in other formats; each can say so more exactly.
struct MemoryPlan {
  int context = 0;               // tokens of one sequence
  int sequences = 1;             // held at once
  uint64_t weights = 0;          // the parts in use, mapped
  uint64_t recurrent_state = 0;  // GDN states (fp32) and convolution tails (bf16) of all sequences
  uint64_t kv_cache = 0;         // bf16
  uint64_t scratch = 0;          // activations of one prefill chunk, fp32
  uint64_t total() const { return weights + recurrent_state + kv_cache + scratch; }
};

struct PartBytes {
  std::string part;  // "routed experts"
  uint64_t bytes = 0;
  uint64_t per_token = 0;  // read for each decoded token
};

struct InspectOptions {
  int context = 0;  // 0: the smaller of kDefaultContext and what the model allows
  int sequences = 1;
  int chunk_rows = 512;
  bool tensors = false;  // list every tensor
};

struct InspectReport {
  std::string directory;
  ModelConfig config;
  std::vector<std::string> files;
  std::vector<Tensor> tensors;  // empty unless asked for
  uint64_t tensor_count = 0;
  uint64_t parameters = 0;         // weights of the parts in use, codes counted one by one
  uint64_t active_parameters = 0;  // that a token passes through, without the embedding
  std::vector<PartBytes> parts;    // bytes of each part; their sum is the checkpoint's tensor bytes
  MemoryPlan plan;
  MachineMemory machine;
  std::vector<std::string> warnings;
  std::optional<std::vector<NonFinite>> verified;  // what Checkpoint::verify found, if the caller ran it
};

// Costs no more than the checkpoint's headers: no weights are read.
InspectReport inspect(const Checkpoint& checkpoint, const ModelConfig& config, const InspectOptions& options);

// For people, ending in a newline; and for programs.
std::string inspect_text(const InspectReport& report);
nlohmann::ordered_json inspect_json(const InspectReport& report);

}  // namespace calla
