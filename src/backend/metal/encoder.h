#pragma once
// StepEncoder: records dispatches into command buffers, with a barrier exactly where the declared reads and writes ask
// for one, and without one otherwise: the encoder is concurrent, buffers are untracked.
//
// Work is cut into several command buffers when it is long (macOS stops a command buffer that keeps the screen
// waiting); a fence orders what they do. Recording allocates no Metal object but command buffers and encoders.
#include <initializer_list>
#include <string>
#include <vector>

#include "backend/metal/device.h"
#include "backend/metal/hazards.h"

namespace calla::metal {

// One buffer argument of a dispatch and what the kernel does to it.
struct Argument {
  enum class Access { kConstant, kRead, kWrite, kUpdate };  // kConstant: nothing on the GPU ever writes it
  BufferSpan span;
  Access access;
};
inline Argument constant(const BufferSpan& span) { return {span, Argument::Access::kConstant}; }
inline Argument reads(const BufferSpan& span) { return {span, Argument::Access::kRead}; }
inline Argument writes(const BufferSpan& span) { return {span, Argument::Access::kWrite}; }
inline Argument updates(const BufferSpan& span) { return {span, Argument::Access::kUpdate}; }

struct Grid {
  size_t x = 1;
  size_t y = 1;
  size_t z = 1;
};

struct EncoderOptions {
  bool serial = false;       // the control of `concurrent`: one dispatch after the other
  double work_limit = 64e9;  // multiply-adds in one command buffer: a few ms on a fast GPU, some 50 ms on an M1
  int drop_barrier = -1;     // tests: leave out this barrier of each step
};

// What a step took; for tests and `calla bench`.
struct EncoderCounts {
  int dispatches = 0;
  int phases = 0;  // runs of dispatches that no barrier separates
  int command_buffers = 0;
};

class StepEncoder {
 public:
  StepEncoder(Device& device, EncoderOptions options);
  ~StepEncoder();
  StepEncoder(const StepEncoder&) = delete;
  StepEncoder& operator=(const StepEncoder&) = delete;

  // Binds `params` at 0 and the arguments at 1, 2, ..., and dispatches `groups` threadgroups of `threads` threads.
  // `work` counts multiply-adds, for cutting; small dispatches leave it 0.
  template <class Params>
  void dispatch(const Kernel& kernel, const Params& params, std::span<const Argument> arguments, Grid groups,
                size_t threads, double work = 0) {
    static_assert(sizeof(Params) <= 4096 && alignof(Params) == 4);
    encode(kernel, &params, sizeof(params), arguments, nullptr, groups, threads, work);
  }
  template <class Params>
  void dispatch(const Kernel& kernel, const Params& params, std::initializer_list<Argument> arguments, Grid groups,
                size_t threads, double work = 0) {
    dispatch(kernel, params, std::span(arguments.begin(), arguments.size()), groups, threads, work);
  }
  // The same with the number of threadgroups read from `groups` on the GPU: three uint32.
  template <class Params>
  void dispatch_indirect(const Kernel& kernel, const Params& params, std::initializer_list<Argument> arguments,
                         const BufferSpan& groups, size_t threads, double work) {
    encode(kernel, &params, sizeof(params), {arguments.begin(), arguments.size()}, &groups, Grid{}, threads, work);
  }

  // Starts what has been recorded on the GPU.
  void commit();
  // Commits and hands over the command buffers since the last call, to wait for.
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> take();

  const EncoderCounts& counts() const { return counts_; }
  // A command buffer that is open already (a state was cleared or copied) counts for what comes next.
  void reset_counts() {
    const int open = encoder_ ? 1 : 0;
    counts_ = {0, open, open};
    barriers_ = 0;
  }

 private:
  void open();
  void encode(const Kernel& kernel, const void* params, size_t params_bytes, std::span<const Argument> arguments,
              const BufferSpan* indirect, Grid groups, size_t threads, double work);

  Device& device_;
  const EncoderOptions options_;
  NS::SharedPtr<MTL::Fence> fence_;
  bool fence_updated_ = false;
  NS::SharedPtr<MTL::CommandBuffer> command_buffer_;  // being recorded, or none
  NS::SharedPtr<MTL::ComputeCommandEncoder> encoder_;
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> committed_;
  HazardTracker hazards_;
  std::vector<ByteRange> reads_;  // of the dispatch being encoded; kept for their memory
  std::vector<ByteRange> writes_;
  double work_ = 0;
  int barriers_ = 0;
  EncoderCounts counts_;
};

// Waits for the command buffers; throws DeviceError with the reason if one failed.
void wait_for(std::span<const NS::SharedPtr<MTL::CommandBuffer>> command_buffers);

}  // namespace calla::metal
