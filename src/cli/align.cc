// calla align: makes a checkpoint's tensors usable where they lie in their files.
#include <cstdio>

#include "checkpoint/writer.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace calla {
namespace {

int align(const std::string& directory) {
  const InterruptFlag interrupt;
  ProgressLine progress("rewriting", "bytes", true);
  const std::vector<std::string> files = pad_headers(directory, [&](uint64_t done, uint64_t total) {
    interrupt.check();
    progress.update(static_cast<double>(done), static_cast<double>(total));
  });
  progress.clear();
  for (const std::string& file : files) std::printf("%s\n", file.c_str());
  std::fprintf(stderr, files.empty() ? "Nothing to do: every backend can use the tensors where they lie.\n"
                                     : "These files were rewritten.\n");
  return 0;
}

}  // namespace

void add_align_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("align", "Rewrite checkpoint files whose tensors lie at odd addresses");
  auto directory = std::make_shared<std::string>();
  command->add_option("directory", *directory, "The checkpoint")->required()->check(CLI::ExistingDirectory);
  command->footer(
      "Some writers do not pad a file's header, and then the weights cannot be used where they lie: loading copies "
      "them.\n"
      "This pads the header once; the tensors stay as they are. A file is rewritten only if its tensors begin at no "
      "multiple\n"
      "of 8 bytes, which a Mac's GPU needs (the CPU needs 4). `calla inspect` says whether a checkpoint needs it.");
  command->callback([directory, &exit_code] { exit_code = align(*directory); });
}

}  // namespace calla
