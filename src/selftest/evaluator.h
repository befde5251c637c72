#pragma once
// Evaluator: runs token sequences through the model without a scheduler, for perplexity, golden files and benchmarks.
// It owns the whole state pool of its backend: one sequence at a time. pick(), step() and decode() throw CheckpointError
// when logits are not finite.
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace calla {

class Evaluator {
 public:
  // Allocates one recurrent slot and KV pages for `max_tokens` positions. `chunk` and the rows for which logits are
  // taken at once stay within the backend's options.
  Evaluator(Backend& backend, const ModelShape& shape, int max_tokens, int chunk, int max_heads);

  // Forgets the sequence.
  void reset();
  int position() const { return position_; }
  std::span<const int32_t> pages() const { return pages_; }

  // Appends tokens, teacher-forced, in chunks; calls `on_logits(index into tokens, logits [vocab])` for each.
  using OnLogits = std::function<void(int index, std::span<const float> logits)>;
  void run(std::span<const TokenId> tokens, const OnLogits& on_logits);
  // Appends tokens without looking at logits.
  void skip(std::span<const TokenId> tokens);
  // Appends tokens and greedily picks the next one.
  TokenId pick(std::span<const TokenId> tokens);
  // Appends the token picked last and picks the next; `logits`, if not null, receives the logits [vocab].
  TokenId step(std::vector<float>* logits = nullptr);
  // The same `tokens` times over, submitting a step before the one in front is read where the backend can.
  void decode(int tokens);

 private:
  StepId submit(std::span<const TokenId> tokens, std::span<const HeadRow> heads, bool want_logits);
  StepId submit_next(bool want_logits);
  TokenId picked(StepId step);

  Backend& backend_;
  const ModelShape& shape_;
  const int max_tokens_;
  const int chunk_;
  const int max_heads_;
  std::vector<int32_t> pages_;
  int position_ = 0;
};

}  // namespace calla
