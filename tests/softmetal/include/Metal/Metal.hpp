#pragma once
// The part of metal-cpp's MTL that a compute engine needs, under the same names and signatures, for Linux. What a
// method does not do here, it is not declared. tools/msl_check compares these declarations with Apple's headers.
#include "Foundation/Foundation.hpp"
#include "Metal/MTLEnums.hpp"

using dispatch_data_t = void*;

namespace MTL {

struct Size {
  Size() = default;
  Size(NS::UInteger w, NS::UInteger h, NS::UInteger d) : width(w), height(h), depth(d) {}
  static Size Make(NS::UInteger w, NS::UInteger h, NS::UInteger d) { return {w, h, d}; }
  NS::UInteger width = 0;
  NS::UInteger height = 0;
  NS::UInteger depth = 0;
};

struct DispatchThreadgroupsIndirectArguments {
  uint32_t threadgroupsPerGrid[3];
};

using Timestamp = uint64_t;
using GPUAddress = uint64_t;

class Device;
class CommandBuffer;
class SharedEvent;
class ComputeCommandEncoder;
class BlitCommandEncoder;

using HandlerFunction = std::function<void(CommandBuffer*)>;
using SharedEventNotificationFunction = std::function<void(SharedEvent*, std::uint64_t)>;

class Architecture : public NS::Referencing<Architecture> {
 public:
  NS::String* name() const;
};

// --- memory ------------------------------------------------------------------------------------------------------
class Allocation : public NS::Referencing<Allocation> {
 public:
  NS::UInteger allocatedSize() const;
};

class Resource : public NS::Referencing<Resource, Allocation> {
 public:
  NS::String* label() const;
  void setLabel(const NS::String* label);
  Device* device() const;
  ResourceOptions resourceOptions() const;
  StorageMode storageMode() const;
  HazardTrackingMode hazardTrackingMode() const;
};

class Buffer : public NS::Referencing<Buffer, Resource> {
 public:
  void* contents();
  NS::UInteger length() const;
  GPUAddress gpuAddress() const;
  void didModifyRange(NS::Range range);
};

class ResidencySetDescriptor : public NS::Referencing<ResidencySetDescriptor> {
 public:
  static ResidencySetDescriptor* alloc();
  ResidencySetDescriptor* init();
  void setLabel(const NS::String* label);
  void setInitialCapacity(NS::UInteger capacity);
};

class ResidencySet : public NS::Referencing<ResidencySet> {
 public:
  void addAllocation(const Allocation* allocation);
  void addAllocations(const Allocation* const allocations[], NS::UInteger count);
  void removeAllocation(const Allocation* allocation);
  void removeAllAllocations();
  bool containsAllocation(const Allocation* allocation);
  void commit();
  void requestResidency();
  void endResidency();
  NS::UInteger allocationCount() const;
  uint64_t allocatedSize() const;
};

// --- code --------------------------------------------------------------------------------------------------------
class CompileOptions : public NS::Referencing<CompileOptions> {
 public:
  static CompileOptions* alloc();
  CompileOptions* init();
  void setLanguageVersion(LanguageVersion version);
  void setMathMode(MathMode mode);
  void setMathFloatingPointFunctions(MathFloatingPointFunctions functions);
  void setFastMathEnabled(bool enabled);
  void setPreprocessorMacros(const NS::Dictionary* macros);
};

class FunctionConstantValues : public NS::Referencing<FunctionConstantValues> {
 public:
  static FunctionConstantValues* alloc();
  FunctionConstantValues* init();
  void setConstantValue(const void* value, DataType type, NS::UInteger index);
  void setConstantValue(const void* value, DataType type, const NS::String* name);
  void reset();
};

class FunctionDescriptor : public NS::Referencing<FunctionDescriptor> {
 public:
  static FunctionDescriptor* alloc();
  FunctionDescriptor* init();
  static FunctionDescriptor* functionDescriptor();
  void setName(const NS::String* name);
  void setSpecializedName(const NS::String* name);
  void setConstantValues(const FunctionConstantValues* values);
};

class Function : public NS::Referencing<Function> {
 public:
  NS::String* name() const;
  NS::String* label() const;
  void setLabel(const NS::String* label);
  FunctionType functionType() const;
  Device* device() const;
};

class Library : public NS::Referencing<Library> {
 public:
  Function* newFunction(const NS::String* functionName);
  Function* newFunction(const NS::String* name, const FunctionConstantValues* constantValues, NS::Error** error);
  Function* newFunction(const FunctionDescriptor* descriptor, NS::Error** error);
  NS::Array* functionNames() const;
  NS::String* label() const;
  void setLabel(const NS::String* label);
  Device* device() const;
};

class ComputePipelineDescriptor : public NS::Referencing<ComputePipelineDescriptor> {
 public:
  static ComputePipelineDescriptor* alloc();
  ComputePipelineDescriptor* init();
  void setComputeFunction(const Function* computeFunction);
  void setLabel(const NS::String* label);
  void setMaxTotalThreadsPerThreadgroup(NS::UInteger maxTotalThreadsPerThreadgroup);
  void setThreadGroupSizeIsMultipleOfThreadExecutionWidth(bool multiple);
};

class ComputePipelineReflection : public NS::Referencing<ComputePipelineReflection> {};
using AutoreleasedComputePipelineReflection = ComputePipelineReflection*;

class ComputePipelineState : public NS::Referencing<ComputePipelineState> {
 public:
  NS::UInteger maxTotalThreadsPerThreadgroup() const;
  NS::UInteger threadExecutionWidth() const;
  NS::UInteger staticThreadgroupMemoryLength() const;
  NS::String* label() const;
  Device* device() const;
};

// --- order -------------------------------------------------------------------------------------------------------
class Fence : public NS::Referencing<Fence> {
 public:
  NS::String* label() const;
  void setLabel(const NS::String* label);
};

class Event : public NS::Referencing<Event> {
 public:
  NS::String* label() const;
  void setLabel(const NS::String* label);
};

class SharedEventListener : public NS::Referencing<SharedEventListener> {
 public:
  static SharedEventListener* alloc();
  SharedEventListener* init();
};

class SharedEvent : public NS::Referencing<SharedEvent, Event> {
 public:
  uint64_t signaledValue() const;
  void setSignaledValue(uint64_t signaledValue);
  bool waitUntilSignaledValue(uint64_t value, uint64_t milliseconds);
  void notifyListener(const SharedEventListener* listener, uint64_t value,
                      const SharedEventNotificationFunction& function);
};

// --- encoders ----------------------------------------------------------------------------------------------------
class CommandEncoder : public NS::Referencing<CommandEncoder> {
 public:
  void endEncoding();
  NS::String* label() const;
  void setLabel(const NS::String* label);
  void pushDebugGroup(const NS::String* string);
  void popDebugGroup();
  void insertDebugSignpost(const NS::String* string);
  Device* device() const;
};

class ComputeCommandEncoder : public NS::Referencing<ComputeCommandEncoder, CommandEncoder> {
 public:
  DispatchType dispatchType() const;
  void setComputePipelineState(const ComputePipelineState* state);
  void setBuffer(const Buffer* buffer, NS::UInteger offset, NS::UInteger index);
  void setBufferOffset(NS::UInteger offset, NS::UInteger index);
  void setBuffers(const Buffer* const buffers[], const NS::UInteger offsets[], NS::Range range);
  void setBytes(const void* bytes, NS::UInteger length, NS::UInteger index);
  void setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger index);
  void dispatchThreadgroups(Size threadgroupsPerGrid, Size threadsPerThreadgroup);
  void dispatchThreadgroups(const Buffer* indirectBuffer, NS::UInteger indirectBufferOffset,
                            Size threadsPerThreadgroup);
  void dispatchThreads(Size threadsPerGrid, Size threadsPerThreadgroup);
  void memoryBarrier(BarrierScope scope);
  void memoryBarrier(const Resource* const resources[], NS::UInteger count);
  void updateFence(const Fence* fence);
  void waitForFence(const Fence* fence);
  void useResource(const Resource* resource, ResourceUsage usage);
  void useResources(const Resource* const resources[], NS::UInteger count, ResourceUsage usage);
};

class BlitCommandEncoder : public NS::Referencing<BlitCommandEncoder, CommandEncoder> {
 public:
  void copyFromBuffer(const Buffer* sourceBuffer, NS::UInteger sourceOffset, const Buffer* destinationBuffer,
                      NS::UInteger destinationOffset, NS::UInteger size);
  void fillBuffer(const Buffer* buffer, NS::Range range, uint8_t value);
  void updateFence(const Fence* fence);
  void waitForFence(const Fence* fence);
};

class CommandBufferDescriptor : public NS::Referencing<CommandBufferDescriptor> {
 public:
  static CommandBufferDescriptor* alloc();
  CommandBufferDescriptor* init();
  void setRetainedReferences(bool retainedReferences);
  void setErrorOptions(CommandBufferErrorOption errorOptions);
};

class CommandBuffer : public NS::Referencing<CommandBuffer> {
 public:
  ComputeCommandEncoder* computeCommandEncoder();
  ComputeCommandEncoder* computeCommandEncoder(DispatchType dispatchType);
  BlitCommandEncoder* blitCommandEncoder();
  void enqueue();
  void commit();
  void waitUntilScheduled();
  void waitUntilCompleted();
  CommandBufferStatus status() const;
  NS::Error* error() const;
  void addScheduledHandler(const HandlerFunction& function);
  void addCompletedHandler(const HandlerFunction& function);
  void encodeSignalEvent(const Event* event, uint64_t value);
  void encodeWait(const Event* event, uint64_t value);
  void useResidencySet(const ResidencySet* residencySet);
  CFTimeInterval GPUStartTime() const;
  CFTimeInterval GPUEndTime() const;
  CFTimeInterval kernelStartTime() const;
  CFTimeInterval kernelEndTime() const;
  bool retainedReferences() const;
  NS::String* label() const;
  void setLabel(const NS::String* label);
  Device* device() const;
};

class CommandQueue : public NS::Referencing<CommandQueue> {
 public:
  CommandBuffer* commandBuffer();
  CommandBuffer* commandBuffer(const CommandBufferDescriptor* descriptor);
  CommandBuffer* commandBufferWithUnretainedReferences();
  void addResidencySet(const ResidencySet* residencySet);
  void addResidencySets(const ResidencySet* const residencySets[], NS::UInteger count);
  void removeResidencySet(const ResidencySet* residencySet);
  NS::String* label() const;
  void setLabel(const NS::String* label);
  Device* device() const;
};

// --- the device --------------------------------------------------------------------------------------------------
class Device : public NS::Referencing<Device> {
 public:
  using Deallocator = std::function<void(void* pointer, NS::UInteger length)>;  // a block in Apple's headers

  NS::String* name() const;
  Architecture* architecture() const;
  uint64_t registryID() const;
  bool supportsFamily(GPUFamily gpuFamily);
  NS::UInteger maxBufferLength() const;
  NS::UInteger maxThreadgroupMemoryLength() const;
  Size maxThreadsPerThreadgroup() const;
  uint64_t recommendedMaxWorkingSetSize() const;
  NS::UInteger currentAllocatedSize() const;
  bool hasUnifiedMemory() const;
  bool lowPower() const;

  CommandQueue* newCommandQueue();
  CommandQueue* newCommandQueue(NS::UInteger maxCommandBufferCount);
  Buffer* newBuffer(NS::UInteger length, ResourceOptions options);
  Buffer* newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options);
  Buffer* newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options, const Deallocator& deallocator);
  // `source` is recognised as the text of .metal files that softmetal_library compiled into the program.
  Library* newLibrary(const NS::String* source, const CompileOptions* options, NS::Error** error);
  // `filepath` NAME.metallib stands for the target NAME of softmetal_library.
  Library* newLibrary(const NS::String* filepath, NS::Error** error);
  Library* newLibrary(const NS::URL* url, NS::Error** error);
  Library* newDefaultLibrary();
  ComputePipelineState* newComputePipelineState(const Function* computeFunction, NS::Error** error);
  ComputePipelineState* newComputePipelineState(const ComputePipelineDescriptor* descriptor, PipelineOption options,
                                                const AutoreleasedComputePipelineReflection* reflection,
                                                NS::Error** error);
  Event* newEvent();
  SharedEvent* newSharedEvent();
  Fence* newFence();
  ResidencySet* newResidencySet(const ResidencySetDescriptor* desc, NS::Error** error);
  void sampleTimestamps(Timestamp* cpuTimestamp, Timestamp* gpuTimestamp);
  bool supportsCounterSampling(CounterSamplingPoint samplingPoint);
};

Device* CreateSystemDefaultDevice();
NS::Array* CopyAllDevices();

}  // namespace MTL
