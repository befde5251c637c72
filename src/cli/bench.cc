// calla bench: prefill and decode speed over lengths, beside the limit that the counted bytes set.
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "base/machine.h"
#include "cli/bench.h"
#include "cli/bench_report.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "model/cost.h"
#include "selftest/bandwidth.h"

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

BenchPoint summarise(int tokens, std::vector<double> rates) {
  std::sort(rates.begin(), rates.end());
  BenchPoint point;
  point.tokens = tokens;
  point.tokens_per_s = median(rates);
  point.low = rates.front();
  point.high = rates.back();
  return point;
}

int bench(const BenchOptions& options) {
  const auto begin = Clock::now();
  const std::filesystem::path directory = find_model(options.model.model);
  const LoadedModel model = load_model(directory);
  const ModelShape& shape = model.config.shape;
  BenchSubject subject(model, options, options.model.ablate);
  BenchReport report;
  report.load_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  report.model = directory.filename().string();
  report.backend = subject.backend().description();
  report.machine = machine_description();
  report.repetitions = options.repetitions;
  report.bytes_per_token = static_cast<double>(decode_bytes(shape, model.weights, 0).total());

  ProgressLine progress("measuring", "", !options.model.quiet);
  const double work = options.repetitions * static_cast<double>(options.prompts.size() + options.contexts.size());
  double done = 0;
  subject.warm_up();

  const std::function<double()> probe = bandwidth_probe(subject.backend().name(), options.model.threads);
  std::vector<double> bandwidths;
  std::vector<std::vector<double>> prefill(options.prompts.size()), decode(options.contexts.size());
  std::vector<std::vector<double>> bandwidth_at(options.contexts.size());
  for (int round = 0; round < options.repetitions; ++round) {
    // Every other round runs backwards, so that drift does not favour one length.
    const auto order = [&](size_t i, size_t n) { return round % 2 ? n - 1 - i : i; };
    for (size_t k = 0; k < options.prompts.size(); ++k) {
      const size_t i = order(k, options.prompts.size());
      prefill[i].push_back(subject.prefill_rate(options.prompts[i]));
      progress.update(++done, work);
    }
    for (size_t k = 0; k < options.contexts.size(); ++k) {
      const size_t i = order(k, options.contexts.size());
      subject.fill(options.contexts[i]);
      if (probe) {
        bandwidth_at[i].push_back(probe());
        bandwidths.push_back(bandwidth_at[i].back());
      }
      decode[i].push_back(subject.decode_rate(options.decode_tokens));
      progress.update(++done, work);
    }
  }
  progress.clear();
  for (size_t i = 0; i < prefill.size(); ++i) report.prefill.push_back(summarise(options.prompts[i], prefill[i]));
  for (size_t i = 0; i < decode.size(); ++i) {
    BenchPoint point = summarise(options.contexts[i], decode[i]);
    if (probe) {
      const double bytes = static_cast<double>(decode_bytes(shape, model.weights, options.contexts[i]).total());
      point.limit = median(bandwidth_at[i]) / bytes;
    }
    report.decode.push_back(point);
  }
  if (!bandwidths.empty()) report.read_bandwidth = median(bandwidths);
  if (!options.json_file.empty()) write_bench_file(options.json_file, bench_json(report));
  if (!options.svg_file.empty()) write_bench_file(options.svg_file, bench_svg(report));
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
      "is probed just before each measurement. --ablate all measures every mechanism of the backend: once switched "
      "off,\n"
      "once on, in alternating order.");
  add_model_options(*command, options->model);
  command->callback([options, &exit_code] {
    const auto& ablate = options->model.ablate;
    const bool all = std::find(ablate.begin(), ablate.end(), "all") != ablate.end();
    exit_code = all ? bench_ablations(*options) : bench(*options);
  });
}

}  // namespace calla
