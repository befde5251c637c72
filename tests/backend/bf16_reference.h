#pragma once
// The fp32 reference with every activation that the GPU backends keep in bf16 rounded to bf16 after the stage that
// writes it: how far bf16 alone is from a golden file, whatever the kernels.
#include <memory>
#include <vector>

#include "backend/create.h"
#include "base/bf16.h"

namespace calla {

class Bf16Reference final : public Backend {
 public:
  Bf16Reference(const ModelShape& shape, const ModelWeights& weights, const BackendOptions& options)
      : shape_(shape), inner_(create_reference_backend(shape, weights, options)) {}

  std::string name() const override { return "reference"; }
  std::string description() const override { return "reference, activations rounded to bf16"; }
  void allocate_state(const StateMemoryPlan& plan) override { inner_->allocate_state(plan); }
  size_t recurrent_slot_bytes() const override { return inner_->recurrent_slot_bytes(); }
  size_t kv_page_bytes() const override { return inner_->kv_page_bytes(); }
  void clear_recurrent(int slot) override { inner_->clear_recurrent(slot); }
  void copy_recurrent(int from, int to) override { inner_->copy_recurrent(from, to); }
  void copy_kv_page(int from, int to, int rows) override { inner_->copy_kv_page(from, to, rows); }
  void set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) override {
    inner_->set_token_counts(slot, prompt, generated);
  }
  std::string state_layout() const override { return inner_->state_layout(); }
  void export_recurrent(int slot, std::span<std::byte> out) override { inner_->export_recurrent(slot, out); }
  void import_recurrent(int slot, std::span<const std::byte> in) override { inner_->import_recurrent(slot, in); }
  void export_kv_page(int page, std::span<std::byte> out) override { inner_->export_kv_page(page, out); }
  void import_kv_page(int page, std::span<const std::byte> in) override { inner_->import_kv_page(page, in); }
  void read_gdn_state(int layer, int slot, std::span<float> state, std::span<float> conv) override {
    inner_->read_gdn_state(layer, slot, state, conv);
  }
  void write_gdn_state(int layer, int slot, std::span<const float> state, std::span<const float> conv) override {
    inner_->write_gdn_state(layer, slot, state, conv);
  }
  void read_kv(int layer, std::span<const int32_t> pages, int rows, std::span<float> k, std::span<float> v) override {
    inner_->read_kv(layer, pages, rows, k, v);
  }
  void write_kv(int layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                std::span<const float> v) override {
    inner_->write_kv(layer, pages, rows, k, v);
  }

  bool begin(const Batch& batch) override {
    rows_ = batch.tokens.size();
    return inner_->begin(batch);
  }
  void embed() override { inner_->embed(); }
  void project_gdn(int layer) override {
    inner_->project_gdn(layer);
    round({Slot::kGdnQkv, Slot::kGdnZ});
  }
  void mix_gdn(int layer) override {
    inner_->mix_gdn(layer);
    round({Slot::kMixed});
  }
  void project_attention(int layer) override {
    inner_->project_attention(layer);
    round({Slot::kAttnQGate, Slot::kAttnK, Slot::kAttnV});
  }
  void prepare_attention(int layer) override {
    inner_->prepare_attention(layer);
    round({Slot::kAttnQ});
  }
  void attend(int layer) override {
    inner_->attend(layer);
    round({Slot::kMixed});
  }
  void project_residual(int layer) override { inner_->project_residual(layer); }
  void route(int layer) override {
    inner_->route(layer);
    round({Slot::kMoeInput});
  }
  void group_rows(int layer) override { inner_->group_rows(layer); }
  void experts_up(int layer) override {
    inner_->experts_up(layer);
    round({Slot::kExpertHidden});
  }
  void experts_down(int layer) override { inner_->experts_down(layer); }
  void head() override { inner_->head(); }
  void pick() override { inner_->pick(); }
  StepId submit() override { return inner_->submit(); }
  void wait(StepId step) override { inner_->wait(step); }
  std::span<const float> logits(StepId step, int head_index) override { return inner_->logits(step, head_index); }
  std::span<const TokenId> picked(StepId step) override { return inner_->picked(step); }
  void read_slot(Slot slot, std::span<float> out) override { inner_->read_slot(slot, out); }
  void write_slot(Slot slot, std::span<const float> in) override { inner_->write_slot(slot, in); }

 private:
  void round(std::initializer_list<Slot> slots) {
    for (Slot slot : slots) {
      values_.resize(rows_ * static_cast<size_t>(slot_width(slot, shape_)));
      inner_->read_slot(slot, values_);
      for (float& value : values_) value = to_float(to_bf16(value));
      inner_->write_slot(slot, values_);
    }
  }

  const ModelShape shape_;
  std::unique_ptr<Backend> inner_;
  std::vector<float> values_;
  size_t rows_ = 0;
};

}  // namespace calla
