// calla: the command line. The one place that turns errors into messages and exit codes.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <new>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace calla {
namespace {

int fail(int code, const char* what) {
  std::fflush(stdout);
  std::fprintf(stderr, "calla: %s\n", what);
  return code;
}

int run(int argc, char** argv) {
  CLI::App app{
      "Calla runs Qwen3.6-35B-A3B, and small models of its kind, on your own machine.\n\n"
      "  calla chat                       talk to the bundled toy model calla-tiny\n"
      "  calla chat --model DIR           talk to the real one, in MLX 4-bit layout\n"
      "  calla run \"What is a kangaroo?\"  one question, one answer\n"
      "  calla COMMAND --help             what a command can do"};
  app.name("calla");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("calla ") + CALLA_VERSION);
  app.footer(
      "Results go to stdout, everything else to stderr.\n"
      "Exit codes: 0 done; 1 failed, or a result outside its tolerance; 2 wrong usage;\n"
      "3 the model's files cannot be used; 4 the device failed; 130 interrupted.");
  int exit_code = 0;
  add_chat_command(app, exit_code);
  add_run_command(app, exit_code);
  add_serve_command(app, exit_code);
  add_pull_commands(app, exit_code);
  add_bench_command(app, exit_code);
  add_eval_command(app, exit_code);
  add_inspect_command(app, exit_code);
  add_tokenize_command(app, exit_code);
  add_align_command(app, exit_code);
  add_make_checkpoint_command(app, exit_code);
  add_selftest_command(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  return exit_code;
}

}  // namespace
}  // namespace calla

int main(int argc, char** argv) {
  using namespace calla;
  try {
    return run(argc, argv);
  } catch (const UsageError& e) {
    return fail(kExitUsage, e.what());
  } catch (const RequestError& e) {
    return fail(kExitUsage, e.what());
  } catch (const CheckpointError& e) {
    return fail(kExitModel, e.what());
  } catch (const DeviceError& e) {
    return fail(kExitDevice, e.what());
  } catch (const std::bad_alloc&) {
    return fail(kExitDevice, "out of memory; try a smaller --context or a smaller model");
  } catch (const std::exception& e) {
    return fail(kExitFailure, e.what());
  }
}
