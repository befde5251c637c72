#pragma once
// What several commands have in common: which model, on what, and how to sample. See main.cc for the list of commands.
#include <CLI/CLI.hpp>
#include <charconv>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include "backend/sampling.h"
#include "checkpoint/config.h"
#include "runtime/loaded_engine.h"

namespace calla {

// Exit codes, as `calla --help` lists them.
inline constexpr int kExitFailure = 1;  // the work was done and the result is bad (eval), or something failed
inline constexpr int kExitUsage = 2;    // the command line
inline constexpr int kExitModel = 3;    // the checkpoint or its tokenizer
inline constexpr int kExitDevice = 4;   // the device, its driver or its memory
inline constexpr int kExitInterrupted = 130;

struct ModelOptions {
  std::string model;  // a directory; empty: $CALLA_MODEL, else the bundled calla-tiny
  std::string backend = "auto";
  int threads = 0;
  int context = 0;
  bool full_precision = false;
  std::vector<std::string> ablate;
  bool quiet = false;
};

// Adds --model, --backend, --threads, --full-precision, --ablate and --quiet; --context where a session is held.
void add_model_options(CLI::App& command, ModelOptions& options, bool session = true);

// Before the command's help is shown: says which backends are here. Not sooner, because looking for them wakes their
// drivers.
void complete_help(CLI::App& command);

// For add_option()->check(): a number of T's kind between two others, refused in words.
template <class T>
CLI::Validator between(T low, T high) {
  return CLI::Validator(
      [low, high](std::string& text) -> std::string {
        T value{};
        bool fits = CLI::detail::lexical_cast(text, value);
        // The library would take the nearest number for a whole one that is too large.
        if constexpr (std::is_integral_v<T>)
          fits &= std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc::result_out_of_range;
        if (!fits) return "\"" + text + "\" is not a number that fits here";
        if (value >= low && value <= high) return {};
        std::ostringstream message;
        message << text << " is not between " << low << " and " << high;
        return message.str();
      },
      "");
}

// Likewise: a name or a path. Without it an unset shell variable would count as an option that was not given.
inline CLI::Validator not_empty() {
  return CLI::Validator(
      [](std::string& text) { return text.empty() ? std::string("must not be empty") : std::string(); }, "");
}

// Says on stderr, --quiet or not, which backend runs if `auto` passes over one of this build; for each command that runs one.
void tell_what_auto_passes_over(const ModelOptions& options);

// The part of the options that backends know.
BackendOptions backend_options(const ModelOptions& options);

// What load_engine() needs; warnings go to stderr unless quiet.
EngineOptions engine_options(const ModelOptions& options, const SchedulerOptions& scheduler);

// Memory for the prefix cache, as --cache-gb gives it; 0: none.
void set_cache(SchedulerOptions& scheduler, double gigabytes);

// All of stdin. Throws UsageError if it cannot be read or is not UTF-8.
std::string read_stdin();

// Throws UsageError, naming `what` and the first bad byte, if the text is not UTF-8.
void check_utf8(std::string_view text, const std::string& what);

// Where the model is: the option, $CALLA_MODEL, a model fetched by `calla pull` under that name, or the bundled one.
// Throws UsageError if there is none.
std::filesystem::path find_model(const std::string& option);

struct SamplingOptions {
  std::optional<float> temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  bool greedy = false;
  int max_tokens = 0;
};

void add_sampling_options(CLI::App& command, SamplingOptions& options);

// The options over the checkpoint's own defaults. Without a seed a fresh one is drawn.
SamplingParams sampling_params(const SamplingOptions& options, const GenerationDefaults& defaults);

}  // namespace calla
