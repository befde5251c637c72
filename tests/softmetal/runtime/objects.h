#pragma once
// The objects behind the MTL:: handles. Each handle's methods cast `this` to its object here.
#include <Metal/Metal.hpp>

#include <map>
#include <set>

#include "commands.h"

namespace softmetal {

class Queue;

struct ArchitectureObject final : MTL::Architecture {
  std::string name;
};

struct DeviceObject final : MTL::Device {
  Options options;  // as they were when the device was made; limits come from here
  NS::SharedPtr<ArchitectureObject> architecture;
  std::atomic<uint64_t> allocated{0};
};

struct BufferObject final : MTL::Buffer {
  ~BufferObject() override;
  DeviceObject* device = nullptr;
  std::shared_ptr<Memory> memory;
  MTL::ResourceOptions options = MTL::ResourceStorageModeShared;
  uint64_t counted = 0;  // in the device's allocated bytes
};

struct ResidencySetDescriptorObject final : MTL::ResidencySetDescriptor {
  std::string label;
};

struct ResidencySetObject final : MTL::ResidencySet {
  ~ResidencySetObject() override;
  std::mutex mutex;
  std::set<const MTL::Allocation*> pending, committed;
  bool requested = false;
};

struct CompileOptionsObject final : MTL::CompileOptions {
  MTL::LanguageVersion language = MTL::LanguageVersion4_0;
};

struct FunctionConstantValuesObject final : MTL::FunctionConstantValues {
  ConstantValues values;
};

struct FunctionDescriptorObject final : MTL::FunctionDescriptor {
  std::string name;
  std::string specialized_name;
  ConstantValues constants;
};

struct LibraryObject final : MTL::Library {
  DeviceObject* device = nullptr;
  Files files;
  std::string label;
};

struct FunctionObject final : MTL::Function {
  DeviceObject* device = nullptr;
  std::string name;
  std::string label;
  PipelineInfo info;
};

struct ComputePipelineDescriptorObject final : MTL::ComputePipelineDescriptor {
  NS::SharedPtr<MTL::Function> function;
  std::string label;
  NS::UInteger max_threads = 0;
};

struct ComputePipelineStateObject final : MTL::ComputePipelineState {
  DeviceObject* device = nullptr;
  std::shared_ptr<const PipelineInfo> info;
  std::string label;
};

struct FenceObject final : MTL::Fence {
  std::shared_ptr<FenceState> state = std::make_shared<FenceState>();
  std::string label;
};

// Event and SharedEvent handles share their state.
struct EventObject final : MTL::Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};
struct SharedEventObject final : MTL::SharedEvent {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};
struct SharedEventListenerObject final : MTL::SharedEventListener {};
std::shared_ptr<EventState> state_of(const MTL::Event* event);

struct CommandBufferDescriptorObject final : MTL::CommandBufferDescriptor {
  bool retained = true;
};

class CommandBufferObject final : public MTL::CommandBuffer {
 public:
  CommandBufferObject(std::shared_ptr<Queue> queue, bool retained);
  ~CommandBufferObject() override;

  std::shared_ptr<Queue> queue;
  const bool retained;
  uint64_t number = 0;
  std::string label;
  std::vector<CommandBufferItem> items;
  bool encoding = false;       // an encoder has not ended
  std::string recorded_error;  // a bad call while encoding fails the command buffer
  std::vector<MTL::HandlerFunction> scheduled_handlers, completed_handlers;

  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  MTL::CommandBufferStatus status = MTL::CommandBufferStatusNotEnqueued;
  bool handlers_done = false;
  Outcome outcome;
  double gpu_start = 0, gpu_end = 0, kernel_start = 0, kernel_end = 0;
  std::set<std::shared_ptr<Memory>> uses;  // everything bound

  void bad_call(const std::string& message);
};

struct CommandQueueObject final : MTL::CommandQueue {
  ~CommandQueueObject() override;
  DeviceObject* device = nullptr;
  std::shared_ptr<Queue> queue;
  std::string label;
};

struct ComputeCommandEncoderObject final : MTL::ComputeCommandEncoder {
  ~ComputeCommandEncoderObject() override;
  CommandBufferObject* buffer = nullptr;
  std::shared_ptr<EncoderRecord> record = std::make_shared<EncoderRecord>();
  Dispatch state;  // bindings in force
  bool ended = false;
};

struct BlitCommandEncoderObject final : MTL::BlitCommandEncoder {
  ~BlitCommandEncoderObject() override;
  CommandBufferObject* buffer = nullptr;
  std::shared_ptr<EncoderRecord> record = std::make_shared<EncoderRecord>();
  bool ended = false;
};

// The thread that executes the command buffers of one queue, in the order of enqueue or commit.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue(DeviceObject* device, size_t limit);
  ~Queue();
  void acquire();  // a command buffer is made: waits while `limit` are in flight
  void release();
  void enqueue(CommandBufferObject* buffer);
  void commit(CommandBufferObject* buffer);
  void stop();

  DeviceObject* const device;

 private:
  void loop();
  void execute(CommandBufferObject& buffer);

  const size_t limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<CommandBufferObject*> order_;  // enqueued or committed, holding a reference
  size_t live_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

double now_seconds();
inline NS::String* string_of(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

}  // namespace softmetal
