// calla inspect: what a checkpoint is, where its bytes go, and whether it fits into this machine.
#include "checkpoint/inspect.h"

#include <cstdio>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/bind_weights.h"
#include "runtime/loaded_engine.h"

namespace calla {
namespace {

struct Options {
  std::string directory;
  InspectOptions inspect;
  bool verify = false;
  bool json = false;
};

int run(const Options& options) {
  const std::filesystem::path directory = find_model(options.directory);
  Checkpoint checkpoint = Checkpoint::open(directory);
  const ModelConfig config = read_model_config(directory);
  InspectReport report = inspect(checkpoint, config, options.inspect);
  // A fault is among the warnings of the report, which comes first, and then ends the command.
  std::exception_ptr fault;
  const auto look = [&](const auto& check) {
    try {
      check();
    } catch (const CheckpointError& error) {
      report.warnings.emplace_back(error.what());
      if (!fault) fault = std::current_exception();
    }
  };
  look([&] { check_weights(checkpoint, config.shape, config.quant); });
  look([&] {
    check_tokenizer(directory, config.shape, [&](const std::string& line) { report.warnings.push_back(line); });
  });
  if (options.verify) {
    ProgressLine progress("reading the tensors", "bytes", true);
    report.verified = checkpoint.verify(
        [&](uint64_t done, uint64_t total) { progress.update(static_cast<double>(done), static_cast<double>(total)); });
    progress.clear();
  }
  if (options.json)
    std::cout << inspect_json(report).dump(2) << "\n";
  else
    std::fputs(inspect_text(report).c_str(), stdout);
  std::fflush(stdout);
  if (fault) std::rethrow_exception(fault);
  return report.verified && !report.verified->empty() ? kExitModel : 0;
}

}  // namespace

void add_inspect_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("inspect", "Show what a checkpoint is, its tensors, bytes and memory needs");
  auto options = std::make_shared<Options>();
  command->add_option("directory,-m,--model", options->directory, "The checkpoint (default as for chat)")
      ->check(not_empty())
      ->type_name("DIR");
  command
      ->add_option("-c,--context", options->inspect.context,
                   "Tokens of one sequence, for the memory plan (default: what chat holds)")
      ->type_name("N")
      ->check(between(0, 1 << 24));
  command->add_option("--sequences", options->inspect.sequences, "Sequences held at once")
      ->check(between(1, 1024))
      ->capture_default_str();
  command->add_flag("--tensors", options->inspect.tensors, "List every tensor");
  command->add_flag("--verify", options->verify, "Read all scales, biases and norms and look for NaN and infinities");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace calla
