#pragma once
// Opens a checkpoint directory and makes its weights usable.
#include <filesystem>
#include <string>
#include <vector>

#include "backend/weights.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"

namespace calla {

struct LoadedModel {
  Checkpoint checkpoint;  // holds what `weights` points into; may be moved along with them
  ModelConfig config;
  ModelWeights weights;
  std::vector<std::string> warnings;  // a line each, for the user
  uint64_t copied_bytes = 0;          // of tensors that could not be used where they lie in their files
};

// Throws CheckpointError. Reads headers, config and the small vectors; the matrices stay on disk until they are used.
LoadedModel load_model(const std::filesystem::path& directory);

}  // namespace calla
