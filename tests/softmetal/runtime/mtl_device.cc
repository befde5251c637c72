// MTL::Device, buffers, residency sets, events and fences.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "findings.h"
#include "objects.h"

namespace softmetal {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

void bad_call(const std::string& message) { report_finding({Fault::kBadCall, "", {}, "", "", message}); }

DeviceObject* as(const MTL::Device* d) { return static_cast<DeviceObject*>(const_cast<MTL::Device*>(d)); }
BufferObject* as(const MTL::Buffer* b) { return static_cast<BufferObject*>(const_cast<MTL::Buffer*>(b)); }
// Buffers are the only resources here.
BufferObject* as(const MTL::Allocation* a) {
  return static_cast<BufferObject*>(const_cast<MTL::Buffer*>(static_cast<const MTL::Buffer*>(a)));
}
ResidencySetObject* as(const MTL::ResidencySet* r) {
  return static_cast<ResidencySetObject*>(const_cast<MTL::ResidencySet*>(r));
}

BufferObject* make_buffer(DeviceObject* device, std::shared_ptr<Memory> memory, MTL::ResourceOptions options,
                          uint64_t counted) {
  auto* buffer = new BufferObject;
  buffer->device = device;
  buffer->memory = std::move(memory);
  buffer->options = options;
  buffer->counted = counted;
  buffer->memory->untracked = (options & MTL::ResourceHazardTrackingModeUntracked) != 0;
  device->allocated += counted;
  return buffer;
}

bool length_is_bad(const DeviceObject& device, NS::UInteger length) {
  if (length == 0) {
    bad_call("newBuffer: length is 0");
    return true;
  }
  if (length > device.options.max_buffer_length) {
    bad_call("newBuffer: length " + std::to_string(length) + " is above maxBufferLength " +
             std::to_string(device.options.max_buffer_length));
    return true;
  }
  return injected(Failure::kAllocation);
}

}  // namespace

std::shared_ptr<EventState> state_of(const MTL::Event* event) {
  auto* e = const_cast<MTL::Event*>(event);
  if (auto* shared = dynamic_cast<SharedEventObject*>(e)) return shared->state;
  return static_cast<EventObject*>(e)->state;
}

void EventState::signal(uint64_t to, const std::vector<uint64_t>& by) {
  std::vector<Listener> due;
  {
    std::lock_guard lock(mutex);
    if (to > value) value = to;
    encoders.insert(encoders.end(), by.begin(), by.end());
    const auto reached = std::stable_partition(listeners.begin(), listeners.end(),
                                               [this](const Listener& l) { return l.value > value; });
    due.assign(std::make_move_iterator(reached), std::make_move_iterator(listeners.end()));
    listeners.erase(reached, listeners.end());
  }
  changed.notify_all();
  for (const Listener& l : due) l.call(to);
}

BufferObject::~BufferObject() {
  if (memory->unretained_uses.load() > 0)
    report_finding({Fault::kHostRace,
                    "",
                    {},
                    "",
                    "",
                    "buffer \"" + memory->label + "\" of " + std::to_string(memory->bytes()) +
                        " bytes was released while a command buffer with unretained references used it"});
  device->allocated -= counted;
}

ResidencySetObject::~ResidencySetObject() {
  for (const MTL::Allocation* a : pending) const_cast<MTL::Allocation*>(a)->release();
}

}  // namespace softmetal

namespace MTL {
using namespace softmetal;

Device* CreateSystemDefaultDevice() {
  static std::mutex mutex;
  static DeviceObject* device = nullptr;  // one device for the process, as on a Mac; options follow set_options
  std::lock_guard lock(mutex);
  if (!device) {
    device = new DeviceObject;
    device->architecture = NS::TransferPtr(new ArchitectureObject);
  }
  device->options = options();
  device->architecture->name = device->options.architecture;
  return static_cast<Device*>(device->retain());
}

NS::Array* CopyAllDevices() {
  auto device = NS::TransferPtr(CreateSystemDefaultDevice());
  auto* devices = new NS::Array;
  devices->add(device.get());
  return devices;
}

NS::String* Architecture::name() const { return string_of(static_cast<const ArchitectureObject*>(this)->name); }

NS::String* Device::name() const { return string_of(as(this)->options.device_name); }
Architecture* Device::architecture() const { return as(this)->architecture.get(); }
uint64_t Device::registryID() const { return 1; }
bool Device::supportsFamily(GPUFamily family) {
  const auto& families = as(this)->options.families;
  return std::find(families.begin(), families.end(), static_cast<int>(family)) != families.end();
}
NS::UInteger Device::maxBufferLength() const { return as(this)->options.max_buffer_length; }
NS::UInteger Device::maxThreadgroupMemoryLength() const { return as(this)->options.max_threadgroup_memory; }
Size Device::maxThreadsPerThreadgroup() const {
  const NS::UInteger n = as(this)->options.max_threads_per_threadgroup;
  return {n, n, n};
}
uint64_t Device::recommendedMaxWorkingSetSize() const { return as(this)->options.recommended_working_set; }
NS::UInteger Device::currentAllocatedSize() const { return as(this)->allocated; }
bool Device::hasUnifiedMemory() const { return true; }
bool Device::lowPower() const { return false; }

CommandQueue* Device::newCommandQueue() { return newCommandQueue(64); }
CommandQueue* Device::newCommandQueue(NS::UInteger maxCommandBufferCount) {
  auto* q = new CommandQueueObject;
  q->device = as(this);
  q->queue = std::make_shared<Queue>(as(this), maxCommandBufferCount);
  return q;
}

Buffer* Device::newBuffer(NS::UInteger length, ResourceOptions options) {
  if (length_is_bad(*as(this), length)) return nullptr;
  return make_buffer(as(this), std::make_shared<Memory>(length, softmetal::options().check), options, length);
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options) {
  if (length_is_bad(*as(this), length)) return nullptr;
  auto memory = std::make_shared<Memory>(length, false);
  std::memcpy(memory->data(), pointer, length);
  return make_buffer(as(this), std::move(memory), options, length);
}

Buffer* Device::newBuffer(const void* pointer, NS::UInteger length, ResourceOptions options,
                          const Deallocator& deallocator) {
  if (length_is_bad(*as(this), length)) return nullptr;
  const size_t page = as(this)->options.page_bytes;
  // The start must be on a page, and the length a whole number of pages; files are mapped to 4 KB pages here.
  const size_t host_page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<uintptr_t>(pointer) % host_page != 0 || length % page != 0) {
    bad_call("newBuffer without copy: the pointer must be page-aligned and the length (" + std::to_string(length) +
             ") a multiple of the page size " + std::to_string(page));
    return nullptr;
  }
  return make_buffer(as(this),
                     std::make_shared<Memory>(const_cast<void*>(pointer), length,
                                              deallocator ? [deallocator](void* p, size_t n) { deallocator(p, n); }
                                                          : std::function<void(void*, size_t)>{}),
                     options, length);
}

Event* Device::newEvent() { return new EventObject; }
SharedEvent* Device::newSharedEvent() { return new SharedEventObject; }
Fence* Device::newFence() { return new FenceObject; }
ResidencySet* Device::newResidencySet(const ResidencySetDescriptor*, NS::Error**) { return new ResidencySetObject; }
void Device::sampleTimestamps(Timestamp* cpuTimestamp, Timestamp* gpuTimestamp) {
  *cpuTimestamp = *gpuTimestamp = static_cast<Timestamp>(now_seconds() * 1e9);
}
bool Device::supportsCounterSampling(CounterSamplingPoint point) {
  return point == CounterSamplingPointAtStageBoundary;
}

// --- resources ---------------------------------------------------------------------------------------------------
NS::UInteger Allocation::allocatedSize() const { return as(this)->memory->bytes(); }
NS::String* Resource::label() const { return string_of(as(static_cast<const Allocation*>(this))->memory->label); }
void Resource::setLabel(const NS::String* label) {
  as(static_cast<const Allocation*>(this))->memory->label = label->utf8String();
}
Device* Resource::device() const { return as(static_cast<const Allocation*>(this))->device; }
ResourceOptions Resource::resourceOptions() const { return as(static_cast<const Allocation*>(this))->options; }
StorageMode Resource::storageMode() const { return static_cast<StorageMode>((resourceOptions() >> 4) & 3); }
HazardTrackingMode Resource::hazardTrackingMode() const {
  return static_cast<HazardTrackingMode>((resourceOptions() >> 8) & 3);
}

void* Buffer::contents() {
  if (as(this)->storageMode() == StorageModePrivate) {
    bad_call("contents() of a buffer with private storage");
    return nullptr;
  }
  return as(this)->memory->data();
}
NS::UInteger Buffer::length() const { return as(this)->memory->bytes(); }
GPUAddress Buffer::gpuAddress() const { return reinterpret_cast<GPUAddress>(as(this)->memory->data()); }
void Buffer::didModifyRange(NS::Range) {}

// --- residency ---------------------------------------------------------------------------------------------------
ResidencySetDescriptor* ResidencySetDescriptor::alloc() { return new ResidencySetDescriptorObject; }
ResidencySetDescriptor* ResidencySetDescriptor::init() { return this; }
void ResidencySetDescriptor::setLabel(const NS::String* label) {
  static_cast<ResidencySetDescriptorObject*>(this)->label = label->utf8String();
}
void ResidencySetDescriptor::setInitialCapacity(NS::UInteger) {}

void ResidencySet::addAllocation(const Allocation* allocation) {
  std::lock_guard lock(as(this)->mutex);
  if (as(this)->pending.insert(allocation).second) const_cast<Allocation*>(allocation)->retain();
}
void ResidencySet::addAllocations(const Allocation* const allocations[], NS::UInteger count) {
  for (NS::UInteger i = 0; i < count; ++i) addAllocation(allocations[i]);
}
void ResidencySet::removeAllocation(const Allocation* allocation) {
  std::lock_guard lock(as(this)->mutex);
  if (as(this)->pending.erase(allocation)) const_cast<Allocation*>(allocation)->release();
  as(this)->committed.erase(allocation);
}
void ResidencySet::removeAllAllocations() {
  std::lock_guard lock(as(this)->mutex);
  for (const Allocation* a : as(this)->pending) const_cast<Allocation*>(a)->release();
  as(this)->pending.clear();
  as(this)->committed.clear();
}
bool ResidencySet::containsAllocation(const Allocation* allocation) {
  std::lock_guard lock(as(this)->mutex);
  return as(this)->pending.contains(allocation);
}
void ResidencySet::commit() {
  std::lock_guard lock(as(this)->mutex);
  as(this)->committed = as(this)->pending;
}
void ResidencySet::requestResidency() { as(this)->requested = true; }
void ResidencySet::endResidency() { as(this)->requested = false; }
NS::UInteger ResidencySet::allocationCount() const {
  std::lock_guard lock(as(this)->mutex);
  return as(this)->pending.size();
}
uint64_t ResidencySet::allocatedSize() const {
  std::lock_guard lock(as(this)->mutex);
  uint64_t sum = 0;
  for (const Allocation* a : as(this)->committed) sum += a->allocatedSize();
  return sum;
}

// --- fences and events ---------------------------------------------------------------------------------------------
NS::String* Fence::label() const { return string_of(static_cast<const FenceObject*>(this)->label); }
void Fence::setLabel(const NS::String* label) { static_cast<FenceObject*>(this)->label = label->utf8String(); }
NS::String* Event::label() const { return string_of("event"); }
void Event::setLabel(const NS::String*) {}

SharedEventListener* SharedEventListener::alloc() { return new SharedEventListenerObject; }
SharedEventListener* SharedEventListener::init() { return this; }

uint64_t SharedEvent::signaledValue() const {
  const auto state = state_of(this);
  std::lock_guard lock(state->mutex);
  return state->value;
}
void SharedEvent::setSignaledValue(uint64_t value) { state_of(this)->signal(value, {}); }
bool SharedEvent::waitUntilSignaledValue(uint64_t value, uint64_t milliseconds) {
  const auto state = state_of(this);
  std::unique_lock lock(state->mutex);
  const auto reached = [&] { return state->value >= value; };
  if (milliseconds >= uint64_t{1} << 40) {
    state->changed.wait(lock, reached);
    return true;
  }
  return state->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), reached);
}
void SharedEvent::notifyListener(const SharedEventListener*, uint64_t value,
                                 const SharedEventNotificationFunction& function) {
  const auto state = state_of(this);
  auto self = NS::RetainPtr(this);
  bool now = false;
  uint64_t reached = 0;
  {
    std::lock_guard lock(state->mutex);
    now = state->value >= value;
    reached = state->value;
    if (!now) state->listeners.push_back({value, [self, function](uint64_t v) { function(self.get(), v); }});
  }
  if (now) function(this, reached);
}

}  // namespace MTL
