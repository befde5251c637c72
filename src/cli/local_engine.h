#pragma once
// LocalEngine: a loaded model with its tokenizer, backend and scheduler, for the commands that generate.
#include <memory>
#include <string>

#include "backend/create.h"
#include "cli/options.h"
#include "engine/scheduler.h"
#include "model/load_model.h"
#include "tokenizer/tokenizer.h"

namespace calla {

struct LocalEngine {
  LoadedModel model;
  std::string model_name;  // the directory's name
  Tokenizer tokenizer;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Scheduler> scheduler;
  double load_seconds = 0;

  std::vector<TokenId> stop_tokens() const;
};

// Loads what `options` names; progress and warnings go to stderr unless quiet. `scheduler_options.context` is taken
// from the options. Throws CheckpointError, UsageError or DeviceError.
std::unique_ptr<LocalEngine> load_engine(const ModelOptions& options, SchedulerOptions scheduler_options);

}  // namespace calla
