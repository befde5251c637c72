// Scheduler, the steps: what is put into one, and what is made of its tokens when it is done.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "engine/scheduler_sequence.h"
#include "model/forward.h"

namespace calla {
namespace {

// The natural-log probabilities asked for, from raw logits.
void fill_logprobs(std::span<const float> logits, TokenId picked, int top, TokenEvent& event) {
  const double of_picked = log_probability(logits, picked);
  const double log_sum = logits[static_cast<size_t>(picked)] - of_picked;
  const auto logprob = [&](TokenId token) { return static_cast<float>(logits[static_cast<size_t>(token)] - log_sum); };
  event.logprob = static_cast<float>(of_picked);
  if (top <= 0) return;
  std::vector<TokenId> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<TokenId>(i);
  const auto n = static_cast<std::ptrdiff_t>(std::min<size_t>(static_cast<size_t>(top), ids.size()));
  std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), [&](TokenId a, TokenId b) {
    const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  for (std::ptrdiff_t i = 0; i < n; ++i) event.top.push_back({ids[i], logprob(ids[i])});
}

}  // namespace

void Scheduler::ensure_pages(Sequence& sequence, int tokens) {
  while (static_cast<int>(sequence.pages.size()) < pages_for(tokens))
    if (!pool_.append_page(sequence.pages)) check(cache_.evict_one(), "reserved pages are there");
}

HeadRow Scheduler::make_head(Sequence& sequence, int row, int index) {
  HeadRow head;
  head.row = row;
  head.sequence = index;
  head.pick = true;
  head.sampling = sequence.request().sampling;
  if (TokenConstraint* constraint = sequence.request().constraint.get()) {
    sequence.mask.assign((static_cast<size_t>(shape_.vocab) + 31) / 32, 0);
    if (constraint->allowed(sequence.mask)) head.allowed = sequence.mask;
  }
  ++sequence.picks_submitted;
  return head;
}

void Scheduler::submit_prefill(const std::shared_ptr<Sequence>& sequence, int chunk) {
  int end = std::min(sequence->prompt_tokens, sequence->state_tokens + chunk);
  if (!sequence->snapshots.empty()) end = std::min(end, sequence->snapshots.front());
  const int rows = end - sequence->state_tokens;
  ensure_pages(*sequence, end);

  const bool last = end == sequence->prompt_tokens;
  const SequenceRows part{sequence->slot.id(), sequence->pages.ids(), sequence->state_tokens, rows};
  std::vector<HeadRow> heads;
  if (last) heads.push_back(make_head(*sequence, rows - 1, 0));
  Batch batch;
  batch.tokens =
      std::span(sequence->tokens).subspan(static_cast<size_t>(sequence->state_tokens), static_cast<size_t>(rows));
  batch.sequences = std::span(&part, 1);
  batch.heads = heads;
  batch.want_logits = last && sequence->request().top_logprobs >= 0;

  StepInFlight step;
  step.submitted = Clock::now();
  step.id = forward(backend_, shape_, batch);
  step.parts.push_back({sequence, last ? 0 : -1, end});
  step.logits = batch.want_logits;
  step.prefill = true;
  step.tokens = rows;
  in_flight_.push_back(std::move(step));
  sequence->state_tokens = end;
  if (!sequence->snapshots.empty() && sequence->snapshots.front() == end) {
    sequence->snapshots.erase(sequence->snapshots.begin());
    take_snapshot(*sequence);
  }
}

bool Scheduler::needs_host_token(const Sequence& sequence) const {
  return !backend_.asynchronous() || sequence.request().constraint != nullptr;
}

bool Scheduler::may_decode(const Sequence& sequence) const {
  if (sequence.finished || sequence.picks_submitted >= sequence.picks_allowed) return false;
  const int unread = sequence.picks_submitted - sequence.picks_read;
  return unread == 0 || (!needs_host_token(sequence) && unread < kStepsInFlight);
}

void Scheduler::submit_decode(const std::vector<std::shared_ptr<Sequence>>& sequences) {
  std::vector<TokenId> tokens;
  std::vector<SequenceRows> parts;
  std::vector<HeadRow> heads;
  StepInFlight step;
  for (const auto& sequence : sequences) {
    ensure_pages(*sequence, sequence->state_tokens + 1);
    const bool read = sequence->picks_read == sequence->picks_submitted;
    tokens.push_back(read ? sequence->tokens.back() : kLastPicked);
    parts.push_back({sequence->slot.id(), sequence->pages.ids(), sequence->state_tokens, 1});
    const int index = static_cast<int>(heads.size());
    heads.push_back(make_head(*sequence, index, index));
    step.parts.push_back({sequence, index, -1});
    step.logits |= sequence->request().top_logprobs >= 0;
    ++sequence->state_tokens;
  }
  Batch batch;
  batch.tokens = tokens;
  batch.sequences = parts;
  batch.heads = heads;
  batch.want_logits = step.logits;
  step.tokens = static_cast<int>(tokens.size());
  step.submitted = Clock::now();
  step.id = forward(backend_, shape_, batch);
  in_flight_.push_back(std::move(step));
}

void Scheduler::collect_oldest() {
  StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  std::string error;
  try {
    backend_.wait(step.id);
  } catch (const DeviceError& e) {
    error = e.what();
    cache_.clear();  // a snapshot taken after this step would hold what the failed step left
  }
  {
    std::lock_guard lock(mutex_);
    stats_.device_error = error;
    const double seconds = seconds_between(step.submitted, Clock::now());
    (step.prefill ? stats_.prefill_seconds : stats_.decode_seconds) += seconds;
    if (step.prefill) stats_.prefilled_tokens += static_cast<uint64_t>(step.tokens);
    if (!step.prefill) ++stats_.decode_steps;
  }
  std::vector<TokenId> picked;
  if (error.empty()) {
    const std::span<const TokenId> tokens = backend_.picked(step.id);
    picked.assign(tokens.begin(), tokens.end());
  }
  for (const StepInFlight::Part& part : step.parts) {
    Sequence& sequence = *part.sequence;
    if (sequence.finished) continue;
    if (!error.empty()) {
      finish(sequence, FinishReason::kError, error);
      continue;
    }
    if (part.prompt_done >= 0) sequence.generation->sink().on_prompt_progress(part.prompt_done, sequence.prompt_tokens);
    if (part.head >= 0)
      collect_token(sequence, step.id, part.head, picked[static_cast<size_t>(part.head)], step.logits);
  }
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
}

void Scheduler::collect_token(Sequence& sequence, StepId step, int head, TokenId token, bool logits) {
  const GenerationRequest& request = sequence.request();
  if (sequence.generation->cancelled()) return finish(sequence, FinishReason::kCancelled);
  if (token < 0) {
    const bool constrained = request.constraint != nullptr;
    return finish(sequence, FinishReason::kError,
                  constrained ? "no token fits the constraint, or the logits are not finite" : kNotFinite);
  }
  sequence.last_token = Clock::now();
  if (sequence.picks_read == 0) sequence.first_token = sequence.last_token;
  TokenEvent event;
  event.token = token;
  event.index = sequence.picks_read++;
  event.is_stop = std::find(request.stop_tokens.begin(), request.stop_tokens.end(), token) != request.stop_tokens.end();
  if (logits && request.top_logprobs >= 0)
    fill_logprobs(backend_.logits(step, head), token, request.top_logprobs, event);
  sequence.tokens.push_back(token);
  if (request.constraint) request.constraint->accept(token);
  {
    std::lock_guard lock(mutex_);
    ++stats_.generated_tokens;
  }
  const bool go_on = sequence.generation->sink().on_token(event);
  if (event.is_stop) return finish(sequence, FinishReason::kStopToken);
  if (!go_on) return finish(sequence, FinishReason::kSink);
  if (sequence.picks_read >= sequence.picks_allowed)
    finish(sequence, sequence.limited_by_context ? FinishReason::kContextFull : FinishReason::kMaxTokens);
}

}  // namespace calla
