#pragma once
// The reference's results, computed once for several runs of the conformance tests that differ in the backend under test
// only: at the real widths the reference takes as long as softmetal.
#include <algorithm>
#include <exception>
#include <memory>
#include <vector>

#include "backend/create.h"
#include "base/check.h"
#include "selftest/conformance.h"
#include "tests/backend/backend_over.h"

namespace calla {

struct ReferenceTape {
  bool full = false;                        // there was a run, and what it read is below
  std::vector<std::vector<float>> reads;    // in the order of the calls
  std::vector<std::vector<TokenId>> picks;  // likewise
};

// The first one on a tape computes and records. Each one after it computes nothing and gives what the first one gave; the
// calls must be the same, which they are for one model and equal batches, stages and seed.
class TapedReference final : public BackendOver {
 public:
  TapedReference(std::unique_ptr<Backend> reference, ReferenceTape& tape)
      : BackendOver(std::move(reference)), tape_(tape), replays_(tape.full) {}
  ~TapedReference() override {
    if (std::uncaught_exceptions() > 0) return;  // a run that ended early, and says why
    check(!replays_ || (next_read_ == tape_.reads.size() && next_pick_ == tape_.picks.size()),
          "a run on a tape reads all that the first run read");
    tape_.full = true;
  }

  void embed() override {
    if (!replays_) inner().embed();
  }
  void project_gdn(int layer) override {
    if (!replays_) inner().project_gdn(layer);
  }
  void mix_gdn(int layer) override {
    if (!replays_) inner().mix_gdn(layer);
  }
  void project_attention(int layer) override {
    if (!replays_) inner().project_attention(layer);
  }
  void prepare_attention(int layer) override {
    if (!replays_) inner().prepare_attention(layer);
  }
  void attend(int layer) override {
    if (!replays_) inner().attend(layer);
  }
  void project_residual(int layer) override {
    if (!replays_) inner().project_residual(layer);
  }
  void route(int layer) override {
    if (!replays_) inner().route(layer);
  }
  void group_rows(int layer) override {
    if (!replays_) inner().group_rows(layer);
  }
  void experts_up(int layer) override {
    if (!replays_) inner().experts_up(layer);
  }
  void experts_down(int layer) override {
    if (!replays_) inner().experts_down(layer);
  }
  void head() override {
    if (!replays_) inner().head();
  }
  void pick() override {
    if (!replays_) inner().pick();
  }

  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override {
    if (!replays_) inner().read_gdn_state(layer, slot, state, conv);
    pass(state);
    pass(conv);
  }
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override {
    if (!replays_) inner().read_kv(layer, pages, rows, k, v);
    pass(k);
    pass(v);
  }
  void read_slot(Slot slot, std::span<float> out) override {
    if (!replays_) inner().read_slot(slot, out);
    pass(out);
  }
  // Asked for one head after the other: one entry a call.
  std::span<const TokenId> picked(StepId step) override {
    if (!replays_) {
      const std::span<const TokenId> picked = inner().picked(step);
      tape_.picks.emplace_back(picked.begin(), picked.end());
      return picked;
    }
    check(next_pick_ < tape_.picks.size(), "picks on the tape");
    return tape_.picks[next_pick_++];
  }

 private:
  void pass(std::span<float> values) {
    if (!replays_) {
      tape_.reads.emplace_back(values.begin(), values.end());
      return;
    }
    check(next_read_ < tape_.reads.size() && tape_.reads[next_read_].size() == values.size(), "reads on the tape");
    std::ranges::copy(tape_.reads[next_read_++], values.begin());
  }

  ReferenceTape& tape_;
  const bool replays_;
  size_t next_read_ = 0, next_pick_ = 0;
};

// For ConformanceOptions::reference; the tape outlives the runs.
inline BackendFactory taped_reference(ReferenceTape& tape) {
  return [&tape](const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options) {
    return std::make_unique<TapedReference>(create_reference_backend(shape, weights, options), tape);
  };
}

}  // namespace calla
