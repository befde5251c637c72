// The functions that -fsanitize=thread calls for every load and store of instrumented kernels. The sanitizer's own
// runtime is not linked; these report to the checker of the dispatch that runs on this thread.
#include <cstddef>
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace softmetal {
namespace {

inline void access(const void* address, size_t bytes, bool write, const void* pc) {
  Worker* worker = Worker::current();
  if (!worker || worker->on_stack(address)) return;
  worker->tick();
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
// clang calls these for copies of structs.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, false, __builtin_return_address(0));
  access(to, bytes, true, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  access(from, bytes, false, __builtin_return_address(0));
  access(to, bytes, true, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  access(to, bytes, true, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
}

// --- undefined behaviour ---------------------------------------------------------------------------------------------
// -fsanitize=bounds,alignment,integer-divide-by-zero call these. The first member of their data is the place.
namespace softmetal {
namespace {

struct UndefinedPlace {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct TypeName {
  uint16_t kind;
  uint16_t info;
  char name[1];  // in quotes
};
struct TypeMismatch {
  UndefinedPlace place;
  const TypeName* type;
  unsigned char log_alignment;
  unsigned char access;
};

void undefined(const UndefinedPlace& at, Fault fault, const std::string& message) {
  if (Worker* worker = Worker::current())
    worker->fault(fault, message, std::string(at.file) + ":" + std::to_string(at.line));
}

}  // namespace
}  // namespace softmetal

extern "C" {
void __ubsan_handle_out_of_bounds(softmetal::UndefinedPlace* at, uintptr_t index) {
  softmetal::undefined(*at, softmetal::Fault::kUndefined,
                       "the index " + std::to_string(static_cast<intptr_t>(index)) + " is outside the array");
}
void __ubsan_handle_divrem_overflow(softmetal::UndefinedPlace* at, uintptr_t, uintptr_t) {
  softmetal::undefined(*at, softmetal::Fault::kUndefined, "an integer division by zero, or one that overflows");
}
void __ubsan_handle_type_mismatch_v1(softmetal::TypeMismatch* data, uintptr_t pointer) {
  softmetal::undefined(data->place, softmetal::Fault::kMisaligned,
                       "a " + std::string(data->type->name) + " at an address that is not a multiple of " +
                           std::to_string(1u << data->log_alignment) + " (remainder " +
                           std::to_string(pointer % (uintptr_t{1} << data->log_alignment)) + ")");
}
}
