// calla bench: prefill and decode speed over lengths, beside the limit that the counted bytes set.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>
#include <system_error>

#include "base/error.h"
#include "base/is_there.h"
#include "base/median.h"
#include "cli/bench_report.h"
#include "cli/bench_subject.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/terminal.h"
#include "model/cost.h"
#include "selftest/evaluator.h"

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmUpPrompt = 64;
constexpr int kWarmUpSteps = 4;

struct BenchOptions {
  ModelOptions model;
  std::vector<int> prompts = {256, 512, 1024};
  std::vector<int> contexts = {0, 1024, 4096};
  int repetitions = 3;
  int decode_tokens = 32;
  int chunk = 0;  // 0: as the engine reads prompts on the backend
  std::string synthetic;
  int layers = 0;
  bool profile = false;
  bool probe = true;  // the bandwidth, before each decode; comparisons need none
  bool json = false;
  std::string json_file, svg_file;
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

BenchPoint summarise(int tokens, std::vector<double> rates) {
  std::sort(rates.begin(), rates.end());
  BenchPoint point;
  point.tokens = tokens;
  point.tokens_per_s = median(rates);
  point.low = rates.front();
  point.high = rates.back();
  return point;
}

void write_file(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw Error(path + " cannot be written: " + std::strerror(errno));
}

// Lengths of a benchmark on one backend, measured in rounds.
class Bench {
 public:
  Bench(const BenchOptions& options, const BenchSubject& subject)
      : options_(options), subject_(subject), progress_("measuring", "", !options.model.quiet) {
    const auto begin = Clock::now();
    BackendOptions run = backend_options(options.model);
    run.max_rows = options.chunk;
    run.max_heads = 1;
    backend_ = subject.make_backend(run);
    const int longest =
        std::max(*std::max_element(options.prompts.begin(), options.prompts.end()),
                 *std::max_element(options.contexts.begin(), options.contexts.end()) + options.decode_tokens + 3);
    const ModelShape& shape = subject.shape();
    if (longest > shape.max_context)
      throw UsageError("the model's context holds " + std::to_string(shape.max_context) + " tokens; a length of " +
                       std::to_string(longest) + " does not fit");
    evaluator_.emplace(*backend_, shape, std::max(longest, kWarmUpPrompt + kWarmUpSteps), options.chunk, 1);
    std::mt19937 random(1);
    tokens_.resize(static_cast<size_t>(longest));
    for (TokenId& token : tokens_) token = static_cast<TokenId>(random() % static_cast<unsigned>(shape.vocab));
    report_.load_seconds = seconds_since(begin);
  }

  // All rounds; may be called again.
  BenchReport run() {
    report_.prefill.clear();
    report_.decode.clear();
    report_.profiles.clear();
    report_.machine = describe_machine();
    report_.model = subject_.name();
    report_.backend = backend_->description();
    report_.repetitions = options_.repetitions;
    report_.bytes_per_token = bytes_at(0);
    // Warm-up: pages in, caches and clocks up, and recorded steps recorded.
    evaluator_->reset();
    evaluator_->pick(take(std::min(static_cast<int>(tokens_.size()), kWarmUpPrompt)));
    evaluator_->decode(kWarmUpSteps);

    std::vector<std::vector<double>> prefill(options_.prompts.size()), decode(options_.contexts.size()),
        bandwidth(options_.contexts.size());
    const double work = options_.repetitions * static_cast<double>(prefill.size() + decode.size());
    double done = 0;
    for (int round = 0; round < options_.repetitions; ++round) {
      // Every other round runs backwards, so that drift does not favour one length.
      const auto order = [&](size_t i, size_t n) { return round % 2 ? n - 1 - i : i; };
      for (size_t k = 0; k < prefill.size(); ++k) {
        const size_t i = order(k, prefill.size());
        prefill[i].push_back(prefill_rate(options_.prompts[i]));
        progress_.update(++done, work);
      }
      for (size_t k = 0; k < decode.size(); ++k) {
        const size_t i = order(k, decode.size());
        start_at(options_.contexts[i]);
        bandwidth[i].push_back(options_.probe ? backend_->probe_read_bandwidth() : 0);
        decode[i].push_back(decode_rate());
        progress_.update(++done, work);
      }
    }
    std::vector<double> all;
    for (size_t i = 0; i < prefill.size(); ++i) report_.prefill.push_back(summarise(options_.prompts[i], prefill[i]));
    for (size_t i = 0; i < decode.size(); ++i) {
      BenchPoint point = summarise(options_.contexts[i], decode[i]);
      point.limit = median(bandwidth[i]) / bytes_at(options_.contexts[i]);
      report_.decode.push_back(point);
      all.insert(all.end(), bandwidth[i].begin(), bandwidth[i].end());
    }
    report_.read_bandwidth = median(all);
    if (options_.profile) profile();
    progress_.clear();
    return report_;
  }

 private:
  std::span<const TokenId> take(int n) const { return std::span(tokens_).first(static_cast<size_t>(n)); }
  double bytes_at(int context) const {
    return static_cast<double>(decode_bytes(subject_.shape(), subject_.weights(), context).total());
  }

  double prefill_rate(int tokens) {
    evaluator_->reset();
    const auto start = Clock::now();
    evaluator_->pick(take(tokens));
    return tokens / seconds_since(start);
  }

  // A sequence of `context` tokens and one more, with a step behind it.
  void start_at(int context) {
    evaluator_->reset();
    evaluator_->pick(take(context + 1));
    evaluator_->decode(1);
  }

  double decode_rate() {
    const auto start = Clock::now();
    evaluator_->decode(options_.decode_tokens);
    return options_.decode_tokens / seconds_since(start);
  }

  // One token at the longest context, and one chunk of a prompt.
  void profile() {
    const int context = *std::max_element(options_.contexts.begin(), options_.contexts.end());
    const int rows = std::min(*std::max_element(options_.prompts.begin(), options_.prompts.end()), options_.chunk);
    start_at(context);
    report_.profiles.push_back({"decode, a token at context " + std::to_string(context), true,
                                backend_->profile([&] { evaluator_->step(); })});
    evaluator_->reset();
    report_.profiles.push_back({"prefill, a chunk of " + std::to_string(rows) + " tokens", false,
                                backend_->profile([&] { evaluator_->pick(take(rows)); })});
    if (report_.profiles.front().kernels.empty()) {
      report_.profiles.clear();
      progress_.clear();
      std::fprintf(stderr, "--profile: the %s backend cannot tell where its time goes\n", backend_->name().c_str());
    }
  }

  const BenchOptions& options_;
  const BenchSubject& subject_;
  ProgressLine progress_;
  std::unique_ptr<Backend> backend_;
  std::optional<Evaluator> evaluator_;
  std::vector<TokenId> tokens_;
  BenchReport report_;
};

// So that a path that cannot be written does not cost a measurement. What is there, or is not, stays so until there is
// something new.
void check_writable(const std::string& path) {
  if (path.empty()) return;
  const bool is_new = !is_there(path);
  errno = 0;
  if (!std::ofstream(path, std::ios::app)) throw Error(path + " cannot be written: " + std::strerror(errno));
  std::error_code ignored;
  if (is_new) std::filesystem::remove(path, ignored);
}

int bench(const BenchOptions& options) {
  if (!options.svg_file.empty() && options.svg_file == options.json_file)
    throw UsageError("--json-file and --svg name one file; each needs its own");
  check_writable(options.json_file);
  check_writable(options.svg_file);
  const BenchSubject subject(options.model, options.synthetic, options.layers);
  const BenchReport report = Bench(options, subject).run();
  // Before the files, for which the disk may have become too small.
  std::cout << (options.json ? bench_json(report) : bench_table(report)) << std::flush;
  if (!options.json_file.empty()) write_file(options.json_file, bench_json(report));
  if (!options.svg_file.empty()) write_file(options.svg_file, bench_svg(report));
  return 0;
}

// `--ablate all`: every mechanism of the backend switched off in turn, beside the same lengths with all of them on. The
// two take turns, and who begins alternates.
int bench_ablations(const BenchOptions& options) {
  if (options.model.ablate.size() != 1) throw UsageError("--ablate all stands for every mechanism; give no other");
  if (!options.svg_file.empty()) throw UsageError("--ablate all has no plot; leave --svg out");
  if (options.profile) throw UsageError("--ablate all has no profile; name one mechanism, or leave --profile out");
  const BackendInfo backend = choose_backend(options.model.backend);
  if (backend.ablations.empty())
    throw UsageError("--ablate all: the " + backend.name + " backend has nothing to switch off");
  check_writable(options.json_file);
  const BenchSubject subject(options.model, options.synthetic, options.layers);
  BenchOptions once = options;
  once.repetitions = 1;
  once.probe = false;
  once.model.quiet = true;
  once.model.ablate.clear();
  Bench shipped(once, subject);
  AblationReport report;
  report.repetitions = options.repetitions;
  report.prompts = options.prompts;
  report.contexts = options.contexts;
  ProgressLine progress("measuring", "", !options.model.quiet);
  double done = 0;
  int exit_code = 0;
  for (const std::string& mechanism : backend.ablations) {
    AblationRow& row = report.rows.emplace_back();
    row.mechanism = mechanism;
    BenchOptions ablated = once;
    ablated.model.ablate = {mechanism};
    try {
      Bench without(ablated, subject);
      const size_t points = options.prompts.size() + options.contexts.size();
      std::vector<std::vector<double>> rates[2] = {std::vector<std::vector<double>>(points),
                                                   std::vector<std::vector<double>>(points)};
      for (int turn = 0; turn < 2 * options.repetitions; ++turn) {
        const int which = (turn + turn / 2) % 2;  // 0: with, 1: without
        const BenchReport run = (which == 0 ? shipped : without).run();
        if (which == 0) report.model = run.model, report.backend = run.backend;
        for (size_t i = 0; i < points; ++i) {
          const bool is_prompt = i < run.prefill.size();
          rates[which][i].push_back(is_prompt ? run.prefill[i].tokens_per_s
                                              : run.decode[i - run.prefill.size()].tokens_per_s);
        }
        progress.update(++done, 2.0 * options.repetitions * static_cast<double>(backend.ablations.size()));
      }
      for (size_t i = 0; i < points; ++i) row.at.push_back({median(rates[0][i]), median(rates[1][i])});
    } catch (
        const DeviceError& error) {  // a control may need memory that the machine lacks; the other rows still count
      row.problem = error.what();
      exit_code = kExitDevice;
    }
  }
  progress.clear();
  std::cout << (options.json ? ablation_json(report) : ablation_table(report)) << std::flush;
  if (!options.json_file.empty()) write_file(options.json_file, ablation_json(report));
  return exit_code;
}

// Lines for --help. Only for it: looking for the backends wakes their drivers.
std::string list_ablations() {
  std::string lines;
  for (const BackendInfo& info : list_backends()) {
    if (info.ablations.empty()) continue;
    std::string line = "\n  " + info.name + ":";
    for (const std::string& name : info.ablations) {
      if (line.size() - line.rfind('\n') + name.size() > 110) line += "\n     ";
      line += " " + name;
    }
    lines += line;
  }
  return lines;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("bench", "Measure prefill and decode speed over lengths");
  auto options = std::make_shared<BenchOptions>();
  std::string shapes;
  for (const std::string& name : shape_names()) shapes += (shapes.empty() ? "" : ", ") + name;
  const auto lengths = [&](const char* name, std::vector<int>& list, const char* help, int least) {
    command->add_option(name, list, help)->delimiter(',')->check(between(least, 1 << 20))->capture_default_str();
  };
  lengths("--prompts", options->prompts, "Prompt lengths for prefill, in tokens", 1);
  lengths("--contexts", options->contexts, "Context lengths for decode, in tokens", 0);
  command->add_option("-r,--repetitions", options->repetitions, "Rounds over all lengths; medians are shown")
      ->check(between(1, 100))
      ->capture_default_str();
  command->add_option("--decode-tokens", options->decode_tokens, "Tokens to decode at each context length")
      ->check(between(1, 4096))
      ->capture_default_str();
  command->add_option("--chunk", options->chunk, "Rows of a prefill step (default: as the engine on this backend)")
      ->check(between(1, 8192));
  CLI::Option* const synthetic =
      command
          ->add_option("--synthetic", options->synthetic,
                       "Random weights of this shape instead of a model: " + shapes + "; made in seconds")
          ->type_name("SHAPE");
  command->add_option("--layers", options->layers, "With --synthetic: this many layers (default: all)")
      ->check(between(1, 1000))
      ->needs(synthetic);
  command->add_flag("--profile", options->profile,
                    "Also show where the time goes: kernel by kernel (cuda) or stage by stage (cpu)");
  command->add_flag("--json", options->json, "Print JSON instead of the table");
  command->add_option("--json-file", options->json_file, "Also write the JSON here")
      ->check(not_empty())
      ->type_name("FILE");
  command->add_option("--svg", options->svg_file, "Also plot to this SVG file")->check(not_empty())->type_name("FILE");
  command->footer("");  // not the program's
  command->footer([] {
    return "The limit is what moving the counted bytes of a token (weights, states, KV rows) takes at the read\n"
           "bandwidth that is probed just before each measurement. --ablate all measures every mechanism of the\n"
           "backend: once switched off, once on, taking turns. What --ablate can switch off:" +
           list_ablations();
  });
  add_model_options(*command, options->model, false);
  command->callback([options, &exit_code] {
    tell_what_auto_passes_over(options->model);
    if (options->chunk == 0) options->chunk = choose_backend(options->model.backend).prefill_rows;
    const auto& ablate = options->model.ablate;
    const bool all = std::find(ablate.begin(), ablate.end(), "all") != ablate.end();
    exit_code = all ? bench_ablations(*options) : bench(*options);
  });
}

}  // namespace calla
