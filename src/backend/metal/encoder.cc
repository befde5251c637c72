#include "backend/metal/encoder.h"

#include "base/check.h"
#include "base/error.h"

namespace calla::metal {

StepEncoder::StepEncoder(Device& device, EncoderOptions options)
    : device_(device), options_(options), fence_(NS::TransferPtr(device.metal()->newFence())) {
  if (!fence_) throw DeviceError("Metal: the device gave no fence");
}

StepEncoder::~StepEncoder() {
  if (encoder_) encoder_->endEncoding();  // an encoder must not go away open
}

void StepEncoder::open() {
  if (encoder_) return;
  const AutoreleaseScope pool;
  command_buffer_ = NS::RetainPtr(device_.queue()->commandBufferWithUnretainedReferences());
  if (!command_buffer_) throw DeviceError("Metal: the queue gave no command buffer");
  encoder_ = NS::RetainPtr(
      command_buffer_->computeCommandEncoder(options_.serial ? MTL::DispatchTypeSerial : MTL::DispatchTypeConcurrent));
  if (!encoder_) throw DeviceError("Metal: the command buffer gave no encoder");
  if (fence_updated_) encoder_->waitForFence(fence_.get());
  hazards_.clear();
  work_ = 0;
  ++counts_.command_buffers;
  ++counts_.phases;
}

void StepEncoder::encode(const Kernel& kernel, const void* params, size_t params_bytes,
                         std::span<const Argument> arguments, const BufferSpan* indirect, Grid groups, size_t threads,
                         double work) {
  const AutoreleaseScope
      pool;  // the caller's thread may have none, and whatever the driver releases late would pile up
  check(threads <= kernel.max_threads, "threads of a threadgroup of " + kernel.name);
  if (encoder_ && work_ > 0 && work_ + work > options_.work_limit) commit();
  open();
  reads_.clear();
  writes_.clear();
  for (const Argument& argument : arguments) {
    const BufferSpan& span = argument.span;
    const ByteRange range{span.buffer, span.offset, span.offset + span.bytes};
    if (argument.access == Argument::Access::kRead || argument.access == Argument::Access::kUpdate)
      reads_.push_back(range);
    if (argument.access == Argument::Access::kWrite || argument.access == Argument::Access::kUpdate)
      writes_.push_back(range);
  }
  if (indirect) reads_.push_back({indirect->buffer, indirect->offset, indirect->offset + indirect->bytes});
  if (hazards_.add(reads_, writes_) || (options_.serial && counts_.dispatches > 0)) {
    if (!options_.serial && barriers_++ != options_.drop_barrier) encoder_->memoryBarrier(MTL::BarrierScopeBuffers);
    ++counts_.phases;
  }

  encoder_->setComputePipelineState(kernel.pipeline.get());
  encoder_->setBytes(params, params_bytes, 0);
  size_t index = 0;
  for (const Argument& argument : arguments) {
    check(argument.span.buffer != nullptr, "unbound argument of " + kernel.name);
    encoder_->setBuffer(argument.span.buffer, argument.span.offset, ++index);
  }
  const MTL::Size threads_size(threads, 1, 1);
  if (indirect) {
    encoder_->dispatchThreadgroups(indirect->buffer, indirect->offset, threads_size);
  } else {
    encoder_->dispatchThreadgroups(MTL::Size(groups.x, groups.y, groups.z), threads_size);
  }
  ++counts_.dispatches;
  work_ += work;
}

void StepEncoder::commit() {
  if (!encoder_) return;
  const AutoreleaseScope pool;
  encoder_->updateFence(fence_.get());
  fence_updated_ = true;
  encoder_->endEncoding();
  encoder_.reset();
  command_buffer_->commit();
  committed_.push_back(std::move(command_buffer_));
  command_buffer_.reset();
}

std::vector<NS::SharedPtr<MTL::CommandBuffer>> StepEncoder::take() {
  commit();
  return std::exchange(committed_, {});
}

void wait_for(std::span<const NS::SharedPtr<MTL::CommandBuffer>> command_buffers) {
  std::string failure;
  for (const auto& command_buffer : command_buffers) {
    const AutoreleaseScope pool;
    command_buffer->waitUntilCompleted();
    if (command_buffer->status() != MTL::CommandBufferStatusError || !failure.empty()) continue;
    NS::Error* error = command_buffer->error();
    const auto code = error ? error->code() : 0;
    failure = "Metal: the GPU gave up on a command buffer (code " + std::to_string(code) + ": " +
              (error ? error->localizedDescription()->utf8String() : "no reason given") + ")";
    if (code == 2 || code == 14) failure += "; it took too long: use a smaller prefill chunk";
    if (code == 4) failure += "; macOS takes no more work from this process after earlier failures: start it again";
    if (code == 8) failure += "; the GPU is out of memory: use a shorter context or close other programs";
  }
  if (!failure.empty()) throw DeviceError(failure);
}

}  // namespace calla::metal
