#include "selftest/evaluator.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/error.h"
#include "model/forward.h"

namespace calla {

Evaluator::Evaluator(Backend& backend, const ModelShape& shape, int max_tokens, int chunk, int max_heads)
    : backend_(backend), shape_(shape), max_tokens_(max_tokens), chunk_(chunk), max_heads_(max_heads) {
  pages_.resize(static_cast<size_t>((max_tokens + kKvPageRows - 1) / kKvPageRows));
  std::iota(pages_.begin(), pages_.end(), 0);
  backend.allocate_state({1, static_cast<int>(pages_.size())});
  reset();
}

void Evaluator::reset() {
  backend_.clear_recurrent(0);
  position_ = 0;
}

StepId Evaluator::submit(std::span<const TokenId> tokens, std::span<const HeadRow> heads, bool want_logits) {
  const auto rows = static_cast<int>(tokens.size());
  check(position_ + rows <= max_tokens_, "the evaluator's context is large enough");
  const SequenceRows sequence{0, pages_, position_, rows};
  Batch batch;
  batch.tokens = tokens;
  batch.sequences = std::span(&sequence, 1);
  batch.heads = heads;
  batch.want_logits = want_logits;
  const StepId step = forward(backend_, shape_, batch);
  position_ += rows;
  return step;
}

void Evaluator::run(std::span<const TokenId> tokens, const OnLogits& on_logits) {
  const auto piece = static_cast<size_t>(std::min(chunk_, max_heads_));
  for (size_t begin = 0; begin < tokens.size(); begin += piece) {
    const size_t rows = std::min(piece, tokens.size() - begin);
    std::vector<HeadRow> heads(rows);
    for (size_t i = 0; i < rows; ++i) heads[i].row = static_cast<int>(i);
    const StepId step = submit(tokens.subspan(begin, rows), heads, true);
    backend_.wait(step);
    for (size_t i = 0; i < rows; ++i)
      on_logits(static_cast<int>(begin + i), backend_.logits(step, static_cast<int>(i)));
  }
}

void Evaluator::skip(std::span<const TokenId> tokens) {
  const auto piece = static_cast<size_t>(chunk_);
  for (size_t begin = 0; begin < tokens.size(); begin += piece)
    backend_.wait(submit(tokens.subspan(begin, std::min(piece, tokens.size() - begin)), {}, false));
}

TokenId Evaluator::pick(std::span<const TokenId> tokens) {
  const size_t last = (tokens.size() - 1) / static_cast<size_t>(chunk_) * static_cast<size_t>(chunk_);
  skip(tokens.first(last));
  HeadRow head;
  head.row = static_cast<int>(tokens.size() - last) - 1;
  head.pick = true;
  const StepId step = submit(tokens.subspan(last), std::span(&head, 1), false);
  backend_.wait(step);
  return picked(step);
}

TokenId Evaluator::picked(StepId step) {
  const TokenId token = backend_.picked(step)[0];
  if (token < 0) throw CheckpointError(kNotFinite);
  return token;
}

StepId Evaluator::submit_next(bool want_logits) {
  HeadRow head;
  head.pick = true;
  const TokenId token = kLastPicked;
  return submit(std::span(&token, 1), std::span(&head, 1), want_logits);
}

TokenId Evaluator::step(std::vector<float>* logits) {
  const StepId step = submit_next(logits != nullptr);
  backend_.wait(step);
  if (logits) {
    const std::span<const float> values = backend_.logits(step, 0);
    logits->assign(values.begin(), values.end());
  }
  return picked(step);
}

void Evaluator::decode(int tokens) {
  StepId previous = 0;
  for (int i = 0; i < tokens; ++i) {
    const StepId step = submit_next(false);
    if (previous != 0) {
      backend_.wait(previous);
      picked(previous);
    }
    previous = step;
  }
  if (previous == 0) return;
  backend_.wait(previous);
  picked(previous);
}

}  // namespace calla
