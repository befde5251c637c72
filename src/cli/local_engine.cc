#include "cli/local_engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "chat/template_check.h"

namespace calla {

std::vector<TokenId> LocalEngine::stop_tokens() const {
  std::vector<TokenId> tokens = model.config.eos;
  if (const std::optional<TokenId> eos = tokenizer.eos())
    if (std::find(tokens.begin(), tokens.end(), *eos) == tokens.end()) tokens.push_back(*eos);
  return tokens;
}

std::unique_ptr<LocalEngine> load_engine(const ModelOptions& options, SchedulerOptions scheduler_options) {
  const auto begin = std::chrono::steady_clock::now();
  const std::filesystem::path directory = find_model(options.model);
  const auto note = [&](const std::string& line) {
    if (!options.quiet) std::fprintf(stderr, "%s\n", line.c_str());
  };

  LoadedModel model = load_model(directory);
  for (const std::string& warning : model.warnings) note("warning: " + warning);
  Tokenizer tokenizer = Tokenizer::load(directory);
  if (tokenizer.vocab_size() > model.config.shape.vocab)
    throw CheckpointError(directory.string() + "/tokenizer.json has " + std::to_string(tokenizer.vocab_size()) +
                          " tokens, but the model's vocabulary holds " + std::to_string(model.config.shape.vocab) +
                          "; do the two files belong together?");
  if (std::ifstream file(directory / "chat_template.jinja"); file) {
    std::ostringstream text;
    text << file.rdbuf();
    if (const auto warning = template_warning(text.str())) note("warning: " + *warning);
  }

  auto engine = std::make_unique<LocalEngine>(
      LocalEngine{std::move(model), std::filesystem::absolute(directory).lexically_normal().filename().string(),
                  std::move(tokenizer), nullptr, nullptr});
  BackendOptions backend_options;
  backend_options.threads = options.threads;
  backend_options.full_precision = options.full_precision;
  backend_options.ablate = options.ablate;
  backend_options.max_rows = std::max(scheduler_options.prefill_chunk, scheduler_options.max_sequences);
  backend_options.max_heads = scheduler_options.max_sequences;
  engine->backend = create_backend(options.backend, engine->model.config.shape, engine->model.weights, backend_options);
  scheduler_options.context = options.context;
  engine->scheduler = std::make_unique<Scheduler>(*engine->backend, engine->model.config.shape, scheduler_options);
  engine->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return engine;
}

}  // namespace calla
