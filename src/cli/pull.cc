// calla pull, list, remove: models from the hub on this machine.
#include "pull/pull.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <optional>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "pull/progress_line.h"

namespace calla {
namespace {

struct PullCommand {
  std::string repo;
  std::string revision = "main";
  bool quiet = false;
};

int terminal_width() {
  winsize size = {};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

int pull(const PullCommand& command) {
  PullOptions options = PullOptions::from_environment();
  options.revision = command.revision;
  const bool show = !command.quiet && ::isatty(STDERR_FILENO);
  std::optional<InterruptFlag> interrupt(std::in_place);
  options.progress = [&](const PullProgress& progress) {
    if (show) std::fprintf(stderr, "\r%s\033[K", progress_line(progress, terminal_width() - 1).c_str());
    return !interrupt->raised();
  };
  const PullResult result = pull_model(command.repo, ModelStore::from_environment(), options);
  interrupt.reset();
  if (show) std::fputs("\r\033[K", stderr);
  if (result.was_stopped) {
    std::fputs("stopped; the same command goes on from here\n", stderr);
    return kExitInterrupted;
  }
  if (!command.quiet)
    std::fprintf(stderr, "%s, commit %s, %s%s\n", command.repo.c_str(), result.commit.substr(0, 12).c_str(),
                 readable_bytes(static_cast<double>(result.bytes)).c_str(),
                 result.was_current ? ": it was here already" : ", checked");
  std::printf("%s\n", result.path.c_str());
  return 0;
}

int list() {
  const ModelStore store = ModelStore::from_environment();
  const std::vector<StoredModel> models = store.list();
  if (models.empty())
    std::fprintf(stderr, "no models in %s; calla pull fetches one\n", store.models().string().c_str());
  for (const StoredModel& model : models)
    std::printf("%-48s %10s  %s\n", model.repo.c_str(), readable_bytes(static_cast<double>(model.bytes)).c_str(),
                model.is_complete ? model.path.c_str() : "incomplete: calla pull goes on with it");
  return 0;
}

}  // namespace

void add_pull_commands(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("pull", "Fetch a model, such as mlx-community/Qwen3.6-35B-A3B-4bit");
  auto options = std::make_shared<PullCommand>();
  command->add_option("repo", options->repo, "The repository: ORGANISATION/NAME")->required();
  command->add_option("--revision", options->revision, "Branch, tag or commit")->capture_default_str();
  command->add_flag("-q,--quiet", options->quiet, "No progress");
  command->footer(
      "The model lies in $CALLA_HOME/models (default ~/.cache/calla/models) when all of it is there and checked; an\n"
      "interrupted pull goes on where it stopped. HF_TOKEN and HF_ENDPOINT are honoured. The path is printed on "
      "stdout.");
  command->callback([options, &exit_code] { exit_code = pull(*options); });

  app.add_subcommand("list", "List the models that were pulled")->callback([&exit_code] { exit_code = list(); });

  CLI::App* remove = app.add_subcommand("remove", "Delete a pulled model");
  auto repo = std::make_shared<std::string>();
  remove->add_option("repo", *repo, "The repository, as `calla list` shows it")->required();
  remove->callback([repo, &exit_code] {
    const uint64_t bytes = ModelStore::from_environment().remove(*repo);
    std::fprintf(stderr, "%s freed\n", readable_bytes(static_cast<double>(bytes)).c_str());
    exit_code = 0;
  });
}

}  // namespace calla
