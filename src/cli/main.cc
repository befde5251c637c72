// calla: the command line. The one place that turns errors into messages and exit codes.
#include <langinfo.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace calla {
namespace {

int fail(int code, const char* what) {
  std::fflush(stdout);
  std::fprintf(stderr, "calla: %s\n", what);
  return code;
}

bool is_command(const CLI::App& app, const std::string& name) {
  const auto commands = app.get_subcommands([&](const CLI::App* command) { return command->get_name() == name; });
  return !commands.empty();
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
  app.failure_message([](const CLI::App* from, const CLI::Error& error) {
    const std::vector<CLI::App*> commands = from->get_subcommands();
    const std::string name = commands.empty() ? "" : " " + commands.front()->get_name();
    return "calla: " + std::string(error.what()) + "; see calla" + name + " --help\n";
  });
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
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (arguments.empty()) {
    std::fputs(app.help().c_str(), stderr);
    return kExitUsage;
  }
  std::string& first = arguments.front();
  if (first == "version") first = "--version";
  if (first == "help") {
    first = "--help";
    if (arguments.size() > 1) std::swap(arguments[0], arguments[1]);
  }
  if (first.empty() || (first[0] != '-' && !is_command(app, first)))
    throw UsageError("there is no command \"" + first + "\"; see calla --help");
  std::reverse(arguments.begin(), arguments.end());  // the order that parse() wants
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp& e) {
    for (CLI::App* command : app.get_subcommands()) complete_help(*command);
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  return exit_code;
}

// Line editing reads and measures what is typed by the locale. Calla's text is UTF-8, whatever the system says.
void use_utf8() {
  std::setlocale(LC_CTYPE, "");
  if (std::strcmp(::nl_langinfo(CODESET), "UTF-8") != 0) std::setlocale(LC_CTYPE, "C.UTF-8");
}

// A mapped file that another program shortens cannot be read on.
extern "C" void on_bus_error(int) {
  constexpr std::string_view kText = "calla: a file of the model changed or became unreadable while it was in use\n";
  if (::write(STDERR_FILENO, kText.data(), kText.size()) < 0) ::_exit(kExitFailure);
  ::_exit(kExitModel);
}

// Results that did not reach stdout (a full disk) are a failure.
int check_output(int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "calla: stdout cannot be written%s%s\n", errno != 0 ? ": " : "",
               errno != 0 ? std::strerror(errno) : "");
  return code == 0 ? kExitFailure : code;
}

}  // namespace
}  // namespace calla

int main(int argc, char** argv) {
  using namespace calla;
  use_utf8();
  ::signal(SIGBUS, on_bus_error);
  try {
    return check_output(run(argc, argv));
  } catch (const UsageError& e) {
    return fail(kExitUsage, e.what());
  } catch (const RequestError& e) {
    return fail(kExitUsage, e.what());
  } catch (const CheckpointError& e) {
    return fail(kExitModel, e.what());
  } catch (const DeviceError& e) {
    return fail(kExitDevice, e.what());
  } catch (const Interrupted&) {
    return fail(kExitInterrupted, "interrupted");
  } catch (const std::filesystem::filesystem_error& e) {
    return fail(kExitModel, (e.path1().string() + ": " + e.code().message()).c_str());
  } catch (const std::bad_alloc&) {
    return fail(kExitDevice, "out of memory; try a smaller --context or a smaller model");
  } catch (const std::exception& e) {
    return fail(kExitFailure, e.what());
  }
}
