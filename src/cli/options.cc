#include "cli/options.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "backend/create.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/terminal.h"
#include "model/sampling_defaults.h"
#include "pull/model_store.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace fs = std::filesystem;

namespace {

constexpr const char* kWhereToRun = "Where to run";

}  // namespace

void add_model_options(CLI::App& command, ModelOptions& options, bool session) {
  command
      .add_option("-m,--model", options.model,
                  "Model: a directory in MLX layout, or the name of a pulled one (default: $CALLA_MODEL, else the "
                  "bundled calla-tiny)")
      ->check(not_empty())
      ->type_name("DIR");
  command.add_option("-b,--backend", options.backend, kWhereToRun)->type_name("NAME")->capture_default_str();
  command.add_option("-t,--threads", options.threads, "CPU threads (default: all cores)")
      ->type_name("N")
      ->check(between(0, 1024));
  if (session)
    command
        .add_option("-c,--context", options.context,
                    "Tokens that prompt and answer may have together (default: " + std::to_string(kDefaultContext) +
                        ", or what the model allows)")
        ->type_name("N")
        ->check(between(2, 1 << 24));
  command
      .add_flag("--full-precision", options.full_precision, "Compute in fp32 throughout (cpu; slower, for checking)")
      ->group("Measuring");
  command
      .add_option("--ablate", options.ablate,
                  "Switch one of the backend's mechanisms off, to measure it; repeatable (bench: or `all`)")
      ->type_name("NAME")
      ->allow_extra_args(false)
      ->group("Measuring");
  command.add_flag("-q,--quiet", options.quiet, "Print results only");
}

void complete_help(CLI::App& command) {
  CLI::Option* const backend = command.get_option_no_throw("--backend");
  if (!backend) return;
  std::string names = "auto";
  for (const BackendInfo& info : list_backends())
    names += ", " + info.name + (!info.available ? " (not here)" : info.software ? " (a software device here)" : "");
  backend->description(kWhereToRun + (": " + names));
}

void tell_what_auto_passes_over(const ModelOptions& options) {
  if (options.backend != "auto") return;
  if (const std::string reason = passed_over_by_auto(); !reason.empty())
    std::fprintf(stderr, "warning: running on the %s backend, not on %s\n", choose_backend("auto").name.c_str(),
                 reason.c_str());
}

BackendOptions backend_options(const ModelOptions& options) {
  BackendOptions backend;
  backend.threads = options.threads;
  backend.full_precision = options.full_precision;
  backend.ablate = options.ablate;
  if (!options.quiet)
    backend.on_upload = [progress = std::make_shared<ProgressLine>("uploading weights", "", true)](double done,
                                                                                                   double total) {
      done < total ? progress->update(done, total) : progress->clear();
    };
  return backend;
}

EngineOptions engine_options(const ModelOptions& options, const SchedulerOptions& scheduler) {
  EngineOptions engine;
  engine.model = find_model(options.model);
  tell_what_auto_passes_over(options);
  engine.backend = options.backend;
  engine.backend_options = backend_options(options);
  engine.scheduler = scheduler;
  engine.scheduler.context = options.context;
  if (options.threads > available_cores() && !options.quiet)
    std::fprintf(stderr, "warning: --threads %d on %d cores: threads that wait for a core slow the others down\n",
                 options.threads, available_cores());
  if (!options.quiet)
    engine.warn = [](const std::string& line) { std::fprintf(stderr, "warning: %s\n", line.c_str()); };
  return engine;
}

void set_cache(SchedulerOptions& scheduler, double gigabytes) {
  scheduler.cache_bytes = static_cast<int64_t>(gigabytes * 1e9);
  if (gigabytes == 0) scheduler.cache_snapshots = 0;
}

std::string read_stdin() {
  std::string text;
  std::array<char, 65536> piece{};
  for (size_t n = 1; n > 0; text.append(piece.data(), n)) n = std::fread(piece.data(), 1, piece.size(), stdin);
  if (std::ferror(stdin) != 0) throw UsageError(std::string("stdin cannot be read: ") + std::strerror(errno));
  check_utf8(text, "stdin");
  return text;
}

void check_utf8(std::string_view text, const std::string& what) {
  const size_t offset = utf8_error_offset(text);
  if (offset == text.size()) return;
  std::array<char, 8> byte{};
  std::snprintf(byte.data(), byte.size(), "0x%02x", static_cast<unsigned char>(text[offset]));
  throw UsageError(what + " is not UTF-8 text: byte " + byte.data() + " at offset " + std::to_string(offset));
}

fs::path find_model(const std::string& option) {
  std::string name = option;
  if (name.empty())
    if (const char* variable = std::getenv("CALLA_MODEL")) name = variable;
  if (!name.empty()) {
    std::error_code error;  // a name too long, a loop of links: no model
    if (fs::exists(name, error)) return name;
    std::string looked_in;
    try {
      const ModelStore store = ModelStore::from_environment();
      if (const auto pulled = store.find(name)) return *pulled;
      looked_in = ", nor pulled into " + store.models().string();
    } catch (const Error&) {
      // Not a repository's name, or no place for a store: then it can only be a directory.
    }
    throw UsageError("there is no model '" + name + "'" + (option.empty() ? " (from $CALLA_MODEL)" : "") +
                     ": there is no such directory" + looked_in + "; see `calla pull --help`");
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
  const auto add = [&](const char* names, auto& field, const char* help, const CLI::Validator& check) {
    return command.add_option(names, field, help)->group(group)->type_name("N")->check(check);
  };
  CLI::Option* temperature =
      add("--temperature,--temp", options.temperature, "Randomness; 0 is greedy", between(0.0f, 100.0f));
  add("--top-k", options.top_k, "Keep the k likeliest tokens; 0: all", between(0, 1 << 24));
  add("--top-p", options.top_p, "Keep the likeliest tokens that make up this share, 0 to 1", between(0.0f, 1.0f));
  add("--min-p", options.min_p, "Drop tokens below this share of the likeliest one, 0 to 1", between(0.0f, 1.0f));
  add("--presence-penalty", options.presence_penalty, "Against tokens already generated, -2 to 2",
      between(-2.0f, 2.0f));
  add("--frequency-penalty", options.frequency_penalty, "The same, for each occurrence", between(-2.0f, 2.0f));
  add("--repetition-penalty", options.repetition_penalty, "Against tokens of prompt and answer; 1: none",
      between(0.01f, 10.0f));
  // As a signed number: the library would read -1 as a huge unsigned one.
  add("--seed", options.seed, "The same seed gives the same answer (default: a fresh one, shown)",
      between<int64_t>(0, INT64_MAX));
  command.add_flag("--greedy", options.greedy, "Always the likeliest token (as --temperature 0)")
      ->group(group)
      ->excludes(temperature);
  add("-n,--max-tokens", options.max_tokens,
      "Longest answer, thinking included (default, and 0: what the context holds)", between(0, 1 << 24));
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
