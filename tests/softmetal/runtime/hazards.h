#pragma once
// HazardTracker: which dispatches and encoders may overlap on a real device, and whether such two touch the same bytes.
//
// Inside a concurrent encoder, dispatches overlap until a memoryBarrier. Two encoders overlap on an untracked buffer
// unless a fence, an event, or the end of the first one's command buffer before the commit of the second orders them.
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "commands.h"
#include "shadow.h"

namespace softmetal {

class HazardTracker {
 public:
  // An encoder starts; `ordered_before` are encoders that events have shown to have ended.
  void begin_encoder(const EncoderRecord& encoder, uint64_t id, uint64_t command_buffer,
                     const std::vector<uint64_t>& ordered_before);
  // A dispatch or copy has run. An error text if it conflicts; the finding is reported.
  std::string add(const std::string& name, AccessSet set, const std::map<uint64_t, const Memory*>& memories);
  void barrier(const Barrier& barrier);
  void end_encoder();
  // All encoders of this command buffer have ended before whatever is committed from now on.
  void command_buffer_ended(uint64_t command_buffer);
  // Encoders of command buffers that had ended when this one was committed are ordered before it.
  void command_buffer_committed(uint64_t command_buffer);

 private:
  struct Access {
    std::string name;
    AccessSet set;
  };
  struct Encoder {
    uint64_t id = 0;
    uint64_t command_buffer = 0;
    std::string label;
    AccessSet set;              // of untracked memory
    std::set<uint64_t> before;  // encoders ordered before this one
  };

  std::mutex mutex_;  // commits come from host threads, the rest from the one that executes
  const EncoderRecord* record_ = nullptr;
  std::vector<Access> phase_;  // since the last barrier
  std::unique_ptr<Encoder> current_;
  std::vector<std::unique_ptr<Encoder>> past_;
  std::set<uint64_t> ended_command_buffers_;
  std::map<uint64_t, std::set<uint64_t>> ended_at_commit_;
};

}  // namespace softmetal
