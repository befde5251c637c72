// Scheduler, the loop: what comes in, and which unit of work is next.
#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "base/error.h"
#include "engine/scheduler_sequence.h"

namespace calla {
namespace {

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

// Fewer snapshots would displace each other within a turn, before the next one can use them.
constexpr int64_t kLeastSnapshots = 3;

// What these do not fit into would be no cache, or more memory than was allowed.
void refuse_small_cache(int64_t bytes, int64_t slot_bytes, int64_t page_bytes) {
  const int64_t least = kLeastSnapshots * (slot_bytes + page_bytes);
  if (bytes >= least) return;
  char gigabytes[32];
  std::snprintf(gigabytes, sizeof gigabytes, "%.3f", std::ceil(static_cast<double>(least) / 1e6) / 1e3);
  throw UsageError("the prefix cache is too small for this model: the snapshots that a conversation needs take " +
                   std::string(gigabytes) + " GB or more; give --cache-gb at least that, or 0 for no cache");
}

}  // namespace

StateMemoryPlan plan_state(const Backend& backend, const ModelShape& shape, const SchedulerOptions& given) {
  const SchedulerOptions options = complete(given, shape);
  StateMemoryPlan plan;
  // A snapshot's own cost is its slot; the budget is split evenly between slots and KV pages, except where half of it
  // holds too few slots.
  const auto slot_bytes = std::max<int64_t>(static_cast<int64_t>(backend.recurrent_slot_bytes()), 1);
  // A model without attention has pages without bytes, and one without GDN layers slots without.
  const auto page_bytes = std::max<int64_t>(static_cast<int64_t>(backend.kv_page_bytes()), 1);
  if (options.cache_snapshots < 0) refuse_small_cache(options.cache_bytes, slot_bytes, page_bytes);
  const int64_t cache_slots = options.cache_snapshots >= 0
                                  ? options.cache_snapshots
                                  : std::clamp<int64_t>(options.cache_bytes / 2 / slot_bytes, kLeastSnapshots, 1024);
  plan.recurrent_slots = options.max_sequences + static_cast<int>(cache_slots);
  if (options.kv_tokens > 0) {
    plan.kv_pages = std::max(pages_for(options.kv_tokens), pages_for(options.context)) + 1;
  } else {
    // Twice the context for running sequences (a long one and several short), and the cache's share.
    const int64_t running = pages_for(options.context) * static_cast<int64_t>(std::min(options.max_sequences, 2));
    const int64_t page_budget = std::min(options.cache_bytes / 2, options.cache_bytes - cache_slots * slot_bytes);
    const int64_t cached = cache_slots > 0 ? std::clamp<int64_t>(page_budget / page_bytes, 0, 1 << 16) : 0;
    plan.kv_pages = static_cast<int>(running + cached) + 1;
  }
  return plan;
}

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
  // Whoever finds a seat free passes the queue only.
  const int waiting = static_cast<int>(queue_.size()) - std::max(0, options_.max_sequences - stats_.running);
  if (waiting >= options_.max_queue)
    throw RequestError("the queue is full (" + std::to_string(waiting) + " requests wait); try again later", "",
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
    try {
      if (step()) continue;
    } catch (const DeviceError& error) {
      fail_running(error.what());
      continue;
    }
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

// The device refused a step, so nothing that runs can go on. Those that asked are told, and the next request tries again.
void Scheduler::fail_running(const std::string& error) {
  if (options_.warn) options_.warn(error);
  note_device(error);
  in_flight_.clear();
  preparing_.reset();
  cache_.clear();  // a snapshot taken before may hold what the failed step left
  for (const auto& sequence : running_)
    if (!sequence->finished) finish(*sequence, FinishReason::kError, error);
  running_.clear();
}

void Scheduler::note_device(const std::string& error) {
  const std::lock_guard lock(mutex_);
  stats_.device_error = error;
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

}  // namespace calla
