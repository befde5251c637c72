// calla selftest: does this build compute the right numbers on this machine? A report to paste into an issue.
#include <chrono>
#include <cstdio>
#include <map>

#include "backend/create.h"
#include "base/error.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/load_model.h"
#include "selftest/conformance.h"
#include "selftest/golden.h"

namespace calla {
namespace {

struct SelftestOptions {
  ModelOptions model;
  bool real_widths = false;
};

// The worst result of each stage.
int print_conformance(const std::vector<StageResult>& results) {
  std::map<std::string, const StageResult*> worst;
  int failed = 0;
  for (const StageResult& r : results) {
    const StageResult*& w = worst[r.stage + " -> " + r.what];
    if (!w || r.error > w->error) w = &r;
    failed += !r.ok;
  }
  for (const auto& [stage, r] : worst)
    std::printf("  %-36s %10.2e  (at most %.0e)  %s\n", stage.c_str(), r->error, r->tolerance,
                r->ok ? "ok" : ("FAILED: " + r->batch).c_str());
  return failed;
}

int selftest(const SelftestOptions& options) {
  const auto begin = std::chrono::steady_clock::now();
  std::printf("calla %s selftest\nmachine: %s\n", CALLA_VERSION, describe_machine().c_str());
  int failed = 0;

  const auto conformance = [&](const ModelShape& shape, const char* what, std::vector<BatchCase> batches) {
    const RandomModel model(shape, 1);
    ConformanceOptions run;
    run.backend.threads = options.model.threads;
    run.backend.full_precision = options.model.full_precision;
    run.backend.ablate = options.model.ablate;
    run.batches = std::move(batches);
    std::string description;
    const auto results = run_conformance(
        [&](const ModelShape& s, const ModelWeights& w, const BackendOptions& o) {
          auto backend = create_backend(options.model.backend, s, w, o);
          description = backend->description();
          return backend;
        },
        model, run);
    std::printf("backend: %s\nstages, %s, relative error against the fp32 reference:\n", description.c_str(), what);
    failed += print_conformance(results);
  };
  conformance(tiny_shape(4), "small widths", default_batch_cases());
  if (options.real_widths) {
    ModelShape shape = real_shape(4);
    shape.vocab = 32768;  // the head's rows are alike; a smaller one keeps this within memory and a minute
    conformance(shape, "the real model's widths", {{"decode at 3", {{3, 1}}}, {"prefill 40 at 30", {{30, 40}}}});
  }

  const std::filesystem::path directory = find_model(options.model.model);
  const std::filesystem::path golden_file = directory / "golden.safetensors";
  if (std::filesystem::exists(golden_file)) {
    const LoadedModel model = load_model(directory);
    GoldenOptions golden;
    golden.tolerance = options.model.full_precision ? full_precision_tolerance() : fast_tolerance();
    BackendOptions backend_options;
    backend_options.threads = options.model.threads;
    backend_options.full_precision = options.model.full_precision;
    backend_options.ablate = options.model.ablate;
    backend_options.max_rows = golden.chunk;
    backend_options.max_heads = golden.max_heads;
    const auto backend = create_backend(options.model.backend, model.config.shape, model.weights, backend_options);
    std::printf("golden outputs of %s:\n", directory.filename().c_str());
    for (const GoldenResult& r : run_golden(*backend, model.config.shape, golden_file, golden)) {
      failed += !r.ok;
      std::printf("  %-10s %-18s relative error %.2e, ", r.name.c_str(), r.kind.c_str(), r.relative);
      if (r.top1) std::printf("top-1 %.2f %%, ", 100 * *r.top1);
      std::printf("perplexity %+.4f %%  %s %s\n", 100 * r.perplexity, r.ok ? "ok" : "FAILED", r.note.c_str());
    }
  } else {
    std::printf("golden outputs: none beside %s, not checked\n", directory.filename().c_str());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("%s in %s\n", failed == 0 ? "all right" : (std::to_string(failed) + " FAILED").c_str(),
              human_seconds(seconds).c_str());
  return failed == 0 ? 0 : kExitFailure;
}

}  // namespace

void add_selftest_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("selftest", "Check each stage and the golden outputs on this machine; prints a report");
  auto options = std::make_shared<SelftestOptions>();
  command->add_flag("--real-widths", options->real_widths,
                    "Also check stages at the real model's widths (2 GB, a minute)");
  add_model_options(*command, options->model, false);
  command->callback([options, &exit_code] { exit_code = selftest(*options); });
}

}  // namespace calla
