// Prints what the kernels move, counted by softmetal: the bytes of a decode token at the real widths, KV lines with and
// without packing and coalescing, the GDN state's traffic, dispatches and phases. docs/metal.md keeps the output.
//
//   metal_counts [bytes|kv|scan] [context]        all three, at 4096, by default; takes minutes
//
// lm_head and the pick are linear in the vocabulary, so a sixteenth of it is counted.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "backend/metal/metal_backend.h"
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
    backend_->write_kv(1, pages_, context, ones, ones);
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

double megabytes(uint64_t lines) { return static_cast<double>(lines) * 128 / 1e6; }

// Distinct lines: what must come from memory once, each kernel for itself.
uint64_t distinct_lines(const std::vector<DispatchRecord>& records) {
  uint64_t lines = 0;
  for (const DispatchRecord& r : records) lines += r.device.unique_load_lines + r.device.unique_store_lines;
  return lines;
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

void layer(Backend& backend, const ModelShape& shape, int index) {
  if (shape.layer_kinds[index] == LayerKind::kGatedDeltaNet) {
    backend.project_gdn(index);
    backend.mix_gdn(index);
  } else {
    backend.project_attention(index);
    backend.prepare_attention(index);
    backend.attend(index);
  }
  backend.project_residual(index);
  backend.route(index);
  backend.group_rows(index);
  backend.experts_up(index);
  backend.experts_down(index);
}

void decode_bytes(const RandomModel& model, int context) {
  Subject subject(model, context, {}, 1);
  const ModelShape& shape = model.shape();
  const auto measure = [&](int index) {
    // The embedding puts something into the residual stream; it is not counted here.
    subject.count(1, false, [](Backend& b, const Batch&) { b.embed(); });
    return subject.count(1, false, [&](Backend& b, const Batch&) { layer(b, shape, index); });
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
  std::printf("  together %.3f GB\n\n", total);
}

void attention_lines(const RandomModel& model, int context) {
  std::printf("KV lines that simdgroups ask for, one attention layer, context %d:\n", context);
  for (const char* name : {"", "gqa-packing", "coalesced-kv"}) {
    Subject subject(model, context, *name ? std::vector<std::string>{name} : std::vector<std::string>{}, 1);
    subject.count(1, false, [](Backend& b, const Batch&) { b.embed(); });
    const auto records = subject.count(1, false, [&](Backend& b, const Batch&) { layer(b, model.shape(), 1); });
    std::printf("  %-24s %9llu lines\n", *name ? (std::string("without ") + name).c_str() : "as shipped",
                static_cast<unsigned long long>(asked_lines(records, "sdpa_decode", "kv")));
  }
  std::printf("\n");
}

void scan_traffic(const RandomModel& model) {
  constexpr int kRows = 64;
  std::printf("GDN state, one layer, %d rows:\n", kRows);
  for (const char* name : {"", "register-scan"}) {
    Subject subject(model, 0, *name ? std::vector<std::string>{name} : std::vector<std::string>{}, kRows);
    subject.count(kRows, false, [](Backend& b, const Batch&) { b.embed(); });
    const auto records = subject.count(kRows, false, [&](Backend& b, const Batch&) {
      b.project_gdn(0);
      b.mix_gdn(0);
    });
    const double moved = megabytes(asked_lines(records, "gdn_scan", "states"));
    std::printf("  %-24s %9.3f MB; at 2,048 rows %.1f MiB\n", *name ? "state through memory" : "in registers", moved,
                moved * 1e6 / 1048576 * (*name ? 2048.0 / kRows : 1));
  }
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
  const int context = argc > 2 ? std::atoi(argv[2]) : 4096;
  const RandomModel model(two_layers(), 31);
  if (what == "all" || what == "bytes") decode_bytes(model, context);
  if (what == "all" || what == "kv") attention_lines(model, 256);
  if (what == "all" || what == "scan") scan_traffic(model);
  const auto findings = softmetal::take_findings();
  for (const auto& finding : findings) std::fprintf(stderr, "%s\n", softmetal::describe(finding).c_str());
  return findings.empty() ? 0 : 1;
}
