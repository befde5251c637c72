#pragma once
// LoadedEngine: a model directory made ready to generate: weights, tokenizer, backend and scheduler. What the CLI and the
// server start from.
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "engine/scheduler.h"
#include "model/load_model.h"
#include "tokenizer/tokenizer.h"

namespace calla {

struct EngineOptions {
  std::filesystem::path model;  // a checkpoint directory
  std::string backend = "auto";
  BackendOptions backend_options;                // max_rows and max_heads are filled in
  SchedulerOptions scheduler;                    // model_id and warn are filled in
  std::function<void(const std::string&)> warn;  // a line for the user; from any thread; may be empty
};

struct LoadedEngine {
  LoadedModel model;
  std::string name;  // the directory's name
  Tokenizer tokenizer;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Scheduler> scheduler;
  double load_seconds = 0;

  // Tokens that end an answer: what config.json, generation_config.json and the tokenizer name, together; a checkpoint
  // often has only some of them in each.
  std::vector<TokenId> stop_tokens() const;
};

// Throws CheckpointError if the tokenizer has ids that the model does not.
void check_vocabulary(const Tokenizer& tokenizer, const ModelShape& shape, const std::filesystem::path& directory);

// What a model directory needs besides weights, read as load_engine does: the tokenizer, and the chat format that its
// tokens and template make. `warn` gets a line for each thing that does not stand in the way. Throws CheckpointError.
Tokenizer load_tokenizer(const std::filesystem::path& directory, const ModelShape& shape,
                         const std::function<void(const std::string&)>& warn);

// The same for those who need no tokens and only want its faults found. A directory without a tokenizer, as
// `calla make-checkpoint` makes them to measure speed, is a warning.
void check_tokenizer(const std::filesystem::path& directory, const ModelShape& shape,
                     const std::function<void(const std::string&)>& warn);

// Throws CheckpointError, UsageError or DeviceError.
std::unique_ptr<LoadedEngine> load_engine(const EngineOptions& options);

}  // namespace calla
