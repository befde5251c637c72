#pragma once
// The commands of `calla`. Each add_* function registers one subcommand; when it was chosen, its callback does the work
// and stores the exit code.
#include <CLI/CLI.hpp>

namespace calla {

void add_chat_command(CLI::App& app, int& exit_code);             // chat.cc
void add_run_command(CLI::App& app, int& exit_code);              // run.cc
void add_serve_command(CLI::App& app, int& exit_code);            // serve.cc
void add_pull_commands(CLI::App& app, int& exit_code);            // pull.cc: pull, list, remove
void add_bench_command(CLI::App& app, int& exit_code);            // bench.cc
void add_eval_command(CLI::App& app, int& exit_code);             // eval.cc
void add_inspect_command(CLI::App& app, int& exit_code);          // inspect.cc
void add_tokenize_command(CLI::App& app, int& exit_code);         // tokenize.cc
void add_align_command(CLI::App& app, int& exit_code);            // align.cc
void add_make_checkpoint_command(CLI::App& app, int& exit_code);  // make_checkpoint.cc
void add_selftest_command(CLI::App& app, int& exit_code);         // selftest.cc

}  // namespace calla
