// cpu_stages: speed of the cpu backend on a random model of the real widths, stage by stage, beside a probe
// of the read bandwidth in the same run. Usage:
//   cpu_stages [--layers 8] [--threads 0] [--depth 0,4096] [--prefill 512,256] [--steps 64] [--batch 1]
//              [--ablate name] [--full] [--sample]
// The limit of decode is (weights + states + KV rows, read and written) / probed bandwidth.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "base/median.h"
#include "model/forward.h"
#include "selftest/random_model.h"

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Arguments {
  int layers = 8, threads = 0, steps = 64, batch = 1;
  std::vector<int> depths = {0, 4096}, prefills = {512, 256};
  std::vector<std::string> ablate;
  bool full = false, sample = false;
};

std::vector<int> numbers(const char* text) {
  std::vector<int> out;
  for (const char* p = text; *p != '\0';) {
    char* end = nullptr;
    const auto value = std::strtol(p, &end, 10);
    if (end == p) break;
    out.push_back(static_cast<int>(value));
    p = *end == ',' ? end + 1 : end;
  }
  return out;
}

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--full") {
      a.full = true;
      continue;
    }
    if (name == "--sample") {
      a.sample = true;
      continue;
    }
    if (i + 1 == argc) break;
    const char* value = argv[++i];
    if (name == "--layers")
      a.layers = std::atoi(value);
    else if (name == "--threads")
      a.threads = std::atoi(value);
    else if (name == "--steps")
      a.steps = std::atoi(value);
    else if (name == "--batch")
      a.batch = std::atoi(value);
    else if (name == "--depth")
      a.depths = numbers(value);
    else if (name == "--prefill")
      a.prefills = numbers(value);
    else if (name == "--ablate")
      a.ablate.push_back(value);
    else
      std::fprintf(stderr, "unknown option %s\n", name.c_str()), std::exit(2);
  }
  return a;
}

uint64_t sum_words(const uint64_t* p, size_t n) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i + 8 <= n; i += 8)
    for (size_t j = 0; j < 8; ++j) sum[j] += p[i + j];
  return std::accumulate(std::begin(sum), std::end(sum), uint64_t{0});
}

// GB/s of reading the experts' codes once, a contiguous half per thread.
double probe_bandwidth(const ModelWeights& weights, int threads) {
  const auto start = Clock::now();
  size_t bytes = 0;
  volatile uint64_t sink = 0;
  for (const LayerWeights& layer : weights.layers) {
    const WeightMatrix& m = layer.moe.expert_gate_proj;
    const size_t words = static_cast<size_t>(m.stack) * m.n * m.words_per_row() / 2;
    const auto* data = reinterpret_cast<const uint64_t*>(m.codes);
    bytes += words * 8;
    std::vector<std::thread> workers;
    const size_t share = words / threads;
    for (int t = 0; t < threads; ++t)
      workers.emplace_back([=, &sink] { sink = sink + sum_words(data + t * share, share); });
    for (std::thread& worker : workers) worker.join();
  }
  return static_cast<double>(bytes) / seconds_since(start) / 1e9;
}

class Bench {
 public:
  Bench(const Arguments& arguments, const RandomModel& model)
      : arguments_(arguments), model_(model), shape_(model.shape()) {
    BackendOptions options;
    options.threads = arguments.threads;
    options.ablate = arguments.ablate;
    options.full_precision = arguments.full;
    backend_ = std::make_unique<cpu::CpuBackend>(shape_, model.weights(), options);
    const int deepest = *std::max_element(arguments.depths.begin(), arguments.depths.end());
    pages_per_sequence_ = (deepest + arguments.steps * 4) / kKvPageRows + 2;
    for (int n : arguments.prefills) pages_per_sequence_ = std::max(pages_per_sequence_, n / kKvPageRows + 2);
    backend_->allocate_state({arguments.batch, arguments.batch * pages_per_sequence_});
    pages_.resize(static_cast<size_t>(arguments.batch) * pages_per_sequence_);
    std::iota(pages_.begin(), pages_.end(), 0);
    fill_pages();
    std::printf("%s; %d layers\n", backend_->description().c_str(), shape_.layers());
  }

  double bandwidth() { return probe_bandwidth(model_.weights(), threads()); }

  void decode(int depth) {
    const int batch = arguments_.batch;
    std::vector<TokenId> tokens(batch);
    std::vector<SequenceRows> sequences(batch);
    std::vector<HeadRow> heads(batch);
    for (int i = 0; i < batch; ++i) {
      sequences[i] = {i, std::span(pages_).subspan(i * pages_per_sequence_, pages_per_sequence_), depth, 1};
      heads[i].row = heads[i].sequence = i;
      heads[i].pick = true;
      if (arguments_.sample) {
        heads[i].sampling.temperature = 0.7f;
        heads[i].sampling.top_k = 20;
        heads[i].sampling.top_p = 0.95f;
        heads[i].sampling.presence_penalty = 1.5f;
      }
    }
    const auto step = [&] {
      for (TokenId& token : tokens) token = next_token();
      const StepId id = forward(*backend_, shape_, {tokens, sequences, heads, false});
      backend_->wait(id);
      for (SequenceRows& sequence : sequences) ++sequence.position;
    };
    for (int i = 0; i < 4; ++i) step();
    const double before = bandwidth();
    reset_profile();
    std::vector<double> times;
    for (int i = 0; i < arguments_.steps; ++i) {
      const auto start = Clock::now();
      step();
      times.push_back(seconds_since(start));
      note_best();
    }
    const double after = bandwidth();
    std::sort(times.begin(), times.end());
    const double median = calla::median(times), probe = std::max(before, after);
    const double bytes = total_bytes() / arguments_.steps;
    std::printf(
        "decode, depth %d, batch %d: median %.2f ms (best %.2f) = %.1f tok/s; %.1f MB a step = %.1f GB/s; "
        "probe %.1f "
        "and %.1f GB/s; share of limit %.1f %%\n",
        depth, batch, median * 1e3, times[0] * 1e3, batch / median, bytes / 1e6, bytes / median / 1e9, before, after,
        100 * bytes / median / 1e9 / probe);
    print_profile(arguments_.steps);
  }

  void prefill(int n) {
    std::vector<TokenId> tokens(n);
    for (TokenId& token : tokens) token = next_token();
    double best = 1e9;
    const int repeats = 3;
    for (int i = 0; i <= repeats; ++i) {
      if (i == 1) reset_profile();
      backend_->clear_recurrent(0);
      const auto start = Clock::now();
      for (int from = 0; from < n; from += 512) {
        const int rows = std::min(512, n - from);
        const SequenceRows sequence{0, pages_, from, rows};
        HeadRow head;
        head.row = rows - 1;
        head.pick = true;
        const bool last = from + rows == n;
        backend_->wait(
            forward(*backend_, shape_,
                    {std::span(tokens).subspan(from, rows), {&sequence, 1}, {&head, last ? 1u : 0u}, false}));
      }
      if (i == 0) continue;
      best = std::min(best, seconds_since(start));
      note_best();
    }
    std::printf("prefill %d: best of %d %.3f s = %.1f tok/s\n", n, repeats, best, n / best);
    print_profile(repeats);
  }

 private:
  int threads() const { return arguments_.threads > 0 ? arguments_.threads : available_cores(); }
  TokenId next_token() {
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<TokenId>((random_ >> 33) % static_cast<uint64_t>(shape_.vocab));
  }
  void fill_pages() {
    std::vector<std::byte> page(backend_->kv_page_bytes());
    for (int32_t id : pages_) {
      for (size_t i = 0; i < page.size(); i += 4) {  // as fp16 and as fp32: small numbers
        const float value = static_cast<float>(next_token() % 256 - 128) / 64;
        std::memcpy(&page[i], &value, 4);
        std::memcpy(&page[i], &page[i + 2], 2);
      }
      backend_->import_kv_page(id, page);
    }
  }
  double total_bytes() const {
    double sum = 0;
    for (int i = 0; i < cpu::kStages; ++i) sum += backend_->profile()[static_cast<cpu::Stage>(i)].bytes;
    return sum;
  }
  void reset_profile() {
    backend_->profile().reset();
    before_.fill(0);
    best_.fill(1e9);
  }
  // After a step: keeps each stage's least seconds.
  void note_best() {
    for (int i = 0; i < cpu::kStages; ++i) {
      const double now = backend_->profile()[static_cast<cpu::Stage>(i)].seconds;
      best_[i] = std::min(best_[i], now - before_[i]);
      before_[i] = now;
    }
  }
  // Least and mean milliseconds of each stage, and GB/s at the least.
  void print_profile(int steps) const {
    const double total = std::accumulate(best_.begin(), best_.end(), 0.0);
    for (int i = 0; i < cpu::kStages; ++i) {
      const cpu::StageTime& t = backend_->profile()[static_cast<cpu::Stage>(i)];
      std::printf("  %-18s best %9.3f ms  %5.1f %%  mean %9.3f ms  %8.1f MB  %6.1f GB/s\n",
                  stage_name(static_cast<cpu::Stage>(i)), best_[i] * 1e3, 100 * best_[i] / total,
                  t.seconds / steps * 1e3, t.bytes / steps / 1e6, t.bytes / steps / best_[i] / 1e9);
    }
    std::printf("  sum of the best    %9.3f ms\n", total * 1e3);
  }

  const Arguments& arguments_;
  const RandomModel& model_;
  const ModelShape& shape_;
  std::unique_ptr<cpu::CpuBackend> backend_;
  int pages_per_sequence_ = 0;
  std::vector<int32_t> pages_;
  uint64_t random_ = 1;
  std::array<double, cpu::kStages> before_{}, best_{};
};

}  // namespace
}  // namespace calla

int main(int argc, char** argv) {
  using namespace calla;
  const Arguments arguments = parse(argc, argv);
  const RandomModel model(real_shape(arguments.layers), 1);
  Bench bench(arguments, model);
  for (int depth : arguments.depths) bench.decode(depth);
  for (int n : arguments.prefills) bench.prefill(n);
}
