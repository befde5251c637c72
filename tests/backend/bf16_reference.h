#pragma once
// The fp32 reference with activations that the Metal backend keeps in bf16 rounded to bf16 after the stage that writes
// them: how far bf16 alone is from a golden file, whatever the kernels.
#include <algorithm>
#include <utility>
#include <vector>

#include "backend/create.h"
#include "base/bf16.h"
#include "tests/backend/backend_over.h"

namespace calla {

class Bf16Reference final : public BackendOver {
 public:
  // only: the slots that are rounded; empty: all of them.
  Bf16Reference(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options,
                std::vector<Slot> only = {})
      : BackendOver(create_reference_backend(shape, weights, options)), shape_(shape), only_(std::move(only)) {}

  std::string description() const override { return "reference, activations rounded to bf16"; }

  bool begin(const Batch& batch) override {
    rows_ = batch.tokens.size();
    return inner().begin(batch);
  }
  void project_gdn(int layer) override {
    inner().project_gdn(layer);
    round({Slot::kGdnQkv, Slot::kGdnZ});
  }
  void mix_gdn(int layer) override {
    inner().mix_gdn(layer);
    round({Slot::kMixed});
  }
  void project_attention(int layer) override {
    inner().project_attention(layer);
    round({Slot::kAttnQGate, Slot::kAttnK, Slot::kAttnV});
  }
  void prepare_attention(int layer) override {
    inner().prepare_attention(layer);
    round({Slot::kAttnQ});
  }
  void attend(int layer) override {
    inner().attend(layer);
    round({Slot::kMixed});
  }
  void route(int layer) override {
    inner().route(layer);
    round({Slot::kMoeInput});
  }
  void experts_up(int layer) override {
    inner().experts_up(layer);
    round({Slot::kExpertHidden});
  }

 private:
  void round(std::initializer_list<Slot> slots) {
    for (Slot slot : slots) {
      if (!only_.empty() && std::ranges::find(only_, slot) == only_.end()) continue;
      values_.resize(rows_ * static_cast<size_t>(slot_width(slot, shape_)));
      inner().read_slot(slot, values_);
      for (float& value : values_) value = to_float(to_bf16(value));
      inner().write_slot(slot, values_);
    }
  }

  const ModelShape shape_;
  const std::vector<Slot> only_;
  std::vector<float> values_;
  size_t rows_ = 0;
};

}  // namespace calla
