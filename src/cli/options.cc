#include "cli/options.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "backend/create.h"
#include "base/error.h"
#include "model/sampling_defaults.h"
#include "pull/model_store.h"
#include "pull/pull_error.h"

namespace calla {
namespace fs = std::filesystem;

void add_model_options(CLI::App& command, ModelOptions& options) {
  command
      .add_option("-m,--model", options.model,
                  "Model: a directory in MLX layout, or the name of a pulled one (default: $CALLA_MODEL, else the "
                  "bundled calla-tiny)")
      ->type_name("DIR");
  std::string names = "auto";
  for (const BackendInfo& info : list_backends())
    names += ", " + info.name + (!info.available ? " (not here)" : info.software ? " (a software device here)" : "");
  command.add_option("-b,--backend", options.backend, "Where to run: " + names)
      ->type_name("NAME")
      ->capture_default_str();
  command.add_option("-t,--threads", options.threads, "CPU threads (default: all cores)")
      ->type_name("N")
      ->check(CLI::Range(0, 1024));
  command
      .add_option("-c,--context", options.context,
                  "Tokens that prompt and answer may have together (default: 32768, or what the model allows)")
      ->type_name("N")
      ->check(CLI::Range(2, 1 << 24));
  command.add_flag("--full-precision", options.full_precision,
                   "Compute in fp32 throughout (cpu; slower, for checking)");
  command
      .add_option("--ablate", options.ablate,
                  "Switch one of the backend's mechanisms off, to measure it; repeatable (bench: or `all`)")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command.add_flag("-q,--quiet", options.quiet, "Print results only");
}

EngineOptions engine_options(const ModelOptions& options, const SchedulerOptions& scheduler) {
  EngineOptions engine;
  engine.model = find_model(options.model);
  engine.backend = options.backend;
  engine.threads = options.threads;
  engine.full_precision = options.full_precision;
  engine.ablate = options.ablate;
  engine.scheduler = scheduler;
  engine.scheduler.context = options.context;
  if (!options.quiet)
    engine.warn = [](const std::string& line) { std::fprintf(stderr, "warning: %s\n", line.c_str()); };
  return engine;
}

fs::path find_model(const std::string& option) {
  std::string name = option;
  if (name.empty())
    if (const char* variable = std::getenv("CALLA_MODEL")) name = variable;
  if (!name.empty()) {
    if (fs::exists(name)) return name;
    std::string looked_in;
    try {
      const ModelStore store = ModelStore::from_environment();
      if (const auto pulled = store.find(name)) return *pulled;
      looked_in = ", nor pulled into " + store.models().string();
    } catch (const PullError&) {
      // Not a repository's name, or no place for a store: then it can only be a directory.
    }
    throw UsageError("there is no model at '" + name + "': it is no directory" + looked_in +
                     "; see `calla pull --help`");
  }
  // Beside the installed program, else in the source tree that this program was built from.
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    const fs::path installed = self.parent_path().parent_path() / "share" / "calla" / "models" / "calla-tiny";
    if (fs::exists(installed)) return installed;
  }
  const fs::path bundled = fs::path(CALLA_SOURCE_DIR) / "models" / "calla-tiny";
  if (fs::exists(bundled)) return bundled;
  throw UsageError("which model? Give --model DIR, or set CALLA_MODEL");
}

void add_sampling_options(CLI::App& command, SamplingOptions& options) {
  const std::string group = "Sampling (defaults: the model's generation_config.json)";
  const auto add = [&](auto&&... arguments) { return command.add_option(arguments...)->group(group); };
  add("--temp,--temperature", options.temperature, "Randomness; 0 is greedy")->check(CLI::Range(0.0, 100.0));
  add("--top-k", options.top_k, "Keep the k likeliest tokens; 0: all")->check(CLI::Range(0, 1 << 24));
  add("--top-p", options.top_p, "Keep the likeliest tokens that make up this share")->check(CLI::Range(0.0, 1.0));
  add("--min-p", options.min_p, "Drop tokens below this share of the likeliest one")->check(CLI::Range(0.0, 1.0));
  add("--presence-penalty", options.presence_penalty, "Against tokens already generated")->check(CLI::Range(-2.0, 2.0));
  add("--frequency-penalty", options.frequency_penalty, "The same, for each occurrence")->check(CLI::Range(-2.0, 2.0));
  add("--repetition-penalty", options.repetition_penalty, "Against tokens of prompt and answer; 1: none")
      ->check(CLI::Range(0.01, 10.0));
  add("--seed", options.seed, "The same seed gives the same answer (default: a fresh one, shown)");
  command.add_flag("--greedy", options.greedy, "Always the likeliest token (as --temp 0)")->group(group);
  add("-n,--max-tokens", options.max_tokens, "Longest answer, thinking included (default: what the context holds)")
      ->check(CLI::Range(0, 1 << 24));
}

SamplingParams sampling_params(const SamplingOptions& options, const GenerationDefaults& defaults) {
  SamplingParams params = sampling_defaults(defaults);
  const auto set = [](auto& field, const auto& option) {
    if (option) field = *option;
  };
  set(params.temperature, options.temperature);
  set(params.top_k, options.top_k);
  set(params.top_p, options.top_p);
  set(params.min_p, options.min_p);
  set(params.presence_penalty, options.presence_penalty);
  set(params.frequency_penalty, options.frequency_penalty);
  set(params.repetition_penalty, options.repetition_penalty);
  if (options.greedy) params.temperature = 0;
  params.seed = options.seed ? *options.seed : std::random_device{}() | (uint64_t{std::random_device{}()} << 32);
  params.seed &= (uint64_t{1} << 53) - 1;  // a number that JSON and people can carry
  if (options.seed) params.seed = *options.seed;
  return params;
}

}  // namespace calla
