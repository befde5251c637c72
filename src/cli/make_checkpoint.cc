// calla make-checkpoint: random weights at real sizes, in the real file layout, for measuring speed.
#include <cstdio>

#include "checkpoint/synthetic.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace calla {
namespace {

struct Options {
  std::string shape = "qwen3.6-35b-a3b";
  int layers = 0;
  uint64_t seed = 0;
  std::string tokenizer_from;
  std::string out;
  bool quiet = false;
};

int run(const Options& options) {
  SyntheticOptions synthetic;
  synthetic.shape = named_shape(options.shape, options.layers);
  synthetic.seed = options.seed;
  synthetic.tokenizer_from = options.tokenizer_from;
  const InterruptFlag interrupt;
  ProgressLine progress("writing " + options.out, "bytes", !options.quiet);
  make_checkpoint(synthetic, options.out, [&](uint64_t done, uint64_t total) {
    interrupt.check();
    progress.update(static_cast<double>(done), static_cast<double>(total));
  });
  progress.clear();
  if (!options.quiet)
    std::fprintf(
        stderr, "%s: %d %s of %s with random weights, for calla bench; %s.\n", options.out.c_str(),
        synthetic.shape.layers(), synthetic.shape.layers() == 1 ? "layer" : "layers", options.shape.c_str(),
        options.tokenizer_from.empty() ? "without a tokenizer it cannot chat" : "it talks nonsense at the right speed");
  return 0;
}

}  // namespace

void add_make_checkpoint_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("make-checkpoint", "Write a checkpoint with random weights, for measuring speed");
  auto options = std::make_shared<Options>();
  std::string names;
  for (const std::string& name : shape_names()) names += (names.empty() ? "" : ", ") + name;
  command->add_option("out", options->out, "The directory to write; must not exist yet")
      ->required()
      ->check(not_empty());
  command->add_option("--shape", options->shape, "Sizes of: " + names)->capture_default_str();
  command->add_option("--layers", options->layers, "Layers (default: as many as the model has)")
      ->type_name("N")
      ->check(between(1, 1000));
  command->add_option("--seed", options->seed, "The same seed gives the same weights")
      ->check(between<int64_t>(0, INT64_MAX))
      ->capture_default_str();
  command
      ->add_option("--tokenizer-from", options->tokenizer_from,
                   "Copy the tokenizer's files from this directory, so that it can chat")
      ->type_name("DIR")
      ->check(CLI::ExistingDirectory);
  command->add_flag("-q,--quiet", options->quiet, "No progress");
  command->footer(
      "Writes to OUT.partial-N and renames that at the end. What a killed run leaves goes with the next of the\n"
      "same name.");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace calla
