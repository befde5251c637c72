#pragma once
// What the parts of Scheduler share: a running sequence, and a step that the backend works on.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/scheduler.h"

namespace calla {

inline double seconds_between(std::chrono::steady_clock::time_point a, std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
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

}  // namespace calla
