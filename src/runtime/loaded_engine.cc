#include "runtime/loaded_engine.h"

#include <algorithm>
#include <chrono>

#include "backend/create.h"
#include "base/error.h"
#include "base/is_there.h"
#include "chat/template_check.h"
#include "checkpoint/json_file.h"
#include "model/fingerprint.h"

namespace calla {
namespace {

std::string read_template(const std::filesystem::path& directory) {
  constexpr size_t kMaxBytes = 4 << 20;
  const std::filesystem::path file = directory / "chat_template.jinja";
  return is_there(file) ? read_text_file(file, kMaxBytes) : std::string();
}

}  // namespace

void check_vocabulary(const Tokenizer& tokenizer, const ModelShape& shape, const std::filesystem::path& directory) {
  if (tokenizer.vocab_size() > shape.vocab)
    throw CheckpointError((directory / "tokenizer.json").string() + " has " + std::to_string(tokenizer.vocab_size()) +
                          " tokens, but the model's vocabulary holds " + std::to_string(shape.vocab) +
                          "; do the two files belong together?");
}

Tokenizer load_tokenizer(const std::filesystem::path& directory, const ModelShape& shape,
                         const std::function<void(const std::string&)>& warn) {
  if (const std::string text = read_template(directory); !text.empty())
    if (const auto warning = template_warning(text)) warn(*warning);
  Tokenizer tokenizer = Tokenizer::load(directory);
  check_vocabulary(tokenizer, shape, directory);
  for (const char* text : {"<|im_start|>", "<|im_end|>", "<think>", "</think>"})
    if (!tokenizer.find(text))
      warn((directory / "tokenizer.json").string() + " has no token " + text +
           ": the chat format is not one that this model knows");
  return tokenizer;
}

void check_tokenizer(const std::filesystem::path& directory, const ModelShape& shape,
                     const std::function<void(const std::string&)>& warn) {
  const std::filesystem::path file = directory / "tokenizer.json";
  if (!is_there(file))
    return warn(file.string() + ": missing; without it the model can be measured (bench), but not run");
  load_tokenizer(directory, shape, warn);
}

std::vector<TokenId> LoadedEngine::stop_tokens() const {
  std::vector<TokenId> tokens = model.config.eos;
  if (const auto eos = tokenizer.eos()) tokens.push_back(*eos);
  for (const char* text : {"<|im_end|>", "<|endoftext|>"})
    if (const auto token = tokenizer.find(text); token && tokenizer.is_added(*token)) tokens.push_back(*token);
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

std::unique_ptr<LoadedEngine> load_engine(const EngineOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto warn = [&](const std::string& line) {
    if (options.warn) options.warn(line);
  };
  LoadedModel model = load_model(options.model);
  for (const std::string& warning : model.warnings) warn(warning);
  Tokenizer tokenizer = load_tokenizer(options.model, model.config.shape, warn);

  const std::string name = std::filesystem::weakly_canonical(options.model).filename().string();
  auto engine =
      std::make_unique<LoadedEngine>(LoadedEngine{std::move(model), name, std::move(tokenizer), nullptr, nullptr, 0});
  SchedulerOptions scheduler_options = options.scheduler;
  scheduler_options.warn = options.warn;
  if (!scheduler_options.cache_dir.empty()) scheduler_options.model_id = fingerprint(engine->model.checkpoint);
  scheduler_options.prefill_chunk = choose_backend(options.backend).prefill_rows;
  scheduler_options.shared_chunk = scheduler_options.prefill_chunk / 4;
  BackendOptions backend_options = options.backend_options;
  backend_options.max_rows = std::max(scheduler_options.prefill_chunk, scheduler_options.max_sequences);
  backend_options.max_heads = scheduler_options.max_sequences;
  const ModelShape& shape = engine->model.config.shape;
  engine->backend = create_backend(options.backend, shape, engine->model.weights, backend_options);
  if (is_software_device(engine->backend->name()))
    warn(engine->backend->description() + "; slow, and there for tests only");
  engine->scheduler = std::make_unique<Scheduler>(*engine->backend, shape, scheduler_options);
  engine->load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return engine;
}

}  // namespace calla
