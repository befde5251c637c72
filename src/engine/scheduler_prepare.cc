// Scheduler, the idle half: reading prompts that are likely to come while no request waits or runs.
#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "engine/scheduler.h"
#include "model/forward.h"

namespace calla {
namespace {

constexpr size_t kMaxPreparations = 8;  // that wait
constexpr int kMinGain = 8;             // tokens to be computed; for fewer, a snapshot is not worth its slot
constexpr int kSmallestChunk = 2;
constexpr double kChunkSeconds = 0.02;  // a chunk should not take longer: so long may a request have to wait for it

bool is_prefix(std::span<const TokenId> prefix, std::span<const TokenId> tokens) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

}  // namespace

void Scheduler::prepare(Preparation preparation) {
  if (!prepares()) return;
  const auto size = static_cast<int>(preparation.tokens.size());
  if (size < kMinGain || size >= options_.context) return;
  for (const TokenId token : preparation.tokens)
    if (token < 0 || token >= shape_.vocab) return;
  Preparing next;
  next.result.tokens = size;
  next.preparation = std::move(preparation);
  const std::lock_guard lock(mutex_);
  drop_prepared_for(next.preparation.tokens);
  preparations_.push_back(std::move(next));
  if (preparations_.size() > kMaxPreparations) preparations_.pop_front();
  wake_.notify_one();
}

// What waits and is a part of `prompt` has become useless. With the lock held.
void Scheduler::drop_prepared_for(std::span<const TokenId> prompt) {
  std::erase_if(preparations_, [&](const Preparing& p) { return is_prefix(p.preparation.tokens, prompt); });
}

// One chunk, or the begin of a preparation. False: there is none.
bool Scheduler::prepare_step() {
  if (!preparing_) {
    {
      const std::lock_guard lock(mutex_);
      if (preparations_.empty()) return false;
      preparing_ = std::move(preparations_.back());
      preparations_.pop_back();
    }
    if (!begin_preparation(*preparing_)) preparing_.reset();
    return true;
  }
  Preparing& p = *preparing_;
  const std::span<const TokenId> tokens = p.preparation.tokens;
  const auto begin = Clock::now();
  const int rows = std::min(p.result.tokens - p.state_tokens, prepare_chunk_);
  while (static_cast<int>(p.pages.size()) < pages_for(p.state_tokens + rows)) {
    if (pool_.append_page(p.pages) || cache_.evict_one()) continue;
    preparing_.reset();
    return true;
  }
  const SequenceRows part{p.slot.id(), p.pages.ids(), p.state_tokens, rows};
  Batch batch;
  batch.tokens = tokens.subspan(static_cast<size_t>(p.state_tokens), static_cast<size_t>(rows));
  batch.sequences = std::span(&part, 1);
  try {
    backend_.wait(forward(backend_, shape_, batch));
  } catch (const DeviceError& error) {
    note_device(error.what());
    cache_.clear();  // as after any failed step; the next request meets the fault again and reports it
    preparing_.reset();
    return true;
  }
  p.state_tokens += rows;
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  p.result.seconds += seconds;
  p.result.computed_tokens += rows;
  if (seconds > kChunkSeconds) prepare_chunk_ = std::max(kSmallestChunk, prepare_chunk_ / 2);
  if (seconds < kChunkSeconds / 2) prepare_chunk_ = std::min(options_.prefill_chunk, prepare_chunk_ * 2);

  const bool ready = p.state_tokens == p.result.tokens;
  {
    const std::lock_guard lock(mutex_);
    stats_.prepared_tokens += static_cast<uint64_t>(rows);
    stats_.prepare_seconds += seconds;
    stats_.device_error.clear();
    if (ready) ++stats_.preparations;
  }
  if (!ready) return true;
  Preparing done = std::exchange(preparing_, std::nullopt).value();
  keep({done.preparation.tokens, std::move(done.slot), std::move(done.pages)});
  if (done.preparation.on_ready) done.preparation.on_ready(done.result);
  return true;
}

// Gives it a slot and what the cache knows of it. False: there is nothing to gain, or no room.
bool Scheduler::begin_preparation(Preparing& p) {
  const std::span<const TokenId> tokens = p.preparation.tokens;
  p.slot = take_slot();
  const PrefixCache::Match match = cache_.find(tokens, p.result.tokens);
  p.state_tokens = match.snapshot ? static_cast<int>(match.snapshot->tokens.size()) : 0;
  const bool first = p.result.computed_tokens == 0;
  if (first) p.result.known_tokens = p.state_tokens;
  if (p.state_tokens == p.result.tokens || (first && p.result.tokens - p.state_tokens < kMinGain)) return false;
  if (match.snapshot) return adopt(*match.snapshot, p.slot, p.pages);
  backend_.clear_recurrent(p.slot.id());
  return true;
}

// A request has come. What has been read so far stays: the request may go on from there, or else the preparation later.
void Scheduler::interrupt_preparation() {
  Preparing p = std::exchange(preparing_, std::nullopt).value();
  ++p.result.interruptions;
  const auto read = static_cast<size_t>(p.state_tokens);
  if (read > 0 && !cache_.contains(std::span(p.preparation.tokens).first(read))) {
    p.pages.truncate(static_cast<size_t>(pages_for(p.state_tokens)));
    cache_.insert({{p.preparation.tokens.begin(), p.preparation.tokens.begin() + p.state_tokens},
                   std::move(p.slot),
                   std::move(p.pages)});
  }
  p.slot = SlotHandle();
  p.pages.truncate(0);
  const std::lock_guard lock(mutex_);
  ++stats_.preparations_interrupted;
  preparations_.push_back(std::move(p));
}

}  // namespace calla
