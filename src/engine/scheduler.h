#pragma once
// Scheduler: the one token loop. It owns all sequences; each call of step() runs one unit of work on the
// backend: a prefill chunk of one sequence, or one decode step of all sequences that decode, in turn when
// both wait, so that a long prompt does not stop the others. CLI, server and bench all go through it.
//
// When nothing else is to be done, it reads prompts that are likely to come (prepare()) in small chunks, and drops that
// at once, keeping what is read, when a request arrives.
//
// submit(), prepare() and stats() may be called from any thread; step() and run() belong to one thread, the engine's, on
// which all sinks are called.
//
// Reading order: this file; scheduler.cc, the loop; scheduler_sequences.cc, a request's beginning and end, with the prefix
// cache; scheduler_steps.cc, what is submitted and collected; scheduler_prepare.cc, the idle half.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <vector>

#include "engine/generation.h"
#include "engine/prefix_cache.h"
#include "engine/snapshot_store.h"
#include "engine/state_pool.h"

namespace calla {

struct SchedulerOptions {
  int context = 0;  // tokens a sequence may have, prompt and answer together; 0: the model's maximum, at most 32768
  int max_sequences = 8;  // that run at once
  int max_queue = 64;     // requests that wait for a place among max_sequences; more are refused
  int prefill_chunk =
      512;  // tokens of a prompt between two looks at the other sequences (load_engine() asks the backend)
  int shared_chunk = 128;    // the same while others decode: smaller, so that their tokens keep coming
  int kv_tokens = 0;         // positions in the KV pool, shared by running sequences and the cache; 0: as planned by
                             // plan_state()
  int cache_snapshots = -1;  // recurrent slots for the prefix cache; -1: as planned by plan_state(); 0: no cache
  int64_t cache_bytes = int64_t{4} << 30;  // what plan_state() may spend on the cache
  int snapshot_interval = 4096;            // tokens between snapshots inside a long prompt
  bool prepare = true;                     // heed prepare()
  std::string cache_dir;                   // keep snapshots here too, for after a restart; empty: do not
  uint64_t cache_dir_bytes = uint64_t{20} << 30;
  std::string model_id;      // with cache_dir: identifies the checkpoint's contents (model/fingerprint.h)
  SnapshotStore::Warn warn;  // gets a line about a device that fails and, with cache_dir, damaged files and the like
};

// What the pool needs for these options on this backend. Throws UsageError if cache_bytes do not hold the snapshots that a
// conversation needs.
StateMemoryPlan plan_state(const Backend& backend, const ModelShape& shape, const SchedulerOptions& options);

// The prompt positions, ascending, where a prefill from `from` keeps snapshots: the first boundary (the
// system block), the last two, any at least 512 tokens after the one before, and every `interval` tokens.
std::vector<int> snapshot_positions(std::span<const int> boundaries, int from, int prompt_tokens, int interval);

struct SchedulerStats {
  int running = 0;
  int queued = 0;
  int snapshots = 0;
  int free_pages = 0;
  int total_pages = 0;
  uint64_t requests = 0;
  uint64_t prompt_tokens = 0;     // accepted
  uint64_t cached_tokens = 0;     // of those, taken from the cache
  uint64_t prefilled_tokens = 0;  // of those, computed
  uint64_t generated_tokens = 0;
  uint64_t decode_steps = 0;
  double prefill_seconds = 0;  // spent in prefill chunks
  double decode_seconds = 0;   // spent in decode steps
  uint64_t preparations = 0;   // that are ready
  uint64_t preparations_interrupted = 0;
  uint64_t prepared_tokens = 0;  // computed for them; not among the prefilled ones
  double prepare_seconds = 0;
  std::string device_error;  // why the latest work on the device failed; empty if it did not
};

class Scheduler {
 public:
  // `backend` and `shape` must outlive the scheduler. Allocates the state pool.
  Scheduler(Backend& backend, const ModelShape& shape, const SchedulerOptions& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  int context() const { return options_.context; }

  // Queues a request. Throws RequestError, with nothing done: an empty prompt, a token outside the
  // vocabulary, context_length_exceeded (with both numbers), or queue_full.
  void submit(std::shared_ptr<Generation> generation);

  // Reads these tokens when there is nothing else to do, and leaves a snapshot after them. A few may wait; the oldest
  // gives way. Does nothing if they do not fit the context or the options say so.
  void prepare(Preparation preparation);
  bool prepares() const { return options_.prepare && options_.cache_snapshots != 0; }

  // One unit of work. False: there was nothing to do.
  bool step();
  // step() until `stop` is requested, sleeping while there is nothing to do. Then cancels what is left. A DeviceError of
  // step() ends the requests that run and goes to options.warn; the others let it out.
  void run(std::stop_token stop);
  // Runs this generation, and what else is queued, to its end on this thread.
  void run_until_finished(const std::shared_ptr<Generation>& generation);

  SchedulerStats stats() const;
  // Engine thread only.
  PrefixCache& cache() { return cache_; }
  StatePool& pool() { return pool_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Sequence;
  struct StepInFlight;

  void admit();
  bool start(std::shared_ptr<Generation> generation, Clock::time_point queued);
  int reservation(const GenerationRequest& request) const;
  void drop_cancelled();
  void submit_prefill(const std::shared_ptr<Sequence>& sequence, int chunk);
  void submit_decode(const std::vector<std::shared_ptr<Sequence>>& sequences);
  void collect_oldest();
  void collect_token(Sequence& sequence, StepId step, int head, TokenId token, bool logits);
  void finish(Sequence& sequence, FinishReason reason, const std::string& error = "");
  void fail_running(const std::string& error);
  void note_device(const std::string& error);
  void take_snapshot(Sequence& sequence);
  void keep(Snapshot snapshot);
  PrefixCache::Match find_cached(std::span<const TokenId> prompt);
  bool caching(const Sequence& sequence) const;
  bool needs_host_token(const Sequence& sequence) const;
  bool may_decode(const Sequence& sequence) const;
  HeadRow make_head(Sequence& sequence, int row, int index);
  void ensure_pages(Sequence& sequence, int tokens);
  SlotHandle take_slot();
  bool adopt(const Snapshot& snapshot, SlotHandle& slot, PageList& pages);

  struct Preparing {
    Preparation preparation;
    PreparationResult result;
    int state_tokens = 0;
    SlotHandle slot;  // while it is the current one
    PageList pages;
  };
  bool prepare_step();
  bool begin_preparation(Preparing& preparing);
  void interrupt_preparation();
  void drop_prepared_for(std::span<const TokenId> prompt);

  Backend& backend_;
  const ModelShape& shape_;
  const SchedulerOptions options_;
  StatePool pool_;
  PrefixCache cache_;
  std::unique_ptr<SnapshotStore> store_;  // if there is a cache_dir
  std::vector<std::shared_ptr<Sequence>> running_;
  std::deque<StepInFlight> in_flight_;
  int reserved_pages_ = 0;
  bool prefill_last_ = false;
  size_t next_prefill_ = 0;

  std::optional<Preparing> preparing_;
  int prepare_chunk_;  // adapts to the device's speed

  struct Waiting {
    std::shared_ptr<Generation> generation;
    Clock::time_point since;
  };
  mutable std::mutex mutex_;  // guards queue_, preparations_ and stats_
  std::condition_variable wake_;
  std::deque<Waiting> queue_;
  std::deque<Preparing> preparations_;  // the newest last; it comes first
  SchedulerStats stats_;
};

}  // namespace calla
