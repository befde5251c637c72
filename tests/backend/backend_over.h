#pragma once
// A backend that passes everything on to another one: what tests put between, they override.
#include <memory>
#include <string>
#include <utility>

#include "backend/backend.h"

namespace calla {

class BackendOver : public Backend {
 public:
  explicit BackendOver(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  std::string name() const override { return inner_->name(); }
  std::string description() const override { return inner_->description(); }
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

  bool begin(const Batch& batch) override { return inner_->begin(batch); }
  void embed() override { inner_->embed(); }
  void project_gdn(int layer) override { inner_->project_gdn(layer); }
  void mix_gdn(int layer) override { inner_->mix_gdn(layer); }
  void project_attention(int layer) override { inner_->project_attention(layer); }
  void prepare_attention(int layer) override { inner_->prepare_attention(layer); }
  void attend(int layer) override { inner_->attend(layer); }
  void project_residual(int layer) override { inner_->project_residual(layer); }
  void route(int layer) override { inner_->route(layer); }
  void group_rows(int layer) override { inner_->group_rows(layer); }
  void experts_up(int layer) override { inner_->experts_up(layer); }
  void experts_down(int layer) override { inner_->experts_down(layer); }
  void head() override { inner_->head(); }
  void pick() override { inner_->pick(); }
  StepId submit() override { return inner_->submit(); }
  void wait(StepId step) override { inner_->wait(step); }
  std::span<const float> logits(StepId step, int head_index) override { return inner_->logits(step, head_index); }
  std::span<const TokenId> picked(StepId step) override { return inner_->picked(step); }
  void read_slot(Slot slot, std::span<float> out) override { inner_->read_slot(slot, out); }
  void write_slot(Slot slot, std::span<const float> in) override { inner_->write_slot(slot, in); }

 protected:
  Backend& inner() { return *inner_; }

 private:
  std::unique_ptr<Backend> inner_;
};

}  // namespace calla
