#pragma once
// What the API needs from the rest of the engine, so that it can be tested without a model.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/sampling.h"
#include "chat/json.h"
#include "chat/replay.h"
#include "engine/generation.h"
#include "engine/scheduler.h"
#include "grammar/token_trie.h"
#include "tokenizer/tokenizer.h"

namespace calla {

// The engine as the API sees it. All members may be called from any thread.
class GenerationService {
 public:
  virtual ~GenerationService() = default;
  // As Scheduler::submit.
  virtual void submit(std::shared_ptr<Generation> generation) = 0;
  // As Scheduler::prepare. `prepares` is false if that does nothing.
  virtual void prepare(Preparation preparation) = 0;
  virtual bool prepares() const = 0;
  virtual SchedulerStats stats() const = 0;
  virtual int context() const = 0;  // tokens that prompt and answer may have together
};

class SchedulerService : public GenerationService {
 public:
  explicit SchedulerService(Scheduler& scheduler) : scheduler_(scheduler) {}
  void submit(std::shared_ptr<Generation> generation) override { scheduler_.submit(std::move(generation)); }
  void prepare(Preparation preparation) override { scheduler_.prepare(std::move(preparation)); }
  bool prepares() const override { return scheduler_.prepares(); }
  SchedulerStats stats() const override { return scheduler_.stats(); }
  int context() const override { return scheduler_.context(); }

 private:
  Scheduler& scheduler_;
};

// The model being served.
struct ServedModel {
  std::string id;       // the name in /v1/models
  int64_t created = 0;  // Unix time
  const Tokenizer* tokenizer = nullptr;
  GenerationService* service = nullptr;
  std::vector<TokenId> stop_tokens;       // end of turn, end of text
  std::shared_ptr<const TokenTrie> trie;  // of the tokenizer, for constrained decoding
  ReplayStore* replay = nullptr;          // of the replies given so far
  SamplingParams sampling_defaults;
  int vocabulary = 0;  // token ids that a prompt may hold
};

}  // namespace calla
