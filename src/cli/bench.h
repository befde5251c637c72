#pragma once
// The parts of `calla bench`: what the command line asks for, the two measurements, and the run over all ablations.
#include <filesystem>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "cli/options.h"
#include "model/load_model.h"
#include "selftest/evaluator.h"

namespace calla {

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

// A backend with a sequence of random tokens, ready to be timed.
class BenchSubject {
 public:
  // `ablate`: mechanisms switched off. Throws UsageError if the model's context does not hold the lengths asked for.
  BenchSubject(const LoadedModel& model, const BenchOptions& options, const std::vector<std::string>& ablate);

  Backend& backend() { return *backend_; }
  double prefill_rate(int tokens);  // of a prompt, up to the first token of the answer; tokens/s
  void fill(int context);           // puts `context` tokens into the sequence, for decode_rate
  double decode_rate(int tokens);   // tokens/s
  void warm_up();                   // pages in, caches and clocks up

 private:
  std::span<const TokenId> take(int count) const { return std::span(tokens_).first(static_cast<size_t>(count)); }

  std::unique_ptr<Backend> backend_;
  std::vector<TokenId> tokens_;
  std::optional<Evaluator> evaluator_;
};

double median(std::vector<double> values);

// Prints `text`, or writes it to a file.
void write_bench_file(const std::string& path, const std::string& text);

// `calla bench --ablate all`: every mechanism of the backend switched off in turn, beside the same run with all of them
// on, in alternating order. The exit code.
int bench_ablations(const BenchOptions& options);

}  // namespace calla
