#pragma once
// What translated kernels and the runtime say to each other. Kernel code includes this through softmetal_msl.h; a
// reader of kernels need not know it.
#include <cstddef>
#include <cstdint>
#include <source_location>

// The shim's own work on gathered operands is no memory access of the kernel.
#define SOFTMETAL_UNCHECKED __attribute__((no_sanitize("thread")))

namespace softmetal {

inline constexpr uint32_t kSimdWidth = 32;
inline constexpr int kMaxBuffers = 31;
inline constexpr int kMaxThreadgroupArguments = 31;

struct Size3 {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;
};

// What one thread (lane) of a dispatch sees as its inputs.
struct Invocation {
  void* const* buffers = nullptr;        // by [[buffer(n)]]
  void* const* threadgroup = nullptr;    // by [[threadgroup(n)]]
  const size_t* buffer_bytes = nullptr;  // from the bound offset to the end
  Size3 threadgroup_position;            // in the grid
  Size3 threadgroups;                    // in the grid
  Size3 threads_in_grid;
  Size3 group_threads;        // of this threadgroup (smaller at the edges of a dispatchThreads grid)
  Size3 dispatch_threads;     // as asked for
  uint32_t exact_bytes = 0;   // bit per buffer index: must be bound with exactly its parameter's size
  uint32_t thread_index = 0;  // in the threadgroup, x fastest
};

// --- collectives -----------------------------------------------------------------------------------------------
// Every active lane of a simdgroup deposits a pointer to its value and two parameters; the last one to arrive applies
// the operation to all of them.
struct Lanes {
  void* value[kSimdWidth];
  uint64_t param[kSimdWidth];
  uint32_t active = 0;  // bit per lane
};
using ApplyFn = void (*)(const Lanes&);

struct CollectiveKind {
  const char* name;
  ApplyFn apply;
  bool needs_all_lanes = false;  // matrices and tensors: every lane of the simdgroup must be there
};

void simd_collective(const CollectiveKind& kind, void* value, uint64_t param, const std::source_location& at);

// Called from an ApplyFn: `lane` asked for a value of `source`, which is not there. Does not return.
[[noreturn]] void missing_lane(uint32_t lane, uint64_t source);
// Called by shim code for a use that MSL leaves undefined. Does not return.
[[noreturn]] void kernel_fault(const char* message, const std::source_location& at);

enum : uint32_t { kFenceNone = 0, kFenceDevice = 1, kFenceThreadgroup = 2, kFenceTexture = 4 };
void threadgroup_barrier(uint32_t fences, const std::source_location& at);
void simdgroup_barrier(uint32_t fences, const std::source_location& at);
void thread_fence(uint32_t fences, bool device_scope);

// Where a pointer points, for functions overloaded on address spaces.
bool points_to_threadgroup(const volatile void* p);
bool points_to_thread(const volatile void* p);
inline bool points_to_device(const volatile void* p) { return !points_to_threadgroup(p) && !points_to_thread(p); }
inline bool points_to_constant(const volatile void* p) { return points_to_device(p); }

uint32_t lane_index();

// Atomics tell the checker; the access itself is made by the shim.
enum class AtomicKind : uint8_t { kLoad, kStore, kReadWrite };
void atomic_access(const void* address, uint32_t bytes, AtomicKind kind, const void* pc);

// --- cooperative tensors -----------------------------------------------------------------------------------------
enum class TensorLayout : uint8_t { kM5, kShuffled };
// Matrix units that compute wrongly and report nothing.
enum class TensorFault : uint8_t {
  kNone,
  kOneElement,   // one of the sums that an operation makes is too large by 1/256 of itself
  kDroppedTail,  // the last input of each operation is left out
  kShortSums,    // sums are kept in fp16 between operations
};
enum class TensorRole : uint8_t { kLeft, kRight, kDestination };

// Which element of a tensor (dimension 0 contiguous) each slot of each lane holds.
inline constexpr uint32_t kSpareTensorSlots = 2;  // of the shuffled layout; they hold nothing
struct TensorMap {
  struct Place {
    int16_t i0, i1;
    bool valid;
  };
  uint32_t capacity = 0;  // slots a lane
  TensorFault fault = TensorFault::kNone;
  Place place[kSimdWidth][64 + kSpareTensorSlots];
};
// In the layout that Options::tensor_layout asks for, with the fault of Options::tensor_fault. Lives as long as the process.
const TensorMap* tensor_map(int d0, int d1, bool relaxed, TensorRole role);

// --- threadgroup memory ----------------------------------------------------------------------------------------
// One per threadgroup declaration and kernel instance; registers itself when its library is loaded.
struct ThreadgroupSite {
  ThreadgroupSite(const void* kernel_function, uint32_t bytes, uint32_t align);
  uint32_t offset = 0;  // in the kernel's static threadgroup memory
};
void* threadgroup_address(const ThreadgroupSite& site);

template <class T, auto Kernel, int kIndex>
struct ThreadgroupVariable {
  static inline ThreadgroupSite site{reinterpret_cast<const void*>(Kernel), sizeof(T), alignof(T)};
};

template <class T, auto Kernel, int kIndex>
inline T& threadgroup_variable() {
  return *static_cast<T*>(threadgroup_address(ThreadgroupVariable<T, Kernel, kIndex>::site));
}

// --- libraries -------------------------------------------------------------------------------------------------
enum class ArgumentKind : uint8_t { kBuffer, kThreadgroup };

struct ArgumentInfo {
  ArgumentKind kind;
  int index;
  const char* name;
  const char* type;     // as written in the source
  bool writable;        // device and not const
  bool is_constant;     // address space constant
  const bool* enabled;  // [[function_constant(c)]]: bound only if *enabled; null: always
};

using KernelFn = void (*)(const Invocation&);

struct KernelInfo {
  const char* name;
  const void* function;  // identifies the instance; ThreadgroupSite refers to it
  KernelFn run;
  const ArgumentInfo* arguments;
  int argument_count;
  uint32_t max_total_threads;    // [[max_total_threads_per_threadgroup]], 0: none
  Size3 required_threads;        // [[required_threads_per_threadgroup]], x = 0: none
  const char* const* constants;  // names of function constants that the kernel's text mentions
  int constant_count;
  const char* file;
  int line;
};

enum class ConstantType : uint8_t { kBool, kChar, kUChar, kShort, kUShort, kInt, kUInt, kHalf, kFloat, kLong, kULong };

struct FunctionConstant {
  const char* name;
  int index;
  ConstantType type;
  void* value;
  bool* defined;
};

// One translated .metal file, registered by a static object of its translation unit.
struct Unit {
  const char* library;  // CMake target of softmetal_library
  bool instrumented;    // loads and stores call the checker
  const char* file;
  const char* source;  // text of the .metal file, for newLibrary(source)
  const KernelInfo* kernels;
  int kernel_count;
  const FunctionConstant* constants;
  int constant_count;
  void (*derive_constants)();  // sets program-scope constants that depend on function constants
  const void* module_address;  // any address in the module: its read-only data may be read by kernels
};

class RegisterUnit {
 public:
  explicit RegisterUnit(const Unit& unit);
};

// --- argument conversion, used by generated thunks ---------------------------------------------------------------
struct PointerArgument {
  void* address;
  template <class T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

void* bound_buffer(const Invocation& invocation, int index);
void* bound_threadgroup_memory(const Invocation& invocation, int index);
// The bytes that are bound at `index` must hold a whole T.
void require_bound_bytes(const Invocation& invocation, int index, size_t bytes);

struct ReferenceArgument {
  const Invocation& invocation;
  int index;
  template <class T>
  operator T&() const {
    require_bound_bytes(invocation, index, sizeof(T));
    return *static_cast<T*>(bound_buffer(invocation, index));
  }
};

}  // namespace softmetal
