#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>

#include "backend/create.h"
#include "base/error.h"
#include "cli/bench.h"

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

int longest_sequence(const BenchOptions& options, const ModelShape& shape) {
  int longest = 0;
  for (int prompt : options.prompts) longest = std::max(longest, prompt);
  for (int context : options.contexts) longest = std::max(longest, context + options.decode_tokens + 2);
  if (longest > shape.max_context)
    throw UsageError("the model's context holds " + std::to_string(shape.max_context) + " tokens; a length of " +
                     std::to_string(longest) + " does not fit");
  return longest;
}

}  // namespace

BenchSubject::BenchSubject(const LoadedModel& model, const BenchOptions& options,
                           const std::vector<std::string>& ablate) {
  const ModelShape& shape = model.config.shape;
  const int longest = longest_sequence(options, shape);
  BackendOptions backend_options;
  backend_options.threads = options.model.threads;
  backend_options.full_precision = options.model.full_precision;
  backend_options.ablate = ablate;
  backend_options.max_rows = options.chunk;
  backend_options.max_heads = 1;
  backend_ = create_backend(options.model.backend, shape, model.weights, backend_options);
  evaluator_.emplace(*backend_, shape, longest, options.chunk, 1);
  std::mt19937 random(1);
  tokens_.resize(static_cast<size_t>(longest));
  for (TokenId& token : tokens_) token = static_cast<TokenId>(random() % static_cast<unsigned>(shape.vocab));
}

double BenchSubject::prefill_rate(int tokens) {
  evaluator_->reset();
  const auto start = Clock::now();
  evaluator_->pick(take(tokens));
  return tokens / seconds_since(start);
}

void BenchSubject::fill(int context) {
  evaluator_->reset();
  evaluator_->pick(take(context + 1));
  evaluator_->step();
}

double BenchSubject::decode_rate(int tokens) {
  const auto start = Clock::now();
  evaluator_->decode(tokens);
  return tokens / seconds_since(start);
}

void BenchSubject::warm_up() {
  evaluator_->reset();
  evaluator_->pick(take(static_cast<int>(std::min<size_t>(tokens_.size(), 64))));
  if (tokens_.size() > 64 + 4) evaluator_->decode(4);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void write_bench_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw Error(path + " cannot be written");
}

}  // namespace calla
