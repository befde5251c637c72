// calla selftest: does this build compute the right numbers on this machine? A report to paste into an issue.
#include <chrono>
#include <cstdio>
#include <map>

#include "backend/create.h"
#include "backend/weights_outline.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/cost.h"
#include "model/load_model.h"
#include "runtime/loaded_engine.h"
#include "selftest/conformance.h"
#include "selftest/evaluator.h"
#include "selftest/golden.h"
#include "selftest/speed.h"

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

// Stages of random models against the reference; golden outputs and speed of a checkpoint. Prints as it goes.
class Selftest {
 public:
  explicit Selftest(const SelftestOptions& options) : options_(options) {}

  int run() {
    const auto begin = std::chrono::steady_clock::now();
    // A model that cannot be used is no reason to wait for the stages first.
    const std::filesystem::path directory = find_model(options_.model.model);
    const LoadedModel model = load_model(directory);
    check_tokenizer(directory, model.config.shape, [&](const std::string& line) {
      if (!options_.model.quiet) std::fprintf(stderr, "warning: %s\n", line.c_str());
    });
    std::printf("calla %s selftest\nmachine: %s\n", CALLA_VERSION, describe_machine().c_str());
    conformance(tiny_shape(4), "small widths", default_batch_cases());
    if (options_.real_widths) {
      ModelShape shape = real_shape(4);
      shape.vocab = 32768;  // the head's rows are alike; a smaller one keeps this within memory and a minute
      conformance(shape, "the real model's widths", {{"decode at 3", {{3, 1}}}, {"prefill 40 at 30", {{30, 40}}}});
    }
    checkpoint(model, directory);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%s in %s\n", failed_ == 0 ? "all right" : (std::to_string(failed_) + " FAILED").c_str(),
                human_seconds(seconds).c_str());
    return failed_ == 0 ? 0 : kExitFailure;
  }

 private:
  void conformance(const ModelShape& shape, const char* what, std::vector<BatchCase> batches) {
    const RandomModel model(shape, 1);
    ConformanceOptions run;
    run.backend = backend_options(options_.model);
    run.batches = std::move(batches);
    std::string description;
    const auto results = run_conformance(
        [&](const ModelShape& s, const ModelWeights& w, const BackendOptions& o) {
          auto backend = create_backend(options_.model.backend, s, w, o);
          description = backend->description();
          return backend;
        },
        model, run);
    std::printf("backend: %s\nstages, %s, relative error against the fp32 reference:\n", description.c_str(), what);
    failed_ += print_conformance(results);
  }

  void checkpoint(const LoadedModel& model, const std::filesystem::path& directory) {
    const std::string name = directory.filename().string();
    const std::filesystem::path golden_file = directory / "golden.safetensors";
    if (std::filesystem::exists(golden_file)) {
      golden(model, name, golden_file);
    } else {
      std::printf("golden outputs: none beside %s, not checked\n", name.c_str());
    }
    speed(model, name);
  }

  void golden(const LoadedModel& model, const std::string& name, const std::filesystem::path& file) {
    GoldenOptions golden;
    golden.tolerance = options_.model.full_precision ? full_precision_tolerance() : fast_tolerance();
    BackendOptions run = backend_options(options_.model);
    run.max_rows = golden.chunk;
    run.max_heads = golden.max_heads;
    const auto backend = create_backend(options_.model.backend, model.config.shape, model.weights, run);
    std::printf("golden outputs of %s", name.c_str());
    if (is_software_device(backend->name())) {  // minutes otherwise
      golden.prefix = 64;
      golden.longest_prompt = 20;
      std::printf(" (a device in software: the first %d tokens, prompts of at most %d)", golden.prefix,
                  golden.longest_prompt);
    }
    std::printf(":\n");
    for (const GoldenResult& r : run_golden(*backend, model.config.shape, file, golden)) {
      failed_ += !r.ok;
      std::printf("  %-10s %-18s relative error %.2e, ", r.name.c_str(), r.kind.c_str(), r.relative);
      if (r.top1) std::printf("top-1 %.2f %%, ", 100 * *r.top1);
      std::printf("perplexity %+.4f %%  %s %s\n", 100 * r.perplexity, r.ok ? "ok" : "FAILED", r.note.c_str());
    }
  }

  void speed(const LoadedModel& model, const std::string& name) {
    constexpr int kPrompt = 32, kTokens = 16, kRealContext = 4096;
    const ModelShape& shape = model.config.shape;
    BackendOptions run = backend_options(options_.model);
    run.max_rows = kPrompt;
    run.max_heads = 1;
    const auto backend = create_backend(options_.model.backend, shape, model.weights, run);
    Evaluator evaluator(*backend, shape, kPrompt + 2 * kTokens, kPrompt, 1);
    evaluator.pick(std::vector<TokenId>(kPrompt, 1));
    evaluator.decode(kTokens);
    const auto begin = std::chrono::steady_clock::now();
    evaluator.decode(kTokens);
    const double measured = kTokens / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

    const double bandwidth = backend->probe_read_bandwidth();
    std::printf("speed:\n  read bandwidth, measured       %s\n  %s, decode, measured   %s tokens/s\n",
                bandwidth > 0 ? (with_commas(bandwidth / 1e9, 1) + " GB/s").c_str() : "unknown", name.c_str(),
                with_commas(measured, 1).c_str());
    if (bandwidth <= 0) return;
    const auto predict = [&](const ModelShape& of, const ModelWeights& weights, int context, const std::string& what) {
      const auto bytes = static_cast<double>(decode_bytes(of, weights, context).total());
      std::printf("  %s, decode, predicted  %s tokens/s (%s a token; at most %s)\n", what.c_str(),
                  with_commas(predicted_decode_rate(backend->name(), of, bytes, bandwidth), 1).c_str(),
                  human_bytes(bytes).c_str(), with_commas(decode_limit(bytes, bandwidth), 1).c_str());
    };
    predict(shape, model.weights, kPrompt + kTokens, name);
    const ModelShape real = real_shape(40);
    predict(real, outline_weights(real, 1), kRealContext, "Qwen3.6-35B-A3B at 4K");
  }

  const SelftestOptions& options_;
  int failed_ = 0;
};

}  // namespace

void add_selftest_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("selftest", "Check each stage and the golden outputs on this machine; prints a report");
  auto options = std::make_shared<SelftestOptions>();
  command->add_flag("--real-widths", options->real_widths,
                    "Also check stages at the real model's widths (2 GB, a minute)");
  add_model_options(*command, options->model, false);
  command->callback([options, &exit_code] {
    tell_what_auto_passes_over(options->model);
    exit_code = Selftest(*options).run();
  });
}

}  // namespace calla
