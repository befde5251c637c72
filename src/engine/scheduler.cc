#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/error.h"
#include "model/forward.h"

namespace calla {
namespace {

constexpr int kBoundarySpacing = 512;

SchedulerOptions complete(SchedulerOptions options, const ModelShape& shape) {
  if (options.context <= 0) options.context = std::min(shape.max_context, kDefaultContext);
  if (options.context > shape.max_context)
    throw UsageError("the context of " + std::to_string(options.context) + " tokens exceeds the model's " +
                     std::to_string(shape.max_context));
  options.max_sequences = std::max(1, options.max_sequences);
  options.prefill_chunk = std::max(1, options.prefill_chunk);
  options.shared_chunk = std::max(1, options.shared_chunk);
  return options;
}

double seconds_between(std::chrono::steady_clock::time_point a, std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

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

StateMemoryPlan plan_state(const Backend& backend, const ModelShape& shape, const SchedulerOptions& given) {
  const SchedulerOptions options = complete(given, shape);
  StateMemoryPlan plan;
  // A snapshot's own cost is its slot; the budget is split evenly between slots and KV pages.
  const auto slot_bytes = std::max<int64_t>(static_cast<int64_t>(backend.recurrent_slot_bytes()), 1);
  // A model without attention has pages without bytes, and one without GDN layers slots without.
  const auto page_bytes = std::max<int64_t>(static_cast<int64_t>(backend.kv_page_bytes()), 1);
  const int64_t cache_slots = options.cache_snapshots >= 0
                                  ? options.cache_snapshots
                                  : std::clamp<int64_t>(options.cache_bytes / 2 / slot_bytes, 2, 1024);
  plan.recurrent_slots = options.max_sequences + static_cast<int>(cache_slots);
  if (options.kv_tokens > 0) {
    plan.kv_pages = std::max(pages_for(options.kv_tokens), pages_for(options.context)) + 1;
  } else {
    // Twice the context for running sequences (a long one and several short), and the cache's share.
    const int64_t running = pages_for(options.context) * static_cast<int64_t>(std::min(options.max_sequences, 2));
    const int64_t cached = cache_slots > 0 ? std::min<int64_t>(options.cache_bytes / 2 / page_bytes, 1 << 16) : 0;
    plan.kv_pages = static_cast<int>(running + cached) + 1;
  }
  return plan;
}

std::vector<int> snapshot_positions(std::span<const int> boundaries, int from, int prompt_tokens, int interval) {
  std::vector<int> usable;
  for (int b : boundaries)
    if (b > from && b < prompt_tokens) usable.push_back(b);
  std::vector<int> chosen;
  int last = from;
  for (size_t i = 0; i < usable.size(); ++i) {
    const bool first = i == 0, among_last_two = i + 2 >= usable.size();
    if (first || among_last_two || usable[i] - last >= kBoundarySpacing) {
      chosen.push_back(usable[i]);
      last = usable[i];
    }
  }
  if (interval > 0)
    for (int p = (from / interval + 1) * interval; p < prompt_tokens; p += interval) chosen.push_back(p);
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

struct Scheduler::Sequence {
  std::shared_ptr<Generation> generation;
  std::vector<TokenId> tokens;  // prompt, then the generated tokens that have been read
  int prompt_tokens = 0;
  int state_tokens = 0;     // tokens that submitted steps have put into the state
  int picks_submitted = 0;  // tokens that submitted steps pick
  int picks_read = 0;
  int picks_allowed = 0;  // by max_tokens and the context
  bool limited_by_context = false;
  bool finished = false;
  std::vector<int> snapshots;  // positions still to come, ascending
  SlotHandle slot;
  PageList pages;
  int reserved_pages = 0;
  std::vector<uint32_t> mask;  // of the constraint, while a step uses it
  GenerationResult result;
  Clock::time_point started, first_token, last_token;

  const GenerationRequest& request() const { return generation->request(); }
  bool prefilling() const { return state_tokens < prompt_tokens; }
};

struct Scheduler::StepInFlight {
  struct Part {
    std::shared_ptr<Sequence> sequence;
    int head = -1;         // its index among the heads, or -1: a prefill chunk that is not the last
    int prompt_done = -1;  // a prefill chunk: prompt tokens in the state after it
  };
  StepId id = 0;
  std::vector<Part> parts;
  bool logits = false;
  bool prefill = false;
  int tokens = 0;
  Clock::time_point submitted;
};

Scheduler::Scheduler(Backend& backend, const ModelShape& shape, const SchedulerOptions& options)
    : backend_(backend),
      shape_(shape),
      options_(complete(options, shape)),
      pool_(backend, plan_state(backend, shape, options_)),
      prepare_chunk_(1) {
  stats_.total_pages = pool_.plan().kv_pages;
  if (!options_.cache_dir.empty() && options_.cache_snapshots != 0)
    store_ = std::make_unique<SnapshotStore>(
        options_.cache_dir, options_.model_id, pool_, options_.cache_dir_bytes,
        options_.warn ? options_.warn : [](const std::string&) {});
}

Scheduler::~Scheduler() = default;

void Scheduler::submit(std::shared_ptr<Generation> generation) {
  const GenerationRequest& request = generation->request();
  const auto prompt = static_cast<int>(request.prompt.size());
  if (prompt == 0) throw RequestError("the prompt is empty; send at least one token", "prompt");
  if (prompt >= options_.context)
    throw RequestError("the prompt has " + std::to_string(prompt) + " tokens, but the context holds " +
                           std::to_string(options_.context) +
                           " and the answer needs room; shorten the prompt or start with a larger --context",
                       "messages", "context_length_exceeded");
  for (TokenId token : request.prompt)
    if (token < 0 || token >= shape_.vocab)
      throw RequestError(
          "token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(shape_.vocab), "prompt");
  std::lock_guard lock(mutex_);
  if (static_cast<int>(queue_.size()) >= options_.max_queue)
    throw RequestError("the queue is full (" + std::to_string(queue_.size()) + " requests wait); try again later", "",
                       "queue_full");
  ++stats_.requests;
  stats_.prompt_tokens += static_cast<uint64_t>(prompt);
  queue_.push_back({std::move(generation), Clock::now()});
  wake_.notify_one();
}

bool Scheduler::step() {
  if (preparing_) {
    std::unique_lock lock(mutex_);
    const bool waiting = !queue_.empty();
    lock.unlock();
    if (waiting) interrupt_preparation();
  }
  drop_cancelled();
  admit();
  std::vector<std::shared_ptr<Sequence>> decoding;
  std::vector<std::shared_ptr<Sequence>> prefilling;
  for (const auto& sequence : running_) {
    if (sequence->prefilling())
      prefilling.push_back(sequence);
    else if (may_decode(*sequence))
      decoding.push_back(sequence);
  }
  const bool prefill = !prefilling.empty() && (decoding.empty() || !prefill_last_);
  if (prefill) {
    submit_prefill(prefilling[next_prefill_++ % prefilling.size()],
                   decoding.empty() ? options_.prefill_chunk : std::min(options_.prefill_chunk, options_.shared_chunk));
  } else if (!decoding.empty()) {
    submit_decode(decoding);
  } else if (in_flight_.empty()) {
    return running_.empty() && prepare_step();
  } else {
    collect_oldest();
    return true;
  }
  prefill_last_ = prefill;
  const size_t keep = backend_.asynchronous() ? kStepsInFlight - 1 : 0;
  while (in_flight_.size() > keep) collect_oldest();
  return true;
}

void Scheduler::run(std::stop_token stop) {
  std::stop_callback on_stop(stop, [this] {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  });
  while (!stop.stop_requested()) {
    if (step()) continue;
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return stop.stop_requested() || !queue_.empty() || !preparations_.empty(); });
  }
  while (!in_flight_.empty()) collect_oldest();
  for (const auto& sequence : running_) finish(*sequence, FinishReason::kCancelled);
  running_.clear();
  std::deque<Waiting> left;
  {
    std::lock_guard lock(mutex_);
    left.swap(queue_);
  }
  for (const Waiting& waiting : left) {
    GenerationResult result;
    result.reason = FinishReason::kCancelled;
    result.prompt_tokens = static_cast<int>(waiting.generation->request().prompt.size());
    waiting.generation->sink().on_finished(result);
  }
}

void Scheduler::run_until_finished(const std::shared_ptr<Generation>& generation) {
  const auto active = [&] {
    {
      std::lock_guard lock(mutex_);
      for (const Waiting& waiting : queue_)
        if (waiting.generation == generation) return true;
    }
    return std::any_of(running_.begin(), running_.end(),
                       [&](const auto& s) { return s->generation == generation && !s->finished; });
  };
  while (active()) step();
  while (!in_flight_.empty()) collect_oldest();
}

SchedulerStats Scheduler::stats() const {
  std::lock_guard lock(mutex_);
  SchedulerStats stats = stats_;
  stats.queued = static_cast<int>(queue_.size());
  return stats;
}

int Scheduler::reservation(const GenerationRequest& request) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  int64_t tokens = options_.context;
  if (request.max_tokens > 0) tokens = std::min<int64_t>(tokens, prompt + request.max_tokens);
  return pages_for(static_cast<int>(tokens)) + 1;  // one more: the copy of a shared, partly filled page
}

void Scheduler::drop_cancelled() {
  for (const auto& sequence : running_)
    if (!sequence->finished && sequence->generation->cancelled()) finish(*sequence, FinishReason::kCancelled);
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
}

void Scheduler::admit() {
  for (;;) {
    Waiting next;
    {
      std::lock_guard lock(mutex_);
      stats_.running = static_cast<int>(running_.size());
      stats_.snapshots = static_cast<int>(cache_.size());
      stats_.free_pages = pool_.free_pages();
      if (queue_.empty()) return;
      const bool cancelled = queue_.front().generation->cancelled();
      if (!cancelled) {
        if (static_cast<int>(running_.size()) >= options_.max_sequences) return;
        const int pages = std::min(reservation(queue_.front().generation->request()), pool_.plan().kv_pages);
        if (!running_.empty() && reserved_pages_ + pages > pool_.plan().kv_pages) return;
      }
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    if (!start(std::move(next.generation), next.since)) continue;
    std::lock_guard lock(mutex_);
    stats_.running = static_cast<int>(running_.size());
  }
}

// Gives the request a slot, the longest cached prefix, and a place among the running sequences.
bool Scheduler::start(std::shared_ptr<Generation> generation, Clock::time_point queued) {
  auto sequence = std::make_shared<Sequence>();
  sequence->generation = std::move(generation);
  const GenerationRequest& request = sequence->request();
  sequence->tokens = request.prompt;
  sequence->prompt_tokens = static_cast<int>(request.prompt.size());
  sequence->result.prompt_tokens = sequence->prompt_tokens;
  sequence->started = Clock::now();
  sequence->result.queue_seconds = seconds_between(queued, sequence->started);
  if (sequence->generation->cancelled()) {
    finish(*sequence, FinishReason::kCancelled);
    return false;
  }
  const int room = options_.context - sequence->prompt_tokens;
  sequence->limited_by_context = request.max_tokens <= 0 || request.max_tokens > room;
  sequence->picks_allowed = sequence->limited_by_context ? room : request.max_tokens;
  sequence->reserved_pages = std::min(reservation(request), pool_.plan().kv_pages);
  reserved_pages_ += sequence->reserved_pages;
  sequence->slot = take_slot();

  PrefixCache::Match match;
  if (caching(*sequence)) match = find_cached(request.prompt);
  if (match.snapshot) {
    const int cached = static_cast<int>(match.snapshot->tokens.size());
    check(adopt(*match.snapshot, sequence->slot, sequence->pages), "reserved pages are there");
    sequence->state_tokens = cached;
    sequence->result.cached_tokens = cached;
    sequence->result.cache_note = "hit: " + std::to_string(cached) + " of " + std::to_string(sequence->prompt_tokens) +
                                  " prompt tokens; " + std::to_string(match.shared_tokens) + " are known";
  } else {
    backend_.clear_recurrent(sequence->slot.id());
    if (!caching(*sequence))
      sequence->result.cache_note = "off";
    else if (cache_.size() == 0)
      sequence->result.cache_note = "miss: the cache is empty";
    else
      sequence->result.cache_note =
          "miss: " + std::to_string(match.shared_tokens) + " tokens are known, but no snapshot lies within them";
  }
  if (request.sampling.has_penalties()) backend_.set_token_counts(sequence->slot.id(), request.prompt, {});
  if (caching(*sequence))
    sequence->snapshots = snapshot_positions(request.boundaries, sequence->state_tokens, sequence->prompt_tokens,
                                             options_.snapshot_interval);
  {
    std::lock_guard lock(mutex_);
    stats_.cached_tokens += static_cast<uint64_t>(sequence->state_tokens);
    if (caching(*sequence)) drop_prepared_for(request.prompt);
  }
  running_.push_back(std::move(sequence));
  return true;
}

// Copies a snapshot's state into a slot and refers to its pages. False: there is no page for the copy of a partly filled
// one.
bool Scheduler::adopt(const Snapshot& snapshot, SlotHandle& slot, PageList& pages) {
  const int tail = static_cast<int>(snapshot.tokens.size()) % kKvPageRows;
  backend_.copy_recurrent(snapshot.slot.id(), slot.id());
  pages = snapshot.pages;
  // The snapshot may go while room is made for the copy; the pages are held already.
  while (tail != 0 && !pool_.make_last_page_private(pages, tail))
    if (!cache_.evict_one()) return false;
  return true;
}

// The longest snapshot in memory, or a longer one from disk, which then is in memory too. The last prompt token is
// always computed.
PrefixCache::Match Scheduler::find_cached(std::span<const TokenId> prompt) {
  const int limit = static_cast<int>(prompt.size()) - 1;
  PrefixCache::Match match = cache_.find(prompt, limit);
  if (!store_) return match;
  const int in_memory = match.snapshot ? static_cast<int>(match.snapshot->tokens.size()) : 0;
  const int on_disk = store_->find(prompt, limit);
  if (on_disk <= in_memory || pages_for(on_disk) + reserved_pages_ > pool_.plan().kv_pages) return match;
  std::optional<Snapshot> snapshot = store_->load(
      prompt, on_disk, [this] { return take_slot(); },
      [this](PageList& pages) {
        while (!pool_.append_page(pages)) check(cache_.evict_one(), "pages within the reservation are there");
      });
  if (snapshot) cache_.insert(std::move(*snapshot));
  return cache_.find(prompt, limit);
}

SlotHandle Scheduler::take_slot() {
  for (;;) {
    if (std::optional<SlotHandle> slot = pool_.take_slot()) return std::move(*slot);
    check(cache_.evict_one(), "there are more slots than running sequences");
  }
}

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

bool Scheduler::caching(const Sequence& sequence) const {
  return sequence.request().use_cache && options_.cache_snapshots != 0;
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

void Scheduler::take_snapshot(Sequence& sequence) {
  const std::span tokens = std::span(sequence.tokens).first(static_cast<size_t>(sequence.state_tokens));
  if (cache_.contains(tokens)) return;
  std::optional<SlotHandle> slot = pool_.take_slot();
  if (!slot && cache_.evict_one()) slot = pool_.take_slot();
  if (!slot) return;  // every slot runs a sequence
  backend_.copy_recurrent(sequence.slot.id(), slot->id());
  keep({{tokens.begin(), tokens.end()}, std::move(*slot), sequence.pages});
}

void Scheduler::keep(Snapshot snapshot) {
  if (store_) store_->save(snapshot);
  cache_.insert(std::move(snapshot));
}

// Ends a sequence. Its state becomes a snapshot: the next turn, or a repeat of a cancelled prompt, goes on
// from there.
void Scheduler::finish(Sequence& sequence, FinishReason reason, const std::string& error) {
  check(!sequence.finished, "a sequence ends once");
  sequence.finished = true;
  reserved_pages_ -= sequence.reserved_pages;
  const bool reusable = reason != FinishReason::kError && caching(sequence) && sequence.state_tokens > 0;
  if (reusable && sequence.slot) {
    check(static_cast<size_t>(sequence.state_tokens) <= sequence.tokens.size(), "the state's tokens are known");
    std::vector<TokenId> tokens(sequence.tokens.begin(), sequence.tokens.begin() + sequence.state_tokens);
    sequence.pages.truncate(static_cast<size_t>(pages_for(sequence.state_tokens)));
    keep({std::move(tokens), std::move(sequence.slot), std::move(sequence.pages)});
  } else {
    sequence.slot = SlotHandle();
    sequence.pages.truncate(0);
  }
  GenerationResult& result = sequence.result;
  result.reason = reason;
  result.error = error;
  result.generated_tokens = sequence.picks_read;
  if (sequence.picks_read > 0) {
    result.prefill_seconds = seconds_between(sequence.started, sequence.first_token);
    result.decode_seconds = seconds_between(sequence.first_token, sequence.last_token);
  } else {
    result.prefill_seconds = seconds_between(sequence.started, Clock::now());
  }
  sequence.generation->sink().on_finished(result);
}

}  // namespace calla
