#pragma once
// LineCounter: bytes and 128-byte lines that the simdgroups of a dispatch ask for.
//
// A simdgroup instruction is recognised by its code address and by how often each lane has been there since the
// simdgroup last met: the lanes' n-th passes belong together. A lane's accesses to neighbouring addresses from
// different code addresses, up to 16 bytes, count as one (a compiler splits a vector load, a GPU does not).
#include <array>
#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "softmetal/softmetal.h"

namespace softmetal {

class LineCounter {
 public:
  void start_group(uint32_t simdgroups);
  void end_group();
  void flush(uint32_t simdgroup);
  void device(uint32_t thread, int buffer, const char* name, const char* address, size_t bytes, bool write,
              const void* pc);
  void threadgroup(size_t bytes, bool write);
  void finish(DispatchRecord& record);

 private:
  struct Instruction {
    int buffer = 0;
    bool write = false;
    std::vector<uint64_t> lines;
  };
  struct Site {
    const void* pc = nullptr;
    Site* following = nullptr;  // where a lane went next, last time: mostly right again
    std::array<uint32_t, kSimdWidth> passes{};
    std::deque<Instruction> instructions;  // by pass; references to elements stay valid
  };
  struct LastAccess {
    const char* end = nullptr;
    const void* pc = nullptr;
    Instruction* instruction = nullptr;
    Site* site = nullptr;
    size_t bytes = 0;
    bool write = false;
  };
  struct Simdgroup {
    std::unordered_map<const void*, Site> sites;
    std::array<LastAccess, kSimdWidth> last{};
  };
  struct Totals {
    const char* name = nullptr;  // of the parameter; null: not touched
    Traffic traffic;
    std::unordered_set<uint64_t> loaded_lines, stored_lines;
  };

  Site& site_of(Simdgroup& simdgroup, const LastAccess& last, const void* pc);

  std::vector<Simdgroup> simdgroups_;
  std::array<Totals, kMaxBuffers> buffers_;
  Traffic threadgroup_;
};

}  // namespace softmetal
