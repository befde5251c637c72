#include <algorithm>
#include <iostream>

#include "backend/create.h"
#include "base/error.h"
#include "cli/bench.h"
#include "cli/bench_report.h"
#include "cli/terminal.h"

namespace calla {
namespace {

// What `--ablate` can switch off on this backend.
std::vector<std::string> mechanisms_of(const std::string& backend) {
  for (const BackendInfo& info : list_backends())
    if (info.name == backend) return info.ablations;
  return {};
}

// One length: the subjects take turns, and who begins alternates.
AblationRow::Rates measure(BenchSubject& with, BenchSubject& without, const BenchOptions& options, size_t point) {
  const auto rate = [&](BenchSubject& subject) {
    if (point < options.prompts.size()) return subject.prefill_rate(options.prompts[point]);
    subject.fill(options.contexts[point - options.prompts.size()]);
    return subject.decode_rate(options.decode_tokens);
  };
  std::vector<double> with_rates, without_rates;
  for (int round = 0; round < options.repetitions; ++round) {
    if (round % 2 == 0) with_rates.push_back(rate(with));
    without_rates.push_back(rate(without));
    if (round % 2 == 1) with_rates.push_back(rate(with));
  }
  return {median(with_rates), median(without_rates)};
}

}  // namespace

int bench_ablations(const BenchOptions& options) {
  if (options.model.ablate.size() != 1) throw UsageError("--ablate all stands for every mechanism; give no other");
  if (!options.svg_file.empty()) throw UsageError("--ablate all has no plot; leave --svg out");
  const std::filesystem::path directory = find_model(options.model.model);
  const LoadedModel model = load_model(directory);
  BenchSubject shipped(model, options, {});
  const std::string backend = shipped.backend().name();
  const std::vector<std::string> mechanisms = mechanisms_of(backend);
  if (mechanisms.empty()) throw UsageError("--ablate all: the " + backend + " backend has nothing to switch off");

  AblationReport report;
  report.model = directory.filename().string();
  report.backend = shipped.backend().description();
  report.repetitions = options.repetitions;
  report.prompts = options.prompts;
  report.contexts = options.contexts;
  const size_t points = options.prompts.size() + options.contexts.size();
  ProgressLine progress("measuring", "", !options.model.quiet);
  double done = 0;
  int exit_code = 0;
  shipped.warm_up();
  for (const std::string& mechanism : mechanisms) {
    AblationRow& row = report.rows.emplace_back();
    row.mechanism = mechanism;
    try {
      BenchSubject without(model, options, {mechanism});
      without.warm_up();
      for (size_t point = 0; point < points; ++point) {
        row.at.push_back(measure(shipped, without, options, point));
        progress.update(++done, static_cast<double>(mechanisms.size() * points));
      }
    } catch (
        const DeviceError& error) {  // a control may need memory that the machine lacks; the other rows still count
      row.at.clear();
      row.problem = error.what();
      exit_code = kExitDevice;
    }
  }
  progress.clear();
  if (!options.json_file.empty()) write_bench_file(options.json_file, ablation_json(report));
  std::cout << (options.json ? ablation_json(report) : ablation_table(report));
  return exit_code;
}

}  // namespace calla
