#pragma once
// softmetal: a Metal device in software. Host code uses it through <Metal/Metal.hpp>; tests also use this header to
// choose the device, switch checks on, read findings and counters, and inject errors. See docs/softmetal.md.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "softmetal/abi.h"

namespace softmetal {

// --- options -----------------------------------------------------------------------------------------------------
// Initial values come from the environment (SOFTMETAL_DEVICE, _CHECK, _COUNT,
// _STRICT_BINDINGS, _SEED, _SHUFFLE, _THREADS, _LAYOUT, _TENSOR_FAULT); one that means nothing is refused by throwing
// std::invalid_argument.
struct Options {
  std::string device_name = "Apple M5 Max";
  std::string architecture = "applegpu_g17s";
  std::vector<int> families = {1001, 1002, 1003, 1004, 1005, 1006, 1007,
                               1008, 1009, 1010, 3003, 5001, 5002};  // MTL::GPUFamily
  size_t max_buffer_length = size_t{32} << 30;
  uint64_t recommended_working_set = uint64_t{96} << 30;
  uint32_t max_threadgroup_memory = 32768;
  uint32_t max_threads_per_threadgroup = 1024;
  size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // of no-copy buffers: what mmap gives here

  bool check = false;  // run the instrumented kernels, with all memory checks; one OS thread
  bool count = false;  // count bytes and lines per dispatch (needs check)
  // Each dispatch sets exactly the buffers that its kernel takes, and setBytes passes exactly its parameter's type: what
  // an earlier dispatch left bound does not count. Stricter than Metal, for hosts that bind everything anew.
  bool strict_bindings = false;
  bool shuffle = true;  // unordered dispatches and threadgroups run in random order
  uint64_t seed = 0;    // 0: from the clock; printed with every finding
  int threads = 0;      // OS threads that run threadgroups; 0: all cores
  TensorLayout tensor_layout = TensorLayout::kM5;
  TensorFault tensor_fault = TensorFault::kNone;
  double event_timeout_seconds = 60;      // a wait for an event that nothing signals
  double dispatch_timeout_seconds = 900;  // a kernel that does not end
};

// A device of a known chip: "m1", "m2max", "m3max", "m4max", "m5", "m5max". Throws std::invalid_argument otherwise.
Options device_preset(const std::string& chip);

Options options();
void set_options(const Options& options);  // takes effect for the command buffers committed next

// --- findings ----------------------------------------------------------------------------------------------------
enum class Fault : uint8_t {
  kOutOfBounds,     // an address that no bound buffer covers
  kReadOnlyWrite,   // a write to what is bound as constant or const
  kUninitialised,   // a read of bytes that nothing wrote
  kRace,            // two threads of one dispatch, not ordered, one of them writing
  kMissingBarrier,  // two dispatches of a concurrent encoder, no memoryBarrier between
  kMissingFence,    // two encoders on an untracked buffer, no fence, event or wait between
  kDivergence,      // lanes of a simdgroup at different collectives, or a barrier not reached by all threads
  kMissingLane,     // a shuffle from a lane that is not there
  kMisaligned,
  kUndefined,  // anything else MSL leaves undefined: array index, shift, division
  kBadCall,    // wrong use of the host interface
  kHostRace,   // a buffer freed while the device used it
  kEndless,    // a dispatch ran into Options::dispatch_timeout_seconds
};
const char* fault_name(Fault fault);

struct Finding {
  Fault fault;
  std::string kernel;  // empty for host calls
  Size3 threadgroup;
  std::string lanes;    // "12" or "0-15"; thread indices in the threadgroup
  std::string place;    // file:line of the kernel source
  std::string message;  // all of it, for people
};

// Findings since the last call. Each fault is reported once per kernel and place.
std::vector<Finding> take_findings();
std::string describe(const Finding& finding);

// --- counters ----------------------------------------------------------------------------------------------------
struct Traffic {
  uint64_t loaded_bytes = 0;  // asked for by threads
  uint64_t stored_bytes = 0;
  uint64_t load_lines = 0;  // 128-byte lines, summed over simdgroup instructions
  uint64_t store_lines = 0;
  uint64_t load_instructions = 0;  // simdgroup instructions
  uint64_t store_instructions = 0;
  uint64_t unique_load_lines = 0;  // distinct lines of a dispatch
  uint64_t unique_store_lines = 0;
};

struct BufferTraffic {
  int index = 0;     // [[buffer(n)]]; of several bindings of one buffer, the lowest
  std::string name;  // of the kernel's parameter
  Traffic traffic;
};

struct DispatchRecord {
  std::string kernel;
  Size3 threadgroups;
  Size3 threads;
  uint32_t max_threads = 0;     // of a threadgroup of its pipeline: what the kernel states, or the device's limit
  uint64_t command_buffer = 0;  // sequence number
  int phase = 0;                // of its encoder: barriers before it
  double seconds = 0;           // on this machine
  // If Options::count:
  Traffic device;  // device and constant buffers
  Traffic threadgroup_memory;
  std::vector<BufferTraffic> buffers;
  uint64_t barriers = 0;     // threadgroup barriers passed, per threadgroup summed
  uint64_t collectives = 0;  // simdgroup collectives
};

// Dispatches executed since the last call, in execution order. Kept only while recording is on.
void record_dispatches(bool on);
std::vector<DispatchRecord> take_dispatches();
// Totals per kernel, as a text table.
std::string report(const std::vector<DispatchRecord>& dispatches);

// --- error injection -----------------------------------------------------------------------------------------------
enum class Failure : uint8_t { kOutOfMemory, kTimeout, kDeviceLost, kInteractivity, kAllocation, kPipeline };
// The command buffer that is committed after `skip` others (or the buffer allocated, the pipeline made) fails, once.
// kDeviceLost: all later command buffers fail as well, until set_options.
void inject(Failure failure, int skip = 0);

}  // namespace softmetal
