// cuda_bench: the CUDA backend by itself; all but `golden` need no checkpoint.
//   cuda_bench check [1 | 2]    every stage against the reference, on random models of tiny (1) and of full (2) width
//   cuda_bench compare [R]      logits of a few tokens of R sequences, as they are against --ablate's, on random weights (--layers N)
//   cuda_bench golden DIR       the golden outputs beside a checkpoint
//   cuda_bench decode [C...]    decode at batch 1 at the full 40-layer shape, at contexts C (default: ten, 256..128K)
//   cuda_bench batch [C [N...]] decode with N sequences (default: some of 1..32) at context C (default 1024)
//   cuda_bench prefill [N...]   prompts of N tokens (default: ten, 256..128K)
//   cuda_bench upload DIR       a checkpoint's way into device memory, beside the rate of plain copies over the bus
//   cuda_bench stages [R [C]]   each stage for R rows at context C (default 1 at 4096): time, and share of the limit
// --ablate NAME switches a mechanism off, --layers N takes fewer than 40. Weights and cache contents are random; medians over repetitions.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>

#include "backend/create.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/weights_outline.h"
#include "base/median.h"
#include "model/forward.h"
#include "model/load_model.h"
#include "selftest/conformance.h"
#include "selftest/golden.h"

namespace calla::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Arguments {
  std::string command;
  std::string path;
  std::vector<int> numbers;
  std::vector<std::string> ablate;
  int layers = 40;
};

// ---- check --------------------------------------------------------------------------------------------------------

int report(const char* model, const std::vector<StageResult>& results, double seconds) {
  int bad = 0;
  std::string worst_stage;
  double worst = 0;
  for (const StageResult& r : results) {
    if (!r.ok) {
      if (++bad <= 40)
        std::printf("  WRONG %-10s %-18s %-16s %-20s error %.3g > %.3g\n", model, r.stage.c_str(), r.what.c_str(),
                    r.batch.c_str(), r.error, r.tolerance);
    } else if (r.error > worst) {
      worst = r.error;
      worst_stage = r.stage + " " + r.what + " " + r.batch;
    }
  }
  std::printf("check %-12s %zu comparisons, %d wrong, worst passing error %.2e (%s), %.1f s\n", model, results.size(),
              bad, worst, worst_stage.c_str(), seconds);
  std::fflush(stdout);
  return bad;
}

int check_all(const Arguments& arguments) {
  const BackendFactory factory = [](const ModelShape& shape, const ModelWeights& weights,
                                    const BackendOptions& options) {
    return create_cuda_backend(shape, weights, options);
  };
  ConformanceOptions options;
  options.tolerance = 4e-3;
  options.backend.ablate = arguments.ablate;
  int bad = 0;
  auto start = Clock::now();
  const auto run = [&](const char* name, const RandomModel& model) {
    start = Clock::now();
    const std::vector<StageResult> results = run_conformance(factory, model, options);
    bad += report(name, results, seconds_since(start));
  };
  const int which = arguments.numbers.empty() ? 0 : arguments.numbers[0];
  if (which != 2) run("tiny", RandomModel(tiny_shape(4), 3));
  if (which == 0) {
    run("tiny-8bit", RandomModel(tiny_shape(4), 4, 8));
    run("tiny-g32", RandomModel(tiny_shape(4), 5, 4, 32));
  }
  if (which != 1) {
    ModelShape wide = real_shape(4);
    wide.layer_kinds = {LayerKind::kGatedDeltaNet, LayerKind::kAttention};
    const bool brief = arguments.layers <= 2;
    if (arguments.layers == 1) wide.layer_kinds.pop_back();
    wide.vocab = 8192;
    options.batches = {{"decode at 200", {{200, 1}}},
                       {"decode of 3", {{0, 1}, {77, 1}, {192, 1}}},
                       {"prefill 33 at 130", {{130, 33}}},
                       {"ragged 5 + 1 + 17", {{3, 5}, {64, 1}, {60, 17}}}};
    if (brief) options.batches.resize(2);
    for (int sequences : {8, 2, 5, 17, 32}) {
      if (brief && sequences != 8) break;
      BatchCase batch{"decode of " + std::to_string(sequences), {}};
      for (int i = 0; i < sequences; ++i) batch.sequences.push_back({3 * i, 1});
      options.batches.push_back(batch);
    }
    run("full width", RandomModel(wide, 6));
  }
  return bad;
}

int check_golden(const Arguments& arguments) {
  const LoadedModel model = load_model(arguments.path);
  GoldenOptions golden;
  golden.tolerance = fast_tolerance();
  BackendOptions options;
  options.max_rows = golden.chunk;
  options.max_heads = golden.max_heads;
  options.ablate = arguments.ablate;
  const auto backend = create_cuda_backend(model.config.shape, model.weights, options);
  int bad = 0;
  for (const GoldenResult& r :
       run_golden(*backend, model.config.shape, arguments.path + "/golden.safetensors", golden)) {
    bad += !r.ok;
    std::printf("golden %-10s %-12s %s relative %.2e, max %.2e, top-1 %.4f, perplexity %+.5f %s\n", r.name.c_str(),
                r.kind.c_str(), r.ok ? "ok   " : "WRONG", r.relative, r.max_error, r.top1.value_or(1), r.perplexity,
                r.note.c_str());
  }
  std::printf("golden %s: %d wrong\n", arguments.path.c_str(), bad);
  return bad;
}

// Seconds of a copy of `bytes` page-locked bytes to the device, the best of five.
double copy_seconds(size_t bytes) {
  const PinnedArray<std::byte> from(bytes, "page-locked memory for the bus");
  const DeviceBytes to(bytes, "memory for the bus");
  const Stream stream;
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    cuda_check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyHostToDevice, stream.get()), "copy");
    stream.synchronize();
    best = std::min(best, seconds_since(start));
  }
  return best;
}

void bench_upload(const Arguments& arguments) {
  constexpr size_t kProbe = size_t{1} << 30;
  const double rate = static_cast<double>(kProbe) / copy_seconds(kProbe);
  const LoadedModel model = load_model(arguments.path);
  for (int i = 0; i < 3; ++i) {  // the first time may read the file from disk
    const auto start = Clock::now();
    const CudaBackend backend(model.config.shape, model.weights, {});
    const double time = seconds_since(start), bytes = static_cast<double>(backend.weights().bytes());
    std::printf("upload %d: %.2f GB in %.2f s, %.1f GB/s; plain copies %.1f GB/s: %.2f times their time\n", i,
                bytes / 1e9, time, bytes / time / 1e9, rate / 1e9, time * rate / bytes);
  }
}

// ---- timing -------------------------------------------------------------------------------------------------------

// A backend of the full shape with random weights and a cache of random, sane contents.
class Bench {
 public:
  Bench(const Arguments& arguments, int max_rows, int sequences, int context, bool replay = true)
      : shape_(real_shape(arguments.layers)), weights_(outline_weights(shape_, 17)) {
    BackendOptions options;
    options.max_rows = max_rows;
    options.max_heads = sequences;
    options.ablate = arguments.ablate;
    options.replay_steps = replay;
    const auto start = Clock::now();
    backend_ = std::make_unique<CudaBackend>(shape_, weights_, options);
    StateMemoryPlan plan;
    plan.recurrent_slots = sequences;
    pages_each_ = (context + 1024) / kKvPageRows + 2;
    plan.kv_pages = sequences * pages_each_;
    backend_->allocate_state(plan);
    std::printf("%s; ready in %.1f s\n", backend_->description().c_str(), seconds_since(start));
    fill_cache(plan.kv_pages);
    for (int s = 0; s < sequences; ++s) {
      auto& pages = pages_.emplace_back(static_cast<size_t>(pages_each_));
      std::iota(pages.begin(), pages.end(), s * pages_each_);
    }
  }

  CudaBackend& backend() { return *backend_; }
  const ModelShape& shape() const { return shape_; }
  std::span<const int32_t> pages(int sequence) const { return pages_[static_cast<size_t>(sequence)]; }

  // Median seconds of a decode step of `sequences` sequences at `context`, steps submitted back to back. One sequence
  // goes on with the tokens that it picks; several get random ones, because theirs would soon be the same, and so their
  // experts.
  double decode(int sequences, int context, int steps) {
    std::vector<TokenId> tokens(static_cast<size_t>(sequences));
    std::vector<HeadRow> heads(tokens.size());
    for (int s = 0; s < sequences; ++s) {
      tokens[static_cast<size_t>(s)] = 1000 + 77 * s;
      heads[static_cast<size_t>(s)].row = heads[static_cast<size_t>(s)].sequence = s;
      heads[static_cast<size_t>(s)].pick = true;
    }
    std::vector<double> times;
    constexpr int kWarmUp = 6, kBlocks = 5;
    StepId previous = 0;
    int position = context;
    const auto step = [&] {
      std::vector<SequenceRows> rows;
      for (int s = 0; s < sequences; ++s) rows.push_back({s, pages(s), position, 1});
      Batch batch;
      batch.tokens = tokens;
      batch.sequences = rows;
      batch.heads = heads;
      const StepId id = forward(*backend_, shape_, batch);
      ++position;
      for (size_t s = 0; s < tokens.size(); ++s) {
        const double drawn = draw_uniform(s + 1, static_cast<uint64_t>(position));
        tokens[s] = sequences == 1 ? kLastPicked : static_cast<TokenId>(drawn * shape_.vocab);
      }
      if (previous != 0) backend_->wait(previous);
      previous = id;
    };
    for (int i = 0; i < kWarmUp; ++i) step();
    for (int block = 0; block < kBlocks; ++block) {
      backend_->wait(previous);
      const auto start = Clock::now();
      for (int i = 0; i < steps; ++i) step();
      backend_->wait(previous);
      times.push_back(seconds_since(start) / steps);
    }
    last_token_ = backend_->picked(previous)[0];
    return median(times);
  }
  TokenId last_token() const { return last_token_; }

  // Seconds of a prompt of `tokens`, in chunks of at most max_rows.
  double prefill(int tokens, int chunk) {
    std::vector<TokenId> ids(static_cast<size_t>(tokens));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>((i * 7919 + 13) % 200000);
    backend_->clear_recurrent(0);
    const auto start = Clock::now();
    StepId last = 0;
    for (int first = 0; first < tokens; first += chunk) {
      const int rows = std::min(chunk, tokens - first);
      const SequenceRows sequence{0, pages(0), first, rows};
      HeadRow head;
      head.row = rows - 1;
      head.pick = true;
      Batch batch;
      batch.tokens = std::span(ids).subspan(static_cast<size_t>(first), static_cast<size_t>(rows));
      batch.sequences = std::span(&sequence, 1);
      if (first + rows == tokens) batch.heads = std::span(&head, 1);
      const StepId id = forward(*backend_, shape_, batch);
      if (last != 0) backend_->wait(last);
      last = id;
    }
    backend_->wait(last);
    const double time = seconds_since(start);
    last_token_ = backend_->picked(last)[0];
    return time;
  }

  // Seconds a call of `body`, which launches kernels, recorded as a graph and replayed.
  double time_graph(const std::function<void()>& body) {
    cudaStream_t stream = backend_->stream();
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    body();
    cudaGraph_t captured = nullptr;
    cuda_check(cudaStreamEndCapture(stream, &captured), "capture");
    const Graph graph(captured);
    Event begin(cudaEventDefault), end(cudaEventDefault);
    std::vector<double> times;
    for (int i = 0; i < 12; ++i) {
      begin.record(stream);
      graph.launch(stream);
      end.record(stream);
      end.synchronize();
      float ms = 0;
      cuda_check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "elapsed time");
      if (i >= 2) times.push_back(ms * 1e-3);
    }
    return median(times);
  }

 private:
  void fill_cache(int pages) {
    // One page of normal-looking bf16 numbers, imported everywhere.
    std::vector<std::byte> page(backend_->kv_page_bytes());
    for (size_t i = 0; i < page.size() / 2; ++i) {
      const bf16 value = to_bf16(2 * (draw_uniform(5, i) + draw_uniform(6, i)) - 2);
      std::memcpy(page.data() + 2 * i, &value, sizeof value);
    }
    for (int i = 0; i < pages; ++i) backend_->import_kv_page(i, page);
  }

  const ModelShape shape_;
  const ModelWeights weights_;
  std::unique_ptr<CudaBackend> backend_;
  int pages_each_ = 0;
  std::vector<std::vector<int32_t>> pages_;
  TokenId last_token_ = 0;
};

constexpr double kMemoryRate = 4.38e12;  // bytes a second read, measured by a plain sum on this card
constexpr int kContexts[] = {256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};

// Bytes a decode step must move, counted.
struct StepBytes {
  double weights = 0, state = 0, cache = 0;
  double total() const { return weights + state + cache; }
};
StepBytes step_bytes(const DeviceWeights& w, const ModelShape& shape, int context) {
  StepBytes b;
  b.weights = static_cast<double>(w.head.bytes);
  for (const LayerOnDevice& l : w.layers)
    b.weights += static_cast<double>(l.in.bytes + l.out.bytes + l.router.bytes + l.shared.bytes +
                                     kExpertsPerToken * l.experts.bytes);
  b.state = shape.gdn_layers() * 2.0 * 4 * (shape.gdn_value_heads * kGdnHeadDim * kGdnHeadDim);
  b.cache = shape.attention_layers() * 4.0 * shape.kv_width() * context;
  return b;
}

void bench_decode(const Arguments& arguments) {
  std::vector<int> contexts = arguments.numbers;
  if (contexts.empty()) contexts.assign(std::begin(kContexts), std::end(kContexts));
  Bench bench(arguments, 32, 1, *std::max_element(contexts.begin(), contexts.end()));
  for (int context : contexts) {
    const double time = bench.decode(1, context, 64);
    const double limit = step_bytes(bench.backend().weights(), bench.shape(), context).total() / kMemoryRate;
    std::printf("decode context %6d: %7.1f tokens/s, %.3f ms, %.1f %% of the limit (token %d)\n", context, 1 / time,
                time * 1e3, 100 * limit / time, bench.last_token());
    std::fflush(stdout);
  }
}

// Logits of twelve greedy tokens of `sequences` sequences, from empty contexts. `tokens` are those of another run, or
// empty and filled in.
std::vector<std::vector<float>> decode_logits(const Arguments& arguments, int sequences, std::vector<TokenId>& tokens) {
  Bench bench(arguments, 32, sequences, 64);
  const auto count = static_cast<size_t>(sequences);
  std::vector<std::vector<float>> rows;
  for (int s = 0; s < sequences; ++s) bench.backend().clear_recurrent(s);
  const bool given = !tokens.empty();
  std::vector<TokenId> now(count);
  for (size_t s = 0; s < count; ++s) now[s] = static_cast<TokenId>(1234 + 777 * s);
  for (size_t position = 0; position < 12; ++position) {
    if (given) std::copy_n(tokens.begin() + static_cast<std::ptrdiff_t>(position * count), count, now.begin());
    if (!given) tokens.insert(tokens.end(), now.begin(), now.end());
    std::vector<SequenceRows> parts;
    std::vector<HeadRow> heads(count);
    for (int s = 0; s < sequences; ++s) {
      parts.push_back({s, bench.pages(s), static_cast<int>(position) + 3 * s, 1});
      HeadRow& head = heads[static_cast<size_t>(s)];
      head.row = head.sequence = s;
      head.pick = true;
    }
    Batch batch;
    batch.tokens = now;
    batch.sequences = parts;
    batch.heads = heads;
    batch.want_logits = true;
    const StepId id = forward(bench.backend(), bench.shape(), batch);
    bench.backend().wait(id);
    for (int s = 0; s < sequences; ++s) {
      const std::span<const float> logits = bench.backend().logits(id, s);
      rows.emplace_back(logits.begin(), logits.end());
      now[static_cast<size_t>(s)] = bench.backend().picked(id)[static_cast<size_t>(s)];
    }
  }
  return rows;
}

// Judged by the median: with random weights a row now and then chooses another expert, after which it and what follows of
// its sequence differ by far more.
int compare(const Arguments& arguments, int sequences) {
  std::vector<TokenId> tokens;
  Arguments plain = arguments;
  plain.ablate.clear();
  const auto ours = decode_logits(plain, sequences, tokens), theirs = decode_logits(arguments, sequences, tokens);
  std::vector<double> errors;
  for (size_t i = 0; i < ours.size(); ++i) {
    double difference = 0, norm = 0;
    for (size_t j = 0; j < ours[i].size(); ++j) {
      difference += std::pow(double{ours[i][j]} - theirs[i][j], 2);
      norm += std::pow(double{theirs[i][j]}, 2);
    }
    const double error = std::sqrt(difference / norm);
    errors.push_back(std::isfinite(error) ? error : std::numeric_limits<double>::infinity());
    std::printf("compare token %2zu of sequence %zu: relative error %.2e (norm %.3g)\n",
                i / static_cast<size_t>(sequences), i % static_cast<size_t>(sequences), error, std::sqrt(norm));
  }
  const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
  std::nth_element(errors.begin(), middle, errors.end());
  const auto outliers = std::count_if(errors.begin(), errors.end(), [](double error) { return !(error < 2e-2); });
  std::printf("compare: median %.2e, %d of %zu over 2e-2\n", *middle, static_cast<int>(outliers), errors.size());
  return *middle < 2e-2 && *std::max_element(errors.begin(), errors.end()) < 2 ? 0 : 1;
}

void bench_batch(const Arguments& arguments) {
  const int context = arguments.numbers.empty() ? 1024 : arguments.numbers[0];
  Bench bench(arguments, 32, 32, context);
  std::vector<int> counts = {1, 2, 3, 4, 6, 8, 12, 16, 32};
  if (arguments.numbers.size() > 1) counts.assign(arguments.numbers.begin() + 1, arguments.numbers.end());
  for (int n : counts) {
    const double time = bench.decode(n, context, 32);
    std::vector<float> ids(static_cast<size_t>(n * kExpertsPerToken));
    bench.backend().read_slot(Slot::kExpertIds, ids);
    std::sort(ids.begin(), ids.end());
    const auto distinct = std::unique(ids.begin(), ids.end()) - ids.begin();
    std::printf("batch %2d context %d: %8.1f tokens/s, %.3f ms a step, %td experts in the last layer\n", n, context,
                n / time, time * 1e3, distinct);
    std::fflush(stdout);
  }
}

void bench_prefill(const Arguments& arguments) {
  std::vector<int> lengths = arguments.numbers;
  if (lengths.empty()) lengths.assign(std::begin(kContexts), std::end(kContexts));
  constexpr int kChunk = 8192;
  const int longest = *std::max_element(lengths.begin(), lengths.end());
  Bench bench(arguments, std::min(kChunk, longest), 1, longest);
  for (int length : lengths) {
    std::vector<double> times;
    const int repetitions = length > 40000 ? 1 : 3;
    bench.prefill(std::min(length, 4096), kChunk);
    for (int i = 0; i < repetitions; ++i) times.push_back(bench.prefill(length, kChunk));
    const double time = median(times);
    std::printf("prefill %6d: %8.0f tokens/s, %.2f ms (token %d)\n", length, length / time, time * 1e3,
                bench.last_token());
    std::fflush(stdout);
  }
}

// Times every stage over the layers that have it. One row: decode, bytes and memory limit; up to 32: a decode step of so
// many sequences; more: prefill, flops.
void bench_stages(const Arguments& arguments, int rows, int context) {
  const int sequences = rows <= 32 ? rows : 1;
  Bench bench(arguments, std::max(rows, 32), sequences, context + rows, false);
  CudaBackend& b = bench.backend();
  const ModelShape& shape = bench.shape();
  if (rows <= 32) bench.decode(rows, context, 8);
  std::vector<SequenceRows> parts;
  for (int s = 0; s < sequences; ++s) parts.push_back({s, bench.pages(s), context, rows / sequences});
  std::vector<TokenId> tokens(static_cast<size_t>(rows));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>((i * 7919 + 4242) % 200000);
  std::vector<HeadRow> heads(static_cast<size_t>(sequences));
  for (int s = 0; s < sequences; ++s) {
    heads[static_cast<size_t>(s)].row = (s + 1) * (rows / sequences) - 1;
    heads[static_cast<size_t>(s)].sequence = s;
    heads[static_cast<size_t>(s)].pick = true;
  }
  Batch batch;
  batch.tokens = tokens;
  batch.sequences = parts;
  batch.heads = heads;
  b.begin(batch);
  b.embed();
  std::vector<int> gdn, attention, all(static_cast<size_t>(shape.layers()));
  std::iota(all.begin(), all.end(), 0);
  for (int i : all) (shape.layer_kinds[static_cast<size_t>(i)] == LayerKind::kAttention ? attention : gdn).push_back(i);
  const auto& w = b.weights();
  double sum = 0;
  const auto row = [&](const char* name, const std::vector<int>& layers, double bytes, double parameters, auto stage) {
    const int repeats = rows <= 32 ? 3 : 1;
    const double time = bench.time_graph([&] {
      for (int repeat = 0; repeat < repeats; ++repeat)
        for (int layer : layers) stage(layer);
      b.settle();
    });
    const double each = time / (repeats * static_cast<double>(layers.size()));
    sum += each * static_cast<double>(layers.size());
    std::printf("stage %-21s %8.2f us x %2zu = %8.1f us", name, each * 1e6, layers.size(),
                each * 1e6 * static_cast<double>(layers.size()));
    if (rows == 1) {
      std::printf(", %6.2f MB, %5.0f GB/s, %5.1f %% of the limit\n", bytes / 1e6, bytes / each / 1e9,
                  100 * bytes / kMemoryRate / each);
    } else {
      std::printf(", %6.1f TFLOP/s\n", 2 * parameters * rows / each / 1e12);
    }
    std::fflush(stdout);
  };
  const LayerOnDevice& g = w.layers[static_cast<size_t>(gdn[0])];
  const LayerOnDevice& a = w.layers[static_cast<size_t>(attention[0])];
  const double state = 2.0 * 4 * shape.gdn_value_heads * kGdnHeadDim * kGdnHeadDim;
  const auto bytes = [](const Linear& l) { return static_cast<double>(l.bytes); };
  const auto parameters = [](const Linear& l) { return static_cast<double>(l.width) * l.k; };
  const double expert = static_cast<double>(g.experts.bytes * kExpertsPerToken + g.shared.bytes);
  const double expert_parameters = 9.0 * shape.expert_width * shape.hidden;
  const double attended = 2.0 * shape.q_width() * (context + rows / 2.0);
  const bool joined = rows == 1 || b.in_program();  // which may be one phase of a program
  if (joined) {
    row("project, mix_gdn", gdn, bytes(g.in) + state * sequences, parameters(g.in), [&](int i) {
      b.project_gdn(i);
      b.mix_gdn(i);
    });
  } else {
    row("project_gdn", gdn, bytes(g.in), parameters(g.in), [&](int i) { b.project_gdn(i); });
    row("mix_gdn", gdn, state, 2.0 * shape.gdn_value_width() * kGdnHeadDim, [&](int i) { b.mix_gdn(i); });
  }
  row("project_attention", attention, bytes(a.in), parameters(a.in), [&](int i) { b.project_attention(i); });
  row("prepare_attention", attention, 1e4, 0, [&](int i) { b.prepare_attention(i); });
  row("attend", attention, 4.0 * shape.kv_width() * context, attended, [&](int i) { b.attend(i); });
  row("project_residual", all, bytes(g.out), parameters(g.out), [&](int i) { b.project_residual(i); });
  if (joined) {
    row("route .. experts_down", all, bytes(g.router) + expert, parameters(g.router) + expert_parameters * 3,
        [&](int i) {
          b.route(i);
          b.experts_up(i);
          b.experts_down(i);
        });
  } else {
    row("route", all, bytes(g.router), parameters(g.router), [&](int i) { b.route(i); });
    row("group_rows", all, 0, 0, [&](int i) { b.group_rows(i); });
    row("experts_up", all, expert * 2 / 3, 2 * expert_parameters, [&](int i) { b.experts_up(i); });
    row("experts_down", all, expert / 3, expert_parameters, [&](int i) { b.experts_down(i); });
  }
  row("head", {0}, bytes(w.head), 0, [&](int) { b.head(); });
  row("pick", {0}, 4.0 * shape.vocab, 0, [&](int) { b.pick(); });
  std::printf("stage sum %.1f us\n", sum * 1e6);
  b.wait(b.submit());
}

int run(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--ablate" && i + 1 < argc) {
      arguments.ablate.emplace_back(argv[++i]);
    } else if (text == "--layers" && i + 1 < argc) {
      arguments.layers = std::stoi(argv[++i]);
    } else if (arguments.command.empty()) {
      arguments.command = text;
    } else if (arguments.command == "golden" || arguments.command == "upload") {
      arguments.path = text;
    } else {
      arguments.numbers.push_back(std::stoi(text));
    }
  }
  const bool has_path = !arguments.path.empty();
  if (arguments.command == "check") return check_all(arguments) == 0 ? 0 : 1;
  if (arguments.command == "golden" && has_path) return check_golden(arguments) == 0 ? 0 : 1;
  if (arguments.command == "upload" && has_path) return bench_upload(arguments), 0;
  if (arguments.command == "decode") return bench_decode(arguments), 0;
  if (arguments.command == "batch") return bench_batch(arguments), 0;
  if (arguments.command == "prefill") return bench_prefill(arguments), 0;
  const auto number = [&](size_t i, int otherwise) {
    return i < arguments.numbers.size() ? arguments.numbers[i] : otherwise;
  };
  if (arguments.command == "compare") return compare(arguments, number(0, 1));
  if (arguments.command == "stages") return bench_stages(arguments, number(0, 1), number(1, 4096)), 0;
  std::fprintf(stderr,
               "usage: cuda_bench check|compare|golden DIR|upload DIR|decode|batch|prefill|stages [numbers] [--ablate "
               "NAME] [--layers N]\n");
  return 2;
}

}  // namespace
}  // namespace calla::cuda

int main(int argc, char** argv) {
  try {
    return calla::cuda::run(argc, argv);
  } catch (const calla::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  } catch (const std::logic_error&) {  // std::stoi's
    std::fprintf(stderr, "cuda_bench: a number was expected\n");
    return 2;
  }
}
