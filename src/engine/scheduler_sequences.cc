// Scheduler, the sequences: how a request becomes one, what the prefix cache gives it, and what it leaves at its end.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "engine/scheduler_sequence.h"

namespace calla {
namespace {

constexpr int kBoundarySpacing = 512;  // tokens between two snapshots at boundaries in the middle of a prompt

}  // namespace

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
  std::vector<Waiting> gone;
  {
    std::lock_guard lock(mutex_);
    const auto left = [](const Waiting& waiting) { return waiting.generation->cancelled(); };
    for (auto next = std::find_if(queue_.begin(), queue_.end(), left); next != queue_.end();
         next = std::find_if(next, queue_.end(), left)) {
      gone.push_back(std::move(*next));
      next = queue_.erase(next);
    }
  }
  for (Waiting& waiting : gone) start(std::move(waiting.generation), waiting.since);  // which only ends it
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
      if (static_cast<int>(running_.size()) >= options_.max_sequences) return;
      const int pages = std::min(reservation(queue_.front().generation->request()), pool_.plan().kv_pages);
      if (!running_.empty() && reserved_pages_ + pages > pool_.plan().kv_pages) return;
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
  running_.push_back(sequence);  // from here on whoever ends the running ones ends it too
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

bool Scheduler::caching(const Sequence& sequence) const {
  return sequence.request().use_cache && options_.cache_snapshots != 0;
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
    try {
      keep({std::move(tokens), std::move(sequence.slot), std::move(sequence.pages)});
    } catch (const DeviceError& device_error) {
      note_device(device_error.what());
      cache_.clear();  // the answer stands; the next request meets the fault again and reports it
    }
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
  {
    std::lock_guard lock(mutex_);  // its seat is free: whoever is told may come with the next request
    stats_.running = static_cast<int>(std::ranges::count_if(running_, [](const auto& s) { return !s->finished; }));
  }
  sequence.generation->sink().on_finished(result);
}

}  // namespace calla
