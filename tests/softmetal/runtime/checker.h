#pragma once
#include "worker.h"
namespace softmetal {
class Shadow {
 public:
  int x = 0;
};
class MemoryChecker {
 public:
  void start_group(Worker&) {}
  void end_group(Worker&) {}
  void start_lane(Worker&) {}
  void round_complete(uint32_t, bool) {}
  void access(Worker&, const void*, size_t, bool, const void*) {}
};
}  // namespace softmetal
