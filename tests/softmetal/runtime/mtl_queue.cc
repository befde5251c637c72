// MTL::CommandQueue and MTL::CommandBuffer, and the thread that executes committed command buffers.
#include <algorithm>
#include <chrono>

#include "executor.h"
#include "findings.h"
#include "objects.h"

namespace softmetal {
namespace {

CommandBufferObject* as(const MTL::CommandBuffer* b) {
  return static_cast<CommandBufferObject*>(const_cast<MTL::CommandBuffer*>(b));
}
CommandQueueObject* as(const MTL::CommandQueue* q) {
  return static_cast<CommandQueueObject*>(const_cast<MTL::CommandQueue*>(q));
}

std::atomic<uint64_t> next_command_buffer{1};
std::atomic<uint64_t> next_encoder{1};

void fail(Outcome& outcome, int code, const std::string& message) {
  outcome.code = code;
  outcome.message = message;
}

// An error that a test asked for, at the moment when the command buffer starts.
Outcome injected_outcome() {
  if (injected(Failure::kDeviceLost)) lose_device();
  if (device_is_lost()) return {MTL::CommandBufferErrorDeviceRemoved, "Device was removed (injected)"};
  if (injected(Failure::kOutOfMemory))
    return {MTL::CommandBufferErrorOutOfMemory,
            "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory) (injected)"};
  if (injected(Failure::kTimeout))
    return {MTL::CommandBufferErrorTimeout,
            "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout) (injected)"};
  if (injected(Failure::kInteractivity))
    return {14, "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity) (injected)"};
  return {};
}

}  // namespace

CommandBufferObject::CommandBufferObject(std::shared_ptr<Queue> q, bool keeps)
    : queue(std::move(q)), retained(keeps), number(next_command_buffer++) {
  queue->acquire();
}
CommandBufferObject::~CommandBufferObject() { queue->release(); }

void CommandBufferObject::bad_call(const std::string& message) {
  report_finding({Fault::kBadCall, "", {}, "", "", message});
  if (recorded_error.empty()) recorded_error = message;
}

CommandQueueObject::~CommandQueueObject() { queue->stop(); }

Queue::Queue(DeviceObject* d, size_t limit) : device(d), limit_(limit) {
  thread_ = std::thread([this] { loop(); });
}

Queue::~Queue() {
  stop();
  // The last reference may go on the queue's own thread, in the destructor of its last command buffer.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void Queue::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
}

void Queue::acquire() {
  std::unique_lock lock(mutex_);
  const auto limit = std::chrono::duration<double>(options().event_timeout_seconds);
  if (!changed_.wait_for(lock, limit, [this] { return live_ < limit_; }))
    report_finding({Fault::kBadCall,
                    "",
                    {},
                    "",
                    "",
                    "commandBuffer(): " + std::to_string(limit_) +
                        " command buffers of the queue are alive and none ends; "
                        "on a Mac this waits forever"});
  ++live_;
}

void Queue::release() {
  {
    std::lock_guard lock(mutex_);
    --live_;
  }
  changed_.notify_all();
}

void Queue::enqueue(CommandBufferObject* buffer) {
  std::lock_guard lock(mutex_);
  if (std::find(order_.begin(), order_.end(), buffer) != order_.end()) return;
  buffer->retain();
  order_.push_back(buffer);
}

void Queue::commit(CommandBufferObject* buffer) {
  Executor::instance().command_buffer_committed(buffer->number);
  enqueue(buffer);
  changed_.notify_all();
}

void Queue::loop() {
  while (true) {
    CommandBufferObject* next = nullptr;
    {
      std::unique_lock lock(mutex_);
      const auto ready = [this] {
        if (order_.empty()) return false;
        std::lock_guard state(order_.front()->mutex);
        return order_.front()->status >= MTL::CommandBufferStatusCommitted;
      };
      changed_.wait(lock, [&] { return stop_ || ready(); });
      if (!ready()) return;  // stopped; what was committed has been done
      next = order_.front();
      order_.erase(order_.begin());
    }
    const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    execute(*next);
    next->release();
  }
}

void Queue::execute(CommandBufferObject& b) {
  const auto set_status = [&](MTL::CommandBufferStatus status) {
    {
      std::lock_guard lock(b.mutex);
      b.status = status;
    }
    b.changed.notify_all();
  };
  b.kernel_start = now_seconds();
  set_status(MTL::CommandBufferStatusScheduled);
  for (const auto& handler : b.scheduled_handlers) handler(&b);
  b.kernel_end = b.gpu_start = now_seconds();

  Outcome outcome = injected_outcome();
  if (!b.recorded_error.empty()) fail(outcome, MTL::CommandBufferErrorInvalidResource, b.recorded_error);
  std::vector<uint64_t> own_encoders;    // ended in this command buffer
  std::vector<uint64_t> ordered_before;  // encoders known to have ended, through events
  for (const CommandBufferItem& item : b.items) {
    if (outcome.code) break;  // after an error nothing more runs, and no event is signalled
    if (const auto* encoder = std::get_if<std::shared_ptr<EncoderRecord>>(&item)) {
      const uint64_t id = next_encoder++;
      const std::string error = Executor::instance().run(**encoder, id, b.number, ordered_before);
      if (!error.empty()) fail(outcome, MTL::CommandBufferErrorPageFault, error);
      own_encoders.push_back(id);
    } else if (const auto* signal = std::get_if<SignalEvent>(&item)) {
      signal->event->signal(signal->value, own_encoders);
    } else if (const auto* wait = std::get_if<WaitEvent>(&item)) {
      std::unique_lock lock(wait->event->mutex);
      const auto limit = std::chrono::duration<double>(options().event_timeout_seconds);
      if (!wait->event->changed.wait_for(lock, limit, [&] { return wait->event->value >= wait->value; })) {
        fail(outcome, MTL::CommandBufferErrorTimeout,
             "an event never reached the value " + std::to_string(wait->value));
        report_finding({Fault::kBadCall, "", {}, "", "", outcome.message});
      }
      ordered_before.insert(ordered_before.end(), wait->event->encoders.begin(), wait->event->encoders.end());
    }
  }
  b.gpu_end = now_seconds();
  Executor::instance().command_buffer_ended(b.number);
  if (!b.retained)
    for (const auto& memory : b.uses) --memory->unretained_uses;
  {
    std::lock_guard lock(b.mutex);
    b.outcome = outcome;
    b.status = outcome.code ? MTL::CommandBufferStatusError : MTL::CommandBufferStatusCompleted;
  }
  for (const auto& handler : b.completed_handlers) handler(&b);
  {
    std::lock_guard lock(b.mutex);
    b.handlers_done = true;
    b.items.clear();
    b.uses.clear();
    b.completed_handlers.clear();
    b.scheduled_handlers.clear();
  }
  b.changed.notify_all();
}

}  // namespace softmetal

namespace MTL {
using namespace softmetal;

CommandBufferDescriptor* CommandBufferDescriptor::alloc() { return new CommandBufferDescriptorObject; }
CommandBufferDescriptor* CommandBufferDescriptor::init() { return this; }
void CommandBufferDescriptor::setRetainedReferences(bool retained) {
  static_cast<CommandBufferDescriptorObject*>(this)->retained = retained;
}
void CommandBufferDescriptor::setErrorOptions(CommandBufferErrorOption) {}

CommandBuffer* CommandQueue::commandBuffer() { return (new CommandBufferObject(as(this)->queue, true))->autorelease(); }
CommandBuffer* CommandQueue::commandBuffer(const CommandBufferDescriptor* descriptor) {
  const bool retained = static_cast<const CommandBufferDescriptorObject*>(descriptor)->retained;
  return (new CommandBufferObject(as(this)->queue, retained))->autorelease();
}
CommandBuffer* CommandQueue::commandBufferWithUnretainedReferences() {
  return (new CommandBufferObject(as(this)->queue, false))->autorelease();
}
void CommandQueue::addResidencySet(const ResidencySet* set) { const_cast<ResidencySet*>(set)->retain(); }
void CommandQueue::addResidencySets(const ResidencySet* const sets[], NS::UInteger count) {
  for (NS::UInteger i = 0; i < count; ++i) addResidencySet(sets[i]);
}
void CommandQueue::removeResidencySet(const ResidencySet* set) { const_cast<ResidencySet*>(set)->release(); }
NS::String* CommandQueue::label() const { return string_of(as(this)->label); }
void CommandQueue::setLabel(const NS::String* label) { as(this)->label = label->utf8String(); }
Device* CommandQueue::device() const { return as(this)->device; }

ComputeCommandEncoder* CommandBuffer::computeCommandEncoder() { return computeCommandEncoder(DispatchTypeSerial); }
ComputeCommandEncoder* CommandBuffer::computeCommandEncoder(DispatchType type) {
  CommandBufferObject& b = *as(this);
  if (b.encoding) b.bad_call("computeCommandEncoder: another encoder of the command buffer has not ended");
  if (b.status >= CommandBufferStatusCommitted) b.bad_call("computeCommandEncoder: the command buffer was committed");
  b.encoding = true;
  auto* e = new ComputeCommandEncoderObject;
  e->buffer = static_cast<CommandBufferObject*>(b.retain());
  e->record->concurrent = type == DispatchTypeConcurrent;
  b.items.emplace_back(e->record);
  return e->autorelease();
}
BlitCommandEncoder* CommandBuffer::blitCommandEncoder() {
  CommandBufferObject& b = *as(this);
  if (b.encoding) b.bad_call("blitCommandEncoder: another encoder of the command buffer has not ended");
  b.encoding = true;
  auto* e = new BlitCommandEncoderObject;
  e->buffer = static_cast<CommandBufferObject*>(b.retain());
  b.items.emplace_back(e->record);
  return e->autorelease();
}

void CommandBuffer::enqueue() {
  CommandBufferObject& b = *as(this);
  {
    std::lock_guard lock(b.mutex);
    if (b.status == CommandBufferStatusNotEnqueued) b.status = CommandBufferStatusEnqueued;
  }
  b.queue->enqueue(&b);
}

void CommandBuffer::commit() {
  CommandBufferObject& b = *as(this);
  if (b.encoding) b.bad_call("commit: an encoder has not ended");
  {
    std::lock_guard lock(b.mutex);
    if (b.status >= CommandBufferStatusCommitted) {
      report_finding({Fault::kBadCall, "", {}, "", "", "commit: the command buffer was committed before"});
      return;
    }
    b.status = CommandBufferStatusCommitted;
  }
  if (!b.retained)
    for (const auto& memory : b.uses) ++memory->unretained_uses;
  b.queue->commit(&b);
}

void CommandBuffer::waitUntilScheduled() {
  CommandBufferObject& b = *as(this);
  std::unique_lock lock(b.mutex);
  b.changed.wait(lock, [&] { return b.status >= CommandBufferStatusScheduled; });
}
void CommandBuffer::waitUntilCompleted() {
  CommandBufferObject& b = *as(this);
  std::unique_lock lock(b.mutex);
  if (b.status < CommandBufferStatusCommitted) {
    lock.unlock();
    return b.bad_call("waitUntilCompleted: the command buffer was not committed; on a Mac this waits forever");
  }
  b.changed.wait(lock, [&] { return b.handlers_done; });
}
CommandBufferStatus CommandBuffer::status() const {
  std::lock_guard lock(as(this)->mutex);
  return as(this)->status;
}
NS::Error* CommandBuffer::error() const {
  std::lock_guard lock(as(this)->mutex);
  const Outcome& o = as(this)->outcome;
  return o.code ? NS::Error::make("MTLCommandBufferErrorDomain", o.code, o.message)->autorelease() : nullptr;
}
void CommandBuffer::addScheduledHandler(const HandlerFunction& function) {
  as(this)->scheduled_handlers.push_back(function);
}
void CommandBuffer::addCompletedHandler(const HandlerFunction& function) {
  CommandBufferObject& b = *as(this);
  std::lock_guard lock(b.mutex);
  if (b.status >= CommandBufferStatusCommitted) {
    report_finding({Fault::kBadCall, "", {}, "", "", "addCompletedHandler: the command buffer was committed before"});
    return;
  }
  b.completed_handlers.push_back(function);
}
void CommandBuffer::encodeSignalEvent(const Event* event, uint64_t value) {
  if (as(this)->encoding) as(this)->bad_call("encodeSignalEvent: an encoder has not ended");
  as(this)->items.emplace_back(SignalEvent{state_of(event), value});
}
void CommandBuffer::encodeWait(const Event* event, uint64_t value) {
  if (as(this)->encoding) as(this)->bad_call("encodeWait: an encoder has not ended");
  as(this)->items.emplace_back(WaitEvent{state_of(event), value});
}
void CommandBuffer::useResidencySet(const ResidencySet*) {}
CFTimeInterval CommandBuffer::GPUStartTime() const { return as(this)->gpu_start; }
CFTimeInterval CommandBuffer::GPUEndTime() const { return as(this)->gpu_end; }
CFTimeInterval CommandBuffer::kernelStartTime() const { return as(this)->kernel_start; }
CFTimeInterval CommandBuffer::kernelEndTime() const { return as(this)->kernel_end; }
bool CommandBuffer::retainedReferences() const { return as(this)->retained; }
NS::String* CommandBuffer::label() const { return string_of(as(this)->label); }
void CommandBuffer::setLabel(const NS::String* label) { as(this)->label = label->utf8String(); }
Device* CommandBuffer::device() const { return as(this)->queue->device; }

}  // namespace MTL
