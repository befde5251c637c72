// calla eval: how good the answers are: perplexity of a text, or agreement with a golden file.
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

#include "backend/create.h"
#include "base/error.h"
#include "chat/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/load_model.h"
#include "selftest/evaluator.h"
#include "selftest/golden.h"
#include "tokenizer/tokenizer.h"

namespace calla {
namespace {

struct EvalOptions {
  ModelOptions model;
  std::string text;
  std::string golden;
  int window = 512;
  int chunk = 256;
  bool json = false;
};

constexpr int kHeadsAtOnce = 64;

std::unique_ptr<Backend> make_backend(const EvalOptions& options, const LoadedModel& model) {
  for (const std::string& warning : model.warnings)
    if (!options.model.quiet) std::fprintf(stderr, "warning: %s\n", warning.c_str());
  BackendOptions run = backend_options(options.model);
  run.max_rows = options.chunk;
  run.max_heads = kHeadsAtOnce;
  return create_backend(options.model.backend, model.config.shape, model.weights, run);
}

std::string read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  if (!file || errno == EISDIR) throw UsageError(path + " cannot be read: " + std::strerror(errno));
  check_utf8(text.view(), path);
  return text.str();
}

// Mean negative log-likelihood of a text, in windows that each start from an empty state; the first token of a window
// is not scored.
int evaluate_text(const EvalOptions& options) {
  const std::string text = read_text(options.text);
  const std::filesystem::path directory = find_model(options.model.model);
  const LoadedModel model = load_model(directory);
  const Tokenizer tokenizer = Tokenizer::load(directory);
  check_vocabulary(tokenizer, model.config.shape, directory);
  const std::vector<TokenId> tokens = tokenizer.encode(text, AddedTokens::kPlainText);
  if (tokens.size() < 2) throw UsageError(options.text + ": a text of at least two tokens is needed");
  const auto backend = make_backend(options, model);
  const auto window = static_cast<size_t>(options.window);
  Evaluator evaluator(*backend, model.config.shape, options.window, options.chunk, kHeadsAtOnce);
  ProgressLine progress("scoring", "tokens", !options.model.quiet);
  double nll = 0;
  size_t scored = 0;
  for (size_t begin = 0; begin < tokens.size(); begin += window) {
    const auto part = std::span(tokens).subspan(begin, std::min(window, tokens.size() - begin));
    evaluator.reset();
    evaluator.run(part, [&](int index, std::span<const float> logits) {
      const auto next = static_cast<size_t>(index) + 1;
      if (next >= part.size()) return;
      nll -= log_probability(logits, part[next]);
      ++scored;
    });
    progress.update(static_cast<double>(begin + part.size()), static_cast<double>(tokens.size()));
  }
  progress.clear();
  const double mean = nll / static_cast<double>(scored);
  if (options.json)
    std::cout << Json{{"backend", backend->name()}, {"tokens", tokens.size()}, {"scored", scored},
                      {"window", options.window},   {"mean_nll", mean},        {"perplexity", std::exp(mean)}}
                     .dump(2)
              << "\n";
  else
    std::printf("%s: %s tokens, %s scored in windows of %d: mean NLL %.5f, perplexity %.4f (%s)\n",
                options.text.c_str(), with_commas(static_cast<double>(tokens.size())).c_str(),
                with_commas(static_cast<double>(scored)).c_str(), options.window, mean, std::exp(mean),
                backend->description().c_str());
  return std::isfinite(mean) ? 0 : kExitFailure;
}

std::string top1_text(const GoldenResult& result) {
  if (!result.top1) return "-";
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "%.2f%%", 100 * *result.top1);
  return text.data();
}

int evaluate_golden(const EvalOptions& options) {
  const LoadedModel model = load_model(find_model(options.model.model));
  const auto backend = make_backend(options, model);
  GoldenOptions golden;
  golden.tolerance =
      options.model.full_precision || backend->name() == "reference" ? full_precision_tolerance() : fast_tolerance();
  golden.chunk = options.chunk;
  golden.max_heads = kHeadsAtOnce;
  const bool show = !options.model.quiet && ::isatty(STDERR_FILENO) != 0;
  golden.progress = [&](const std::string& name) {
    if (show) std::fprintf(stderr, "\r%s ...\033[K", name.c_str());
  };
  const std::vector<GoldenResult> results = run_golden(*backend, model.config.shape, options.golden, golden);
  if (show) std::fprintf(stderr, "\r\033[K");
  int failed = 0;
  Json json = Json::array();
  if (!options.json)
    std::printf("%-10s %-18s %9s %10s %10s %10s %8s %11s\n", "case", "what", "positions", "max err", "mean err",
                "relative", "top-1", "perplexity");
  for (const GoldenResult& r : results) {
    failed += !r.ok;
    if (options.json)
      json.push_back({{"case", r.name},
                      {"what", r.kind},
                      {"positions", r.positions},
                      {"max_error", r.max_error},
                      {"mean_error", r.mean_error},
                      {"relative_error", r.relative},
                      {"top1", r.top1 ? Json(*r.top1) : Json()},
                      {"perplexity_difference", r.perplexity},
                      {"ok", r.ok},
                      {"note", r.note}});
    else
      std::printf("%-10s %-18s %9d %10.2e %10.2e %10.2e %8s %+10.4f%%  %s%s%s\n", r.name.c_str(), r.kind.c_str(),
                  r.positions, r.max_error, r.mean_error, r.relative, top1_text(r).c_str(), 100 * r.perplexity,
                  r.ok ? "ok" : "FAILED", r.note.empty() ? "" : ": ", r.note.c_str());
  }
  if (options.json)
    std::cout << Json{{"backend", backend->description()}, {"failed", failed}, {"results", json}}.dump(2) << "\n";
  else
    std::printf("%zu results, %d failed (%s)\n", results.size(), failed, backend->description().c_str());
  return failed == 0 ? 0 : kExitFailure;
}

}  // namespace

void add_eval_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("eval", "Measure quality: perplexity of a text, or agreement with a golden file");
  auto options = std::make_shared<EvalOptions>();
  CLI::App* group = command->add_option_group("What to measure (one of)");
  group->add_option("--text", options->text, "Perplexity of this text file")->type_name("FILE")->check(not_empty());
  group
      ->add_option("--golden", options->golden,
                   "Compare with the outputs of another implementation; exit 1 outside tolerance")
      ->type_name("FILE")
      ->check(CLI::ExistingFile);
  group->require_option(1);
  command->footer(
      "Examples:\n"
      "  calla eval --text README.md\n"
      "  calla eval --golden models/calla-tiny/golden.safetensors\n"
      "What a golden file holds: src/selftest/golden.h. A text is scored in windows that each start from nothing.");
  command->add_option("--window", options->window, "Tokens of a window of --text")
      ->check(between(2, 1 << 20))
      ->capture_default_str();
  command->add_option("--chunk", options->chunk, "Rows of a prefill step")
      ->check(between(1, 4096))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON");
  add_model_options(*command, options->model, false);
  command->callback([options, &exit_code] {
    tell_what_auto_passes_over(options->model);
    exit_code = options->golden.empty() ? evaluate_text(*options) : evaluate_golden(*options);
  });
}

}  // namespace calla
