// The host interface: limits, asynchronous queues, events, reference counting, injected errors.
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <thread>

#include "device_test.h"

namespace softmetal_test {
namespace {

using softmetal::Fault;
using ::testing::HasSubstr;

class Host : public DeviceTest {
 protected:
  void SetUp() override { open({}); }

  void expect_bad_call(const std::string& text) {
    const auto findings = softmetal::take_findings();
    ASSERT_EQ(findings.size(), 1u) << text;
    EXPECT_EQ(findings[0].fault, Fault::kBadCall);
    EXPECT_THAT(findings[0].message, HasSubstr(text));
  }

  // A command buffer with one dispatch of `fills`, set up by `change`; not committed.
  template <class F>
  MTL::CommandBuffer* commands_with(F change) {
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    state_ = pipeline("fills");
    out_ = empty(256);
    encoder->setComputePipelineState(state_.get());
    encoder->setBuffer(out_.get(), 0, 0);
    change(encoder);
    encoder->endEncoding();
    return commands;
  }

  NS::SharedPtr<MTL::ComputePipelineState> state_;
  NS::SharedPtr<MTL::Buffer> out_;
};

const MTL::Size kOne{1, 1, 1};

TEST_F(Host, SetBytesHasALimit) {
  const std::vector<char> bytes(5000);
  EXPECT_NE(finish(commands_with([&](auto* e) { e->setBytes(bytes.data(), 4097, 1); })), "");
  expect_bad_call("4097 bytes at index 1");
  EXPECT_EQ(finish(commands_with([&](auto* e) { e->setBytes(bytes.data(), 4096, 1); })), "");
}

TEST_F(Host, BufferIndicesEndAt30) {
  EXPECT_NE(finish(commands_with([&](auto* e) { e->setBuffer(out_.get(), 0, 31); })), "");
  expect_bad_call("index 31 is above 30");
}

TEST_F(Host, OffsetsStayInside) {
  EXPECT_NE(finish(commands_with([&](auto* e) { e->setBuffer(out_.get(), 256, 0); })), "");
  expect_bad_call("not inside the buffer of 256 bytes");
}

TEST_F(Host, ThreadgroupsHaveALimit) {
  EXPECT_NE(finish(commands_with([](auto* e) { e->dispatchThreadgroups(kOne, {1025, 1, 1}); })), "");
  expect_bad_call("1025 threads per threadgroup; the pipeline allows 1024");
}

TEST_F(Host, ThreadgroupMemoryHasALimit) {
  EXPECT_NE(finish(commands_with([](auto* e) {
              e->setThreadgroupMemoryLength(32768, 0);
              e->setThreadgroupMemoryLength(16, 1);
              e->dispatchThreadgroups(kOne, {32, 1, 1});
            })),
            "");
  expect_bad_call("32784 bytes of threadgroup memory; the device has 32768");
  EXPECT_NE(finish(commands_with([](auto* e) { e->setThreadgroupMemoryLength(20, 0); })), "");
  expect_bad_call("multiple of 16");
}

// Strict: every dispatch binds all that its kernel takes and nothing else; lenient, as Metal is, old bindings stay.
TEST_F(Host, StrictBindings) {
  const auto two_dispatches = [&](bool rebind, bool extra) {
    return finish(commands_with([&](auto* e) {
      e->dispatchThreadgroups(kOne, {64, 1, 1});
      if (rebind) e->setBuffer(out_.get(), 0, 0);
      if (extra) e->setBuffer(out_.get(), 0, 1);
      e->memoryBarrier(MTL::BarrierScopeBuffers);
      e->dispatchThreadgroups(kOne, {64, 1, 1});
    }));
  };
  EXPECT_EQ(two_dispatches(false, true), "");
  softmetal::Options strict;
  strict.strict_bindings = true;
  softmetal::set_options(strict);
  EXPECT_EQ(two_dispatches(true, false), "");
  EXPECT_NE(two_dispatches(false, false), "");
  expect_bad_call("parameter y at buffer(0) was not bound for this dispatch");
  EXPECT_NE(two_dispatches(true, true), "");
  expect_bad_call("buffer index 1 was bound, and the kernel has no parameter there");
}

TEST_F(Host, StrictBytesHaveTheParametersSize) {
  softmetal::Options strict;
  strict.strict_bindings = true;
  softmetal::set_options(strict);
  const auto x = buffer(std::vector<float>(64));
  const auto with_bytes = [&](size_t size) {
    const std::array<uint32_t, 4> args = {64};
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    const bool no_bias = false;
    auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    constants->setConstantValue(&no_bias, MTL::DataTypeBool, NS::UInteger{0});
    const auto state = pipeline("scaled_add", constants.get());
    out_ = empty(256);
    encoder->setComputePipelineState(state.get());
    bind(encoder, {{x.get()}, {x.get()}, {out_.get()}});
    encoder->setBytes(args.data(), size, 3);
    encoder->dispatchThreadgroups(kOne, {64, 1, 1});
    encoder->endEncoding();
    return finish(commands);
  };
  EXPECT_EQ(with_bytes(8), "");
  EXPECT_NE(with_bytes(12), "");
  expect_bad_call("setBytes passed 12 bytes at index 3; the parameter's type has 8");
}

TEST_F(Host, DispatchNeedsAPipeline) {
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->dispatchThreadgroups(kOne, kOne);
  encoder->endEncoding();
  EXPECT_NE(finish(commands), "");
  expect_bad_call("no pipeline");
}

TEST_F(Host, NoCopyBuffersArePageAligned) {
  const size_t page = softmetal::options().page_bytes;
  void* memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  bool released = false;
  {
    const auto good = NS::TransferPtr(device_->newBuffer(memory, page, MTL::ResourceStorageModeShared,
                                                         [&](void*, NS::UInteger) { released = true; }));
    ASSERT_TRUE(good);
    EXPECT_EQ(good->contents(), memory);
  }
  EXPECT_TRUE(released);
  EXPECT_EQ(device_->newBuffer(memory, page + 4, MTL::ResourceStorageModeShared, nullptr), nullptr);
  expect_bad_call("multiple of the page size");
  EXPECT_EQ(device_->newBuffer(static_cast<char*>(memory) + 64, page, MTL::ResourceStorageModeShared, nullptr),
            nullptr);
  expect_bad_call("page-aligned");
  munmap(memory, 2 * page);
}

TEST_F(Host, PrivateBuffersHaveNoContents) {
  const auto b = empty(64, MTL::ResourceStorageModePrivate);
  EXPECT_EQ(b->contents(), nullptr);
  expect_bad_call("private");
}

TEST_F(Host, BuffersHaveAMaximumLength) {
  EXPECT_EQ(device_->newBuffer(device_->maxBufferLength() + 1, MTL::ResourceStorageModeShared), nullptr);
  expect_bad_call("maxBufferLength");
}

TEST_F(Host, AllocatedSizeFollowsBuffers) {
  const auto before = device_->currentAllocatedSize();
  {
    const auto b = empty(4096);
    EXPECT_EQ(device_->currentAllocatedSize(), before + 4096);
  }
  EXPECT_EQ(device_->currentAllocatedSize(), before);
}

TEST_F(Host, UnretainedBuffersMustLive) {
  const auto gate = NS::TransferPtr(device_->newSharedEvent());
  const auto state = pipeline("fills");
  auto out = empty(256);
  MTL::CommandBuffer* commands = queue_->commandBufferWithUnretainedReferences();
  commands->encodeWait(gate.get(), 1);
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(state.get());
  encoder->setBuffer(out.get(), 0, 0);
  encoder->dispatchThreadgroups(kOne, {64, 1, 1});
  encoder->endEncoding();
  commands->commit();
  out.reset();
  gate->setSignaledValue(1);
  commands->waitUntilCompleted();
  const auto findings = softmetal::take_findings();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].fault, Fault::kHostRace);
}

TEST_F(Host, CommitReturnsBeforeTheWorkIsDone) {
  const auto gate = NS::TransferPtr(device_->newSharedEvent());
  const auto done = NS::TransferPtr(device_->newSharedEvent());
  std::atomic<bool> heard{false};
  done->notifyListener(nullptr, 5, [&](MTL::SharedEvent*, uint64_t value) { heard = value >= 5; });
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  commands->encodeWait(gate.get(), 1);
  commands->encodeSignalEvent(done.get(), 5);
  commands->commit();
  EXPECT_FALSE(done->waitUntilSignaledValue(5, 20));
  EXPECT_LT(commands->status(), MTL::CommandBufferStatusCompleted);
  gate->setSignaledValue(1);
  EXPECT_TRUE(done->waitUntilSignaledValue(5, 10000));
  commands->waitUntilCompleted();
  EXPECT_TRUE(heard);
}

TEST_F(Host, EnqueueFixesTheOrder) {
  std::vector<int> order;
  MTL::CommandBuffer* first = queue_->commandBuffer();
  MTL::CommandBuffer* second = queue_->commandBuffer();
  first->enqueue();
  first->addCompletedHandler([&](MTL::CommandBuffer*) { order.push_back(1); });
  second->addCompletedHandler([&](MTL::CommandBuffer*) { order.push_back(2); });
  second->commit();
  first->commit();
  second->waitUntilCompleted();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(Host, AnEventThatNeverComesIsAnError) {
  softmetal::Options options;
  options.event_timeout_seconds = 0.05;
  softmetal::set_options(options);
  const auto never = NS::TransferPtr(device_->newEvent());
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  commands->encodeWait(never.get(), 1);
  EXPECT_THAT(finish(commands), HasSubstr("never reached"));
  EXPECT_EQ(commands->error()->code(), MTL::CommandBufferErrorTimeout);
  EXPECT_EQ(softmetal::take_findings().size(), 1u);
}

TEST_F(Host, InjectedFailuresHitTheChosenCommandBuffer) {
  struct Case {
    softmetal::Failure failure;
    NS::Integer code;
  };
  for (const Case c : {Case{softmetal::Failure::kOutOfMemory, 8}, Case{softmetal::Failure::kTimeout, 2},
                       Case{softmetal::Failure::kInteractivity, 14}}) {
    softmetal::inject(c.failure, 1);
    EXPECT_EQ(finish(commands_with([](auto* e) { e->dispatchThreadgroups(kOne, {64, 1, 1}); })), "");
    const auto event = NS::TransferPtr(device_->newSharedEvent());
    MTL::CommandBuffer* bad = commands_with([](auto* e) { e->dispatchThreadgroups(kOne, {64, 1, 1}); });
    bad->encodeSignalEvent(event.get(), 1);
    EXPECT_NE(finish(bad), "");
    EXPECT_EQ(bad->error()->code(), c.code);
    EXPECT_EQ(event->signaledValue(), 0u);  // a failed command buffer signals nothing
    EXPECT_EQ(finish(commands_with([](auto* e) { e->dispatchThreadgroups(kOne, {64, 1, 1}); })), "");
  }
}

TEST_F(Host, ALostDeviceStaysLost) {
  softmetal::inject(softmetal::Failure::kDeviceLost);
  for (int i = 0; i < 2; ++i) {
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    EXPECT_NE(finish(commands), "");
    EXPECT_EQ(commands->error()->code(), MTL::CommandBufferErrorDeviceRemoved);
  }
  softmetal::set_options({});
  EXPECT_EQ(finish(queue_->commandBuffer()), "");
}

TEST_F(Host, InjectedAllocationFailure) {
  softmetal::inject(softmetal::Failure::kAllocation);
  EXPECT_FALSE(empty(64));
  EXPECT_TRUE(empty(64));
}

TEST_F(Host, AutoreleaseNeedsAPool) {
  std::thread([] { NS::String::string("leaks", NS::UTF8StringEncoding)->release(); }).join();
  expect_bad_call("without an NS::AutoreleasePool");
}

TEST_F(Host, DevicePresets) {
  softmetal::set_options(softmetal::device_preset("m1"));
  const auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  EXPECT_STREQ(device->name()->utf8String(), "Apple M1");
  EXPECT_STREQ(device->architecture()->name()->utf8String(), "applegpu_g13g");
  EXPECT_TRUE(device->supportsFamily(MTL::GPUFamilyApple7));
  EXPECT_FALSE(device->supportsFamily(MTL::GPUFamilyApple8));
  EXPECT_FALSE(device->supportsFamily(MTL::GPUFamilyMetal4));
  EXPECT_THROW(softmetal::device_preset("m17"), std::invalid_argument);
}

TEST_F(Host, BlitCopiesAndFills) {
  for (const bool check : {false, true}) {
    softmetal::Options options;
    options.check = check;
    softmetal::set_options(options);
    const auto a = buffer(std::vector<uint8_t>{1, 2, 3, 4, 5, 6, 7, 8}), b = empty(8);
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::BlitCommandEncoder* blit = commands->blitCommandEncoder();
    blit->fillBuffer(b.get(), NS::Range::Make(0, 8), 9);
    blit->copyFromBuffer(a.get(), 4, b.get(), 2, 3);
    blit->endEncoding();
    EXPECT_EQ(finish(commands), "");
    EXPECT_EQ(values<uint8_t>(b), (std::vector<uint8_t>{9, 9, 5, 6, 7, 9, 9, 9}));
  }
}

TEST_F(Host, UnfinishedEncodersAreErrors) {
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  commands->commit();
  commands->waitUntilCompleted();
  EXPECT_EQ(commands->status(), MTL::CommandBufferStatusError);
  expect_bad_call("an encoder has not ended");
  encoder->endEncoding();
}

}  // namespace
}  // namespace softmetal_test
