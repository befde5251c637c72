// Prints what the kernels move, counted by softmetal, and holds it against what docs/metal.md says: the bytes of a decode
// token at the real widths, KV lines with and without packing and coalescing, the GDN state's traffic, what the experts'
// kernels store, dispatches and phases. The exit status is 1 if a fact is outside its bounds or softmetal found a fault.
//
//   metal_counts [bytes|kv|scan|experts|steps] [context]        all, at 4096, by default; some minutes
//
// lm_head and the pick are linear in the vocabulary, so a sixteenth of it is counted.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "backend/metal/metal_backend.h"
#include "backend/weights_outline.h"
#include "model/cost.h"
#include "model/forward.h"
#include "selftest/random_model.h"
#include "softmetal/softmetal.h"

namespace calla {
namespace {

using metal::MetalBackend;
using metal::MetalTestOptions;
using softmetal::DispatchRecord;

constexpr int kVocabParts = 16;

ModelShape two_layers() {
  ModelShape shape = real_shape(4);
  shape.layer_kinds = {LayerKind::kGatedDeltaNet, LayerKind::kAttention};
  shape.vocab /= kVocabParts;
  return shape;
}

// A backend with a sequence of `context` positions, its cache filled.
class Subject {
 public:
  Subject(const RandomModel& model, int context, std::vector<std::string> ablate, int rows)
      : model_(model), context_(context) {
    BackendOptions options;
    options.max_rows = rows;
    options.max_heads = 1;
    options.ablate = std::move(ablate);
    MetalTestOptions test_options;
    test_options.tensor_check_rows = 1;
    backend_ = std::make_unique<MetalBackend>(model.shape(), model.weights(), options, test_options);
    const int pages = (context + rows + kKvPageRows - 1) / kKvPageRows;
    backend_->allocate_state({1, pages});
    backend_->clear_recurrent(0);
    for (int i = 0; i < pages; ++i) pages_.push_back(i);
    const std::vector<float> ones(static_cast<size_t>(context) * model.shape().kv_width(), 0.5f);
    for (int i = 0; i < model.shape().layers(); ++i)
      if (model.shape().layer_kinds[i] == LayerKind::kAttention) backend_->write_kv(i, pages_, context, ones, ones);
  }

  // Runs `body` in a step of `rows` rows and returns its dispatches.
  template <class Body>
  std::vector<DispatchRecord> count(int rows, bool head, Body body) {
    const std::vector<TokenId> tokens(rows, 7);
    const std::array sequences = {SequenceRows{0, pages_, context_, rows}};
    HeadRow head_row;
    head_row.row = rows - 1;
    head_row.pick = true;
    const std::array heads = {head_row};
    Batch batch;
    batch.tokens = tokens;
    batch.sequences = sequences;
    if (head) batch.heads = heads;
    backend_->begin(batch);
    body(*backend_, batch);
    backend_->wait(backend_->submit());
    return softmetal::take_dispatches();
  }

  MetalBackend& backend() { return *backend_; }

 private:
  const RandomModel& model_;
  const int context_;
  std::unique_ptr<MetalBackend> backend_;
  std::vector<int32_t> pages_;
};

// A counted figure, printed with its bounds.
class Facts {
 public:
  void expect(const char* what, double value, double least, double most, const char* unit) {
    const bool ok = value >= least && value <= most;
    all_hold_ = all_hold_ && ok;
    std::printf("  %-58s %9.3f %-7s (%.6g to %.6g) %s\n", what, value, unit, least, most, ok ? "ok" : "OUT OF BOUNDS");
  }
  bool all_hold() const { return all_hold_; }

 private:
  bool all_hold_ = true;
};

double megabytes(uint64_t lines) { return static_cast<double>(lines) * 128 / 1e6; }

// Distinct lines: what must come from memory once, each kernel for itself.
uint64_t distinct_lines(const std::vector<DispatchRecord>& records) {
  uint64_t lines = 0;
  for (const DispatchRecord& r : records) lines += r.device.unique_load_lines + r.device.unique_store_lines;
  return lines;
}

uint64_t stored_bytes(const std::vector<DispatchRecord>& records) {
  uint64_t bytes = 0;
  for (const DispatchRecord& r : records) bytes += r.device.stored_bytes;
  return bytes;
}

// The lines that simdgroups asked of one buffer.
uint64_t asked_lines(const std::vector<DispatchRecord>& records, const std::string& kernel, const std::string& buffer) {
  uint64_t lines = 0;
  for (const DispatchRecord& r : records)
    if (r.kernel.rfind(kernel, 0) == 0)
      for (const auto& b : r.buffers)
        if (b.name == buffer) lines += b.traffic.load_lines + b.traffic.store_lines;
  return lines;
}

double needed_bytes(int context) {
  const ModelShape shape = real_shape(40);
  return static_cast<double>(decode_bytes(shape, outline_weights(shape, 1), context).total());
}

void count_bytes(Facts& facts, const RandomModel& model, int context) {
  Subject subject(model, context, {}, 1);
  const ModelShape& shape = model.shape();
  const auto measure = [&](int index) {
    // The embedding puts something into the residual stream; it is not counted here.
    subject.count(1, false, [](Backend& b, const Batch&) { b.embed(); });
    return subject.count(1, false, [&](Backend& b, const Batch&) { forward_layer(b, shape, index); });
  };
  const auto gdn = measure(0), attention = measure(1);
  const auto ends = subject.count(1, true, [](Backend& b, const Batch&) {
    b.embed();
    b.head();
    b.pick();
  });
  std::printf("One decode token at a context of %d, 40 layers, distinct 128-byte lines of each kernel:\n", context);
  for (const auto& [name, records, times] :
       {std::tuple{"GDN layer", &gdn, 30}, std::tuple{"attention layer", &attention, 10},
        std::tuple{"ends", &ends, kVocabParts}}) {
    for (const DispatchRecord& r : *records)
      std::printf("  %-16s %-24s %9.3f MB\n", name, r.kernel.c_str(),
                  megabytes(r.device.unique_load_lines + r.device.unique_store_lines));
    std::printf("  %-16s %-24s %9.3f MB x %d\n", name, "all", megabytes(distinct_lines(*records)), times);
  }
  const double total = (30 * megabytes(distinct_lines(gdn)) + 10 * megabytes(distinct_lines(attention)) +
                        kVocabParts * megabytes(distinct_lines(ends))) /
                       1e3;
  const double needed = needed_bytes(context) / 1e9;
  facts.expect("together", total, 0.95 * needed, 1.05 * needed, "GB");
  std::printf("  the model needs %.3f GB (src/model/cost.h): %+.1f %%\n\n", needed, 100 * (total / needed - 1));
}

void attention_lines(Facts& facts, const RandomModel& model, int context) {
  std::printf("KV lines that simdgroups ask for, one attention layer, context %d:\n", context);
  double shipped = 0;
  for (const char* name : {"", "gqa-packing", "coalesced-kv"}) {
    Subject subject(model, context, *name ? std::vector<std::string>{name} : std::vector<std::string>{}, 1);
    subject.count(1, false, [](Backend& b, const Batch&) { b.embed(); });
    const auto records = subject.count(1, false, [&](Backend& b, const Batch&) { forward_layer(b, model.shape(), 1); });
    const auto lines = static_cast<double>(asked_lines(records, "sdpa_decode", "kv"));
    std::printf("  %-24s %9.0f lines\n", *name ? (std::string("without ") + name).c_str() : "as shipped", lines);
    if (!*name) shipped = lines;
    if (std::string_view(name) == "gqa-packing")
      facts.expect("lines without packing", lines / shipped, 3.9, 4.1, "times");
    if (std::string_view(name) == "coalesced-kv")
      facts.expect("lines of strided reads", lines / shipped, 1.5, 64, "times");
  }
  std::printf("\n");
}

void scan_traffic(Facts& facts, const RandomModel& model) {
  constexpr int kRows = 64, kChunk = 2048;
  std::printf("GDN state, one layer, counted at %d rows:\n", kRows);
  for (const bool blocked : {false, true}) {
    Subject subject(model, 0, blocked ? std::vector<std::string>{"register-scan"} : std::vector<std::string>{}, kRows);
    subject.count(kRows, false, [](Backend& b, const Batch&) { b.embed(); });
    const auto records = subject.count(kRows, false, [&](Backend& b, const Batch&) {
      b.project_gdn(0);
      b.mix_gdn(0);
    });
    const double moved = static_cast<double>(asked_lines(records, "gdn_scan", "states")) * 128 / 1048576;
    // In registers the state is moved once a chunk, of whatever length; in blocks once every 32 rows.
    if (blocked) {
      facts.expect("through memory every 32 rows, at 2,048 rows", moved * kChunk / kRows, 250, 260, "MiB");
    } else {
      facts.expect("in registers, at any number of rows", moved, 3.9, 4.1, "MiB");
    }
  }
  std::printf("\n");
}

// Weights are expanded on chip: what the experts' GEMMs store is activations.
void expert_stores(Facts& facts, const RandomModel& model) {
  constexpr int kRows = 32;
  std::printf("Stores of a layer's experts, %d rows (its expanded weights: %.0f MB):\n", kRows,
              3.0 * 256 * 512 * 2048 * 2 / 1e6);
  Subject subject(model, 0, {}, kRows);
  subject.count(kRows, false, [](Backend& b, const Batch&) { b.embed(); });
  const auto records = subject.count(kRows, false, [&](Backend& b, const Batch&) {
    b.route(0);
    b.group_rows(0);
    b.experts_up(0);
    b.experts_down(0);
  });
  for (const DispatchRecord& r : records)
    std::printf("  %-24s %9.3f MB\n", r.kernel.c_str(), static_cast<double>(r.device.stored_bytes) / 1e6);
  facts.expect("together", static_cast<double>(stored_bytes(records)) / 1e6, 0.1, 4, "MB");
  std::printf("\n");
}

// Forty layers; how many dispatches there are does not depend on their widths.
void step_counts(Facts& facts) {
  softmetal::Options options = softmetal::options();
  options.check = options.count = false;
  const softmetal::Options counting = softmetal::options();
  softmetal::set_options(options);
  const RandomModel model(tiny_shape(40), 32);
  std::printf("Dispatches and barrier-separated phases of a decode token, 40 layers (Lily: 795 in 555):\n");
  for (const int context : {4, 4096}) {
    Subject subject(model, context, {}, 1);
    subject.backend().set_token_counts(0, {}, {});  // waits: the clearing of the slot is no part of the step
    subject.count(1, true, [&](Backend& b, const Batch&) {
      b.embed();
      for (int i = 0; i < model.shape().layers(); ++i) forward_layer(b, model.shape(), i);
      b.head();
      b.pick();
    });
    const metal::EncoderCounts& counts = subject.backend().step_counts();
    const std::string at = " at a context of " + std::to_string(context);
    facts.expect(("dispatches" + at).c_str(), counts.dispatches, 1, 400, "");
    facts.expect(("phases" + at).c_str(), counts.phases, 1, 300, "");
  }
  softmetal::set_options(counting);
  std::printf("\n");
}

}  // namespace
}  // namespace calla

int main(int argc, char** argv) {
  using namespace calla;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  softmetal::Options options = softmetal::device_preset("m5max");
  options.check = true;
  options.count = true;
  softmetal::set_options(options);
  softmetal::record_dispatches(true);
  const std::string what = argc > 1 ? argv[1] : "all";
  if (const std::string known[] = {"all", "bytes", "kv", "scan", "experts", "steps"};
      argc > 3 || std::find(std::begin(known), std::end(known), what) == std::end(known)) {
    std::fprintf(stderr, "usage: metal_counts [all | bytes | kv | scan | experts | steps [context]]\n");
    return 2;
  }
  const int context = argc > 2 ? std::atoi(argv[2]) : 4096;
  const RandomModel model(two_layers(), 31);
  Facts facts;
  const auto wanted = [&](const char* part) { return what == "all" || what == part; };
  if (wanted("bytes")) count_bytes(facts, model, context);
  if (wanted("kv")) attention_lines(facts, model, 256);
  if (wanted("scan")) scan_traffic(facts, model);
  if (wanted("experts")) expert_stores(facts, model);
  if (wanted("steps")) step_counts(facts);
  const auto findings = softmetal::take_findings();
  for (const auto& finding : findings) std::fprintf(stderr, "%s\n", softmetal::describe(finding).c_str());
  return findings.empty() && facts.all_hold() ? 0 : 1;
}
