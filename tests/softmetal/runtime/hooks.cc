// The functions that -fsanitize=thread calls for every load and store of instrumented kernels. The sanitizer's own
// runtime is not linked; these report to the checker of the dispatch that runs on this thread.
#include <cstddef>

#include "checker.h"
#include "worker.h"

namespace softmetal {
namespace {

inline void access(const void* address, size_t bytes, bool write, const void* pc) {
  Worker* worker = Worker::current();
  if (!worker || worker->on_stack(address)) return;
  if (MemoryChecker* checker = worker->dispatch().checker) checker->access(*worker, address, bytes, write, pc);
}

// The hooks for aligned accesses: the compiler took the address to be a multiple of the size (up to 8).
inline void aligned(const void* address, size_t bytes, bool write, const void* pc) {
  if (reinterpret_cast<uintptr_t>(address) % (bytes < 8 ? bytes : 8) != 0) [[unlikely]] {
    Worker* worker = Worker::current();
    if (worker && worker->dispatch().checker) worker->dispatch().checker->misaligned(*worker, bytes, write, pc);
  }
  access(address, bytes, write, pc);
}

}  // namespace
}  // namespace softmetal

using softmetal::access;
using softmetal::aligned;

#define SOFTMETAL_HOOK(bytes)                                                                          \
  void __tsan_read##bytes(void* p) { aligned(p, bytes, false, __builtin_return_address(0)); }          \
  void __tsan_write##bytes(void* p) { aligned(p, bytes, true, __builtin_return_address(0)); }          \
  void __tsan_volatile_read##bytes(void* p) { aligned(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_volatile_write##bytes(void* p) { aligned(p, bytes, true, __builtin_return_address(0)); } \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, true, __builtin_return_address(0)); } \
  void __tsan_read_write##bytes(void* p) {                                                             \
    access(p, bytes, false, __builtin_return_address(0));                                              \
    access(p, bytes, true, __builtin_return_address(0));                                               \
  }                                                                                                    \
  void __tsan_unaligned_read_write##bytes(void* p) {                                                   \
    access(p, bytes, false, __builtin_return_address(0));                                              \
    access(p, bytes, true, __builtin_return_address(0));                                               \
  }

extern "C" {
SOFTMETAL_HOOK(1)
SOFTMETAL_HOOK(2)
SOFTMETAL_HOOK(4)
SOFTMETAL_HOOK(8)
SOFTMETAL_HOOK(16)

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, true, __builtin_return_address(0)); }
}
