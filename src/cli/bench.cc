// calla bench: prefill and decode speed over lengths, beside the limit that the counted bytes set.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <random>

#include "backend/create.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "cli/bench_report.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/cost.h"
#include "model/load_model.h"
#include "selftest/bandwidth.h"
#include "selftest/evaluator.h"

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

struct BenchOptions {
  ModelOptions model;
  std::vector<int> prompts = {256, 512, 1024};
  std::vector<int> contexts = {0, 1024, 4096};
  int repetitions = 3;
  int decode_tokens = 32;
  int chunk = 512;
  bool json = false;
  std::string json_file, svg_file;
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

BenchPoint summarise(int tokens, std::vector<double> rates) {
  std::sort(rates.begin(), rates.end());
  BenchPoint point;
  point.tokens = tokens;
  point.tokens_per_s = rates[rates.size() / 2];
  point.low = rates.front();
  point.high = rates.back();
  return point;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw Error(path + " cannot be written");
}

int bench(const BenchOptions& options) {
  const auto begin = Clock::now();
  const std::filesystem::path directory = find_model(options.model.model);
  const LoadedModel model = load_model(directory);
  const ModelShape& shape = model.config.shape;
  BackendOptions backend_options;
  backend_options.threads = options.model.threads;
  backend_options.full_precision = options.model.full_precision;
  backend_options.ablate = options.model.ablate;
  backend_options.max_rows = options.chunk;
  backend_options.max_heads = 1;
  const auto backend = create_backend(options.model.backend, shape, model.weights, backend_options);
  const int longest =
      std::max(*std::max_element(options.prompts.begin(), options.prompts.end()),
               *std::max_element(options.contexts.begin(), options.contexts.end()) + options.decode_tokens + 2);
  if (longest > shape.max_context)
    throw UsageError("the model's context holds " + std::to_string(shape.max_context) + " tokens; a length of " +
                     std::to_string(longest) + " does not fit");
  Evaluator evaluator(*backend, shape, longest, options.chunk, 1);
  BenchReport report;
  report.load_seconds = seconds_since(begin);
  report.model = directory.filename().string();
  report.backend = backend->description();
  report.repetitions = options.repetitions;
  report.bytes_per_token = static_cast<double>(decode_bytes(shape, model.weights, 0).total());

  std::mt19937 random(1);
  std::vector<TokenId> tokens(static_cast<size_t>(longest));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % static_cast<unsigned>(shape.vocab));
  const auto take = [&](int n) { return std::span<const TokenId>(tokens).first(static_cast<size_t>(n)); };
  ProgressLine progress("measuring", "", !options.model.quiet);
  const double work = options.repetitions * static_cast<double>(options.prompts.size() + options.contexts.size());
  double done = 0;

  // Warm-up: pages in, caches and clocks up.
  evaluator.pick(take(std::min(longest, 64)));
  for (int i = 0; i < 4; ++i) evaluator.step();

  const bool probe = backend->name() == "cpu";
  std::vector<double> bandwidths;
  std::vector<std::vector<double>> prefill(options.prompts.size()), decode(options.contexts.size());
  std::vector<std::vector<double>> bandwidth_at(options.contexts.size());
  for (int round = 0; round < options.repetitions; ++round) {
    // Every other round runs backwards, so that drift does not favour one length.
    const auto order = [&](size_t i, size_t n) { return round % 2 ? n - 1 - i : i; };
    for (size_t k = 0; k < options.prompts.size(); ++k) {
      const size_t i = order(k, options.prompts.size());
      evaluator.reset();
      const auto start = Clock::now();
      evaluator.pick(take(options.prompts[i]));
      prefill[i].push_back(options.prompts[i] / seconds_since(start));
      progress.update(++done, work);
    }
    for (size_t k = 0; k < options.contexts.size(); ++k) {
      const size_t i = order(k, options.contexts.size());
      evaluator.reset();
      evaluator.pick(take(options.contexts[i] + 1));
      evaluator.step();
      if (probe) {
        // Threads of its own: the backend's sleep meanwhile.
        ThreadPool pool(options.model.threads);
        bandwidth_at[i].push_back(probe_read_bandwidth(pool));
        bandwidths.push_back(bandwidth_at[i].back());
      }
      const auto start = Clock::now();
      for (int t = 0; t < options.decode_tokens; ++t) evaluator.step();
      decode[i].push_back(options.decode_tokens / seconds_since(start));
      progress.update(++done, work);
    }
  }
  progress.clear();
  for (size_t i = 0; i < prefill.size(); ++i) report.prefill.push_back(summarise(options.prompts[i], prefill[i]));
  for (size_t i = 0; i < decode.size(); ++i) {
    BenchPoint point = summarise(options.contexts[i], decode[i]);
    if (probe) {
      std::sort(bandwidth_at[i].begin(), bandwidth_at[i].end());
      const double bytes = static_cast<double>(decode_bytes(shape, model.weights, options.contexts[i]).total());
      point.limit = bandwidth_at[i][bandwidth_at[i].size() / 2] / bytes;
    }
    report.decode.push_back(point);
  }
  if (probe) {
    std::sort(bandwidths.begin(), bandwidths.end());
    report.read_bandwidth = bandwidths[bandwidths.size() / 2];
  }
  if (!options.json_file.empty()) write_file(options.json_file, bench_json(report));
  if (!options.svg_file.empty()) write_file(options.svg_file, bench_svg(report));
  std::cout << (options.json ? bench_json(report) : bench_table(report));
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Measure prefill and decode speed over lengths");
  auto options = std::make_shared<BenchOptions>();
  const auto lengths = [&](const char* name, std::vector<int>& list, const char* help, int least) {
    command->add_option(name, list, help)->delimiter(',')->check(CLI::Range(least, 1 << 20))->capture_default_str();
  };
  lengths("--prompts", options->prompts, "Prompt lengths for prefill, in tokens", 1);
  lengths("--contexts", options->contexts, "Context lengths for decode, in tokens", 0);
  command->add_option("-r,--repetitions", options->repetitions, "Rounds over all lengths; medians are shown")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  command->add_option("--decode-tokens", options->decode_tokens, "Tokens to decode at each context length")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--chunk", options->chunk, "Rows of a prefill step")
      ->check(CLI::Range(1, 8192))
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print JSON instead of the table");
  command->add_option("--json-file", options->json_file, "Also write the JSON here")->type_name("FILE");
  command->add_option("--svg", options->svg_file, "Also plot to this SVG file")->type_name("FILE");
  command->footer(
      "The limit is what moving the counted bytes of a token (weights, states, KV rows) takes at the read bandwidth "
      "that\n"
      "is probed just before each measurement.");
  add_model_options(*command, options->model);
  command->callback([options, &exit_code] { exit_code = bench(*options); });
}

}  // namespace calla
