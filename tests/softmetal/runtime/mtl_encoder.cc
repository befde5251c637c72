// MTL::ComputeCommandEncoder and MTL::BlitCommandEncoder: check the call, append a record.
#include <cstring>

#include "findings.h"
#include "objects.h"

namespace softmetal {
namespace {

ComputeCommandEncoderObject* as(const MTL::ComputeCommandEncoder* e) {
  return static_cast<ComputeCommandEncoderObject*>(const_cast<MTL::ComputeCommandEncoder*>(e));
}
BlitCommandEncoderObject* as(const MTL::BlitCommandEncoder* e) {
  return static_cast<BlitCommandEncoderObject*>(const_cast<MTL::BlitCommandEncoder*>(e));
}
const BufferObject* as(const MTL::Buffer* b) { return static_cast<const BufferObject*>(b); }

// Memory of bytes that the call copies. 16-byte aligned, as arguments of any type may be read from it.
std::shared_ptr<Memory> copy_of(const void* bytes, size_t length) {
  void* copy = ::operator new (length, std::align_val_t{16});
  std::memcpy(copy, bytes, length);
  auto memory =
      std::make_shared<Memory>(copy, length, [](void* p, size_t) { ::operator delete (p, std::align_val_t{16}); });
  memory->label = "bytes";
  memory->device_only = true;
  return memory;
}

void use(CommandBufferObject& buffer, const std::shared_ptr<Memory>& memory) { buffer.uses.insert(memory); }

bool index_is_bad(ComputeCommandEncoderObject& e, const char* call, NS::UInteger index) {
  if (index < kMaxBuffers) return false;
  e.buffer->bad_call(std::string(call) + ": buffer index " + std::to_string(index) + " is above 30");
  return true;
}

bool size_is_bad(const MTL::Size& s) {
  return s.width > 0xFFFFFFFFu || s.height > 0xFFFFFFFFu || s.depth > 0xFFFFFFFFu;
}

// Checks what is common to the three dispatch calls and appends the record.
void dispatch(ComputeCommandEncoderObject& e, const MTL::Size& groups, const MTL::Size& threads, const MTL::Size& grid,
              Binding indirect) {
  const auto bad = [&](const std::string& what) { e.buffer->bad_call("dispatch: " + what); };
  if (e.ended) return bad("the encoder has ended");
  if (!e.state.pipeline) return bad("no pipeline is set");
  const PipelineInfo& p = *e.state.pipeline;
  const std::string kernel = "kernel " + p.kernel + ": ";
  const NS::UInteger total = threads.width * threads.height * threads.depth;
  if (total == 0) return bad(kernel + "a threadgroup of no threads");
  if (size_is_bad(groups) || size_is_bad(grid)) return bad(kernel + "a grid dimension above 2^32 - 1");
  if (total > p.max_threads)
    return bad(kernel + std::to_string(total) + " threads per threadgroup; the pipeline allows " +
               std::to_string(p.max_threads));
  const Size3 required = (p.plain ? p.plain : p.instrumented)->kernel->required_threads;
  if (required.x && (required.x != threads.width || required.y != threads.height || required.z != threads.depth))
    return bad(kernel + "the kernel requires another threadgroup size");
  uint32_t threadgroup_bytes = p.static_threadgroup_bytes;
  for (const uint32_t length : e.state.threadgroup_lengths) threadgroup_bytes += length;
  const uint32_t limit = e.buffer->queue->device->options.max_threadgroup_memory;
  if (threadgroup_bytes > limit)
    return bad(kernel + std::to_string(threadgroup_bytes) + " bytes of threadgroup memory; the device has " +
               std::to_string(limit));
  Dispatch d = e.state;
  const auto narrow = [](const MTL::Size& s) {
    return Size3{static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.height), static_cast<uint32_t>(s.depth)};
  };
  d.threadgroups = narrow(groups);
  d.threads = narrow(threads);
  d.threads_in_grid = narrow(grid);
  if (indirect.memory) use(*e.buffer, indirect.memory);
  d.indirect = std::move(indirect);
  for (const Binding& b : d.buffers)
    if (b.memory) use(*e.buffer, b.memory);
  e.record->commands.emplace_back(std::move(d));
  e.state.bound_anew = 0;
}

// The binding at `index`, about to be set.
Binding& rebind(Dispatch& state, NS::UInteger index, bool from_bytes) {
  const uint32_t bit = 1u << index;
  state.bound_anew |= bit;
  state.from_bytes = from_bytes ? state.from_bytes | bit : state.from_bytes & ~bit;
  return state.buffers[index] = {};
}

}  // namespace

ComputeCommandEncoderObject::~ComputeCommandEncoderObject() {
  if (!ended)
    report_finding({Fault::kBadCall, "", {}, "", "", "a compute command encoder was released before endEncoding"});
  buffer->release();
}
BlitCommandEncoderObject::~BlitCommandEncoderObject() {
  if (!ended)
    report_finding({Fault::kBadCall, "", {}, "", "", "a blit command encoder was released before endEncoding"});
  buffer->release();
}

}  // namespace softmetal

namespace MTL {
using namespace softmetal;

namespace {
template <class E>
void end(E* e) {
  if (e->ended) return e->buffer->bad_call("endEncoding was called twice");
  e->ended = true;
  e->buffer->encoding = false;
}
}  // namespace

void CommandEncoder::endEncoding() {
  if (auto* compute = dynamic_cast<ComputeCommandEncoderObject*>(this)) return end(compute);
  end(static_cast<BlitCommandEncoderObject*>(this));
}
NS::String* CommandEncoder::label() const {
  if (const auto* compute = dynamic_cast<const ComputeCommandEncoderObject*>(this))
    return string_of(compute->record->label);
  return string_of(static_cast<const BlitCommandEncoderObject*>(this)->record->label);
}
void CommandEncoder::setLabel(const NS::String* label) {
  if (auto* compute = dynamic_cast<ComputeCommandEncoderObject*>(this)) {
    compute->record->label = label->utf8String();
  } else {
    static_cast<BlitCommandEncoderObject*>(this)->record->label = label->utf8String();
  }
}
void CommandEncoder::pushDebugGroup(const NS::String*) {}
void CommandEncoder::popDebugGroup() {}
void CommandEncoder::insertDebugSignpost(const NS::String*) {}
Device* CommandEncoder::device() const {
  if (const auto* compute = dynamic_cast<const ComputeCommandEncoderObject*>(this))
    return compute->buffer->queue->device;
  return static_cast<const BlitCommandEncoderObject*>(this)->buffer->queue->device;
}

DispatchType ComputeCommandEncoder::dispatchType() const {
  return as(this)->record->concurrent ? DispatchTypeConcurrent : DispatchTypeSerial;
}

void ComputeCommandEncoder::setComputePipelineState(const ComputePipelineState* state) {
  as(this)->state.pipeline = static_cast<const ComputePipelineStateObject*>(state)->info;
}

void ComputeCommandEncoder::setBuffer(const Buffer* buffer, NS::UInteger offset, NS::UInteger index) {
  ComputeCommandEncoderObject& e = *as(this);
  if (index_is_bad(e, "setBuffer", index)) return;
  Binding& b = rebind(e.state, index, false);
  if (!buffer) return;
  const auto& memory = as(buffer)->memory;
  if (offset >= memory->bytes())
    return e.buffer->bad_call("setBuffer: offset " + std::to_string(offset) + " at index " + std::to_string(index) +
                              " is not inside the buffer of " + std::to_string(memory->bytes()) + " bytes");
  if (offset % 4 != 0)
    return e.buffer->bad_call("setBuffer: offset " + std::to_string(offset) + " at index " + std::to_string(index) +
                              " is not a multiple of 4");
  b = {memory, offset};
}

void ComputeCommandEncoder::setBufferOffset(NS::UInteger offset, NS::UInteger index) {
  ComputeCommandEncoderObject& e = *as(this);
  if (index_is_bad(e, "setBufferOffset", index)) return;
  Binding& b = e.state.buffers[index];
  if (!b.memory) return e.buffer->bad_call("setBufferOffset: nothing is bound at index " + std::to_string(index));
  if (offset >= b.memory->bytes() || offset % 4 != 0)
    return e.buffer->bad_call("setBufferOffset: offset " + std::to_string(offset) + " at index " +
                              std::to_string(index) + " is outside the buffer or not a multiple of 4");
  b.offset = offset;
  e.state.bound_anew |= 1u << index;
}

void ComputeCommandEncoder::setBuffers(const Buffer* const buffers[], const NS::UInteger offsets[], NS::Range range) {
  for (NS::UInteger i = 0; i < range.length; ++i) setBuffer(buffers[i], offsets[i], range.location + i);
}

void ComputeCommandEncoder::setBytes(const void* bytes, NS::UInteger length, NS::UInteger index) {
  ComputeCommandEncoderObject& e = *as(this);
  if (index_is_bad(e, "setBytes", index)) return;
  if (length == 0 || length > 4096)
    return e.buffer->bad_call("setBytes: " + std::to_string(length) + " bytes at index " + std::to_string(index) +
                              "; 1 to 4096 are allowed");
  rebind(e.state, index, true) = {copy_of(bytes, length), 0};
}

void ComputeCommandEncoder::setThreadgroupMemoryLength(NS::UInteger length, NS::UInteger index) {
  ComputeCommandEncoderObject& e = *as(this);
  if (index >= kMaxThreadgroupArguments || length % 16 != 0)
    return e.buffer->bad_call("setThreadgroupMemoryLength: " + std::to_string(length) + " at index " +
                              std::to_string(index) + "; the length must be a multiple of 16, the index below 31");
  e.state.threadgroup_lengths[index] = static_cast<uint32_t>(length);
}

void ComputeCommandEncoder::dispatchThreadgroups(Size groups, Size threads) {
  dispatch(*as(this), groups, threads,
           {groups.width * threads.width, groups.height * threads.height, groups.depth * threads.depth}, {});
}

void ComputeCommandEncoder::dispatchThreadgroups(const Buffer* indirectBuffer, NS::UInteger offset, Size threads) {
  if (!indirectBuffer || offset % 4 != 0 || offset + 12 > as(indirectBuffer)->memory->bytes())
    return as(this)->buffer->bad_call("dispatchThreadgroups: the indirect arguments (12 bytes at " +
                                      std::to_string(offset) + ") are not inside the buffer or not 4-byte aligned");
  dispatch(*as(this), {1, 1, 1}, threads, threads, {as(indirectBuffer)->memory, offset});
}

void ComputeCommandEncoder::dispatchThreads(Size grid, Size threads) {
  const auto groups = [](NS::UInteger n, NS::UInteger per) { return per ? (n + per - 1) / per : 0; };
  dispatch(*as(this),
           {groups(grid.width, threads.width), groups(grid.height, threads.height), groups(grid.depth, threads.depth)},
           threads, grid, {});
}

namespace {
void add_barrier(ComputeCommandEncoderObject& e, Barrier barrier) {
  e.record->commands.emplace_back(std::move(barrier));
  ++e.state.phase;
}
}  // namespace

void ComputeCommandEncoder::memoryBarrier(BarrierScope scope) {
  if (!(scope & BarrierScopeBuffers)) return;
  add_barrier(*as(this), {});
}
void ComputeCommandEncoder::memoryBarrier(const Resource* const resources[], NS::UInteger count) {
  Barrier barrier;
  for (NS::UInteger i = 0; i < count; ++i)
    barrier.resources.push_back(as(static_cast<const Buffer*>(resources[i]))->memory);
  if (count) add_barrier(*as(this), std::move(barrier));
}

void ComputeCommandEncoder::updateFence(const Fence* fence) {
  as(this)->record->updates.push_back(static_cast<const FenceObject*>(fence)->state);
}
void ComputeCommandEncoder::waitForFence(const Fence* fence) {
  as(this)->record->waits.push_back(static_cast<const FenceObject*>(fence)->state);
}
void ComputeCommandEncoder::useResource(const Resource* resource, ResourceUsage) {
  use(*as(this)->buffer, as(static_cast<const Buffer*>(resource))->memory);
}
void ComputeCommandEncoder::useResources(const Resource* const resources[], NS::UInteger count, ResourceUsage usage) {
  for (NS::UInteger i = 0; i < count; ++i) useResource(resources[i], usage);
}

void BlitCommandEncoder::copyFromBuffer(const Buffer* from, NS::UInteger from_offset, const Buffer* to,
                                        NS::UInteger to_offset, NS::UInteger size) {
  BlitCommandEncoderObject& e = *as(this);
  if (from_offset + size > from->length() || to_offset + size > to->length())
    return e.buffer->bad_call("copyFromBuffer: the range is not inside the buffers");
  use(*e.buffer, as(from)->memory);
  use(*e.buffer, as(to)->memory);
  e.record->commands.emplace_back(Copy{{as(from)->memory, from_offset}, {as(to)->memory, to_offset}, size});
}
void BlitCommandEncoder::fillBuffer(const Buffer* buffer, NS::Range range, uint8_t value) {
  BlitCommandEncoderObject& e = *as(this);
  if (range.location + range.length > buffer->length())
    return e.buffer->bad_call("fillBuffer: the range is not inside the buffer");
  use(*e.buffer, as(buffer)->memory);
  e.record->commands.emplace_back(Fill{{as(buffer)->memory, range.location}, range.length, value});
}
void BlitCommandEncoder::updateFence(const Fence* fence) {
  as(this)->record->updates.push_back(static_cast<const FenceObject*>(fence)->state);
}
void BlitCommandEncoder::waitForFence(const Fence* fence) {
  as(this)->record->waits.push_back(static_cast<const FenceObject*>(fence)->state);
}

}  // namespace MTL
