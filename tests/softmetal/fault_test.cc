// Each planted fault is found, says what and where, and fails the command buffer; nothing hangs.
#include "device_test.h"

namespace softmetal_test {
namespace {

using softmetal::Fault;
using ::testing::HasSubstr;

class Faults : public DeviceTest {
 protected:
  void SetUp() override { open(checked()); }

  // Expects one finding (or several of one kind) of `fault` in `kernel`, on a line of faults.metal that has `code`.
  void expect(Fault fault, const std::string& kernel, const std::string& code, const std::string& message = "") {
    const auto findings = softmetal::take_findings();
    ASSERT_FALSE(findings.empty()) << kernel << ": nothing was found";
    for (const auto& f : findings) {
      EXPECT_EQ(f.fault, fault) << softmetal::describe(f);
      EXPECT_EQ(f.kernel, kernel);
      EXPECT_THAT(f.message, HasSubstr(message));
      if (!code.empty()) {
        EXPECT_THAT(source_line(f.place), HasSubstr(code)) << softmetal::describe(f);
      }
    }
  }

  static std::string source_line(const std::string& place) {
    const size_t colon = place.rfind(':');
    if (colon == std::string::npos) return "(no line in \"" + place + "\")";
    FILE* file = std::fopen(place.substr(0, colon).c_str(), "r");
    if (!file) return "(cannot open " + place + ")";
    char line[512] = "";
    for (int n = std::atoi(place.c_str() + colon + 1); n > 0 && std::fgets(line, sizeof line, file); --n) {
    }
    std::fclose(file);
    return line;
  }

  // Runs `kernel` on one fresh output of 64 floats (or `buffers`) and expects the command buffer to fail.
  void fails(const std::string& kernel, size_t threads, std::vector<Bound> buffers = {}, size_t groups = 1) {
    const auto out = empty(4096);
    if (buffers.empty()) buffers = {{out.get()}};
    EXPECT_THAT(run(kernel, buffers, {groups, 1, 1}, {threads, 1, 1}), HasSubstr(kernel));
  }
};

TEST_F(Faults, ReadPastEnd) {
  const auto x = buffer(std::vector<float>(64)), y = empty(256);
  fails("reads_past_end", 64, {{x.get()}, {y.get()}});
  expect(Fault::kOutOfBounds, "reads_past_end", "x[i + 1]", "4 bytes past the end of buffer 0 (x, 256 bytes");
}

TEST_F(Faults, WritePastEnd) {
  const auto x = buffer(std::vector<float>(64)), y = empty(256);
  fails("writes_past_end", 64, {{x.get()}, {y.get()}});
  expect(Fault::kOutOfBounds, "writes_past_end", "y[i * 2]", "past the end of buffer 1 (y");
}

TEST_F(Faults, WriteBeforeOffset) {
  const auto y = empty(512);
  fails("writes_before_offset", 32, {{y.get(), 256}});
  expect(Fault::kOutOfBounds, "writes_before_offset", "int(i) - 1", "4 bytes before buffer 0");
}

TEST_F(Faults, ThreadgroupWritePastEnd) {
  fails("writes_threadgroup_past_end", 32);
  expect(Fault::kOutOfBounds, "writes_threadgroup_past_end", "p[i + 1]", "outside every threadgroup variable");
}

TEST_F(Faults, UninitialisedBuffer) {
  const auto x = empty(256), y = empty(256);
  static_cast<float*>(x->contents())[3] = 1.0f;  // some of it was written
  fails("reads_fresh_buffer", 64, {{x.get()}, {y.get()}});
  expect(Fault::kUninitialised, "reads_fresh_buffer", "y[i] = x[i]", "nothing wrote them");
}

TEST_F(Faults, UninitialisedThreadgroupMemory) {
  fails("reads_fresh_threadgroup_memory", 64);
  expect(Fault::kUninitialised, "reads_fresh_threadgroup_memory", "y[i] = a[i]");
}

TEST_F(Faults, RaceInThreadgroupMemory) {
  fails("races_in_threadgroup_memory", 64);
  for (const auto& f : softmetal::take_findings())  // whichever thread runs first reads what nobody wrote yet
    EXPECT_TRUE(f.fault == Fault::kRace || f.fault == Fault::kUninitialised) << softmetal::describe(f);
}

TEST_F(Faults, BarrierOnTheWrongMemory) {
  fails("barrier_orders_nothing", 64);
  expect(Fault::kRace, "barrier_orders_nothing", "a[63 - i]", "no barrier between");
}

TEST_F(Faults, RaceInsideASimdgroup) {
  fails("races_in_simdgroup", 32);
  bool race = false;
  for (const auto& f : softmetal::take_findings()) race = race || f.fault == Fault::kRace;
  EXPECT_TRUE(race);
}

TEST_F(Faults, RaceAcrossThreadgroups) {
  const auto y = buffer(std::vector<float>(257));
  fails("races_across_threadgroups", 64, {{y.get()}}, 4);
  expect(Fault::kRace, "races_across_threadgroups", "");
}

TEST_F(Faults, CountingWithoutAtomics) {
  const auto count = buffer(std::vector<uint32_t>(1));
  fails("adds_without_atomics", 32, {{count.get()}}, 8);
  expect(Fault::kRace, "adds_without_atomics", "count[0] += 1", "byte 0 of buffer 0 (count)");
}

TEST_F(Faults, AtomicsMixedWithPlainAccess) {
  const auto count = buffer(std::vector<uint32_t>(1));
  fails("mixes_atomics_and_plain", 32, {{count.get()}});
  expect(Fault::kRace, "mixes_atomics_and_plain", "");
}

TEST_F(Faults, DivergentBarrier) {
  fails("diverges_at_barrier", 64);
  expect(Fault::kDivergence, "diverges_at_barrier", "threadgroup_barrier", "returned");
}

TEST_F(Faults, ReturnBeforeBarrier) {
  fails("returns_before_barrier", 64);
  expect(Fault::kDivergence, "returns_before_barrier", "threadgroup_barrier", "threads 5: returned");
}

TEST_F(Faults, TwoBarriers) {
  fails("meets_at_two_barriers", 64);
  expect(Fault::kDivergence, "meets_at_two_barriers", "threadgroup_barrier", "different barriers");
}

TEST_F(Faults, DivergentCollectives) {
  fails("diverges_in_simdgroup", 32);
  expect(Fault::kDivergence, "diverges_in_simdgroup", "simd_", "threads 16-31: simd_max");
}

TEST_F(Faults, CollectiveAgainstBarrier) {
  fails("sums_in_half_a_simdgroup_at_barrier", 32);
  expect(Fault::kDivergence, "sums_in_half_a_simdgroup_at_barrier", "", "wait");
}

TEST_F(Faults, ShuffleFromALaneThatReturned) {
  fails("shuffles_from_missing_lane", 32);
  expect(Fault::kMissingLane, "shuffles_from_missing_lane", "simd_shuffle_xor", "lane 16 reads from lane 24");
}

TEST_F(Faults, ShuffleFromALaneThatCannotBe) {
  fails("shuffles_from_lane_40", 32);
  expect(Fault::kMissingLane, "shuffles_from_lane_40", "simd_shuffle(", "reads from lane 40");
}

TEST_F(Faults, MatrixWithoutAllLanes) {
  fails("multiplies_with_missing_lanes", 32);
  expect(Fault::kDivergence, "multiplies_with_missing_lanes", "simdgroup_multiply", "needs all 32 lanes");
}

TEST_F(Faults, WriteToConstant) {
  const auto p = buffer(std::vector<uint32_t>{64, 0}), y = empty(256);
  fails("writes_constant", 64, {{p.get()}, {y.get()}});
  expect(Fault::kReadOnlyWrite, "writes_constant", ".n = i", "bound as constant");
}

TEST_F(Faults, ArgumentsShorterThanTheirType) {
  const auto p = buffer(std::vector<uint32_t>{1}), y = empty(256);
  fails("needs_big_arguments", 64, {{p.get()}, {y.get()}});
  expect(Fault::kOutOfBounds, "needs_big_arguments", "", "has 4 bytes");
}

TEST_F(Faults, Misaligned) {
  const auto x = buffer(std::vector<float>(64, 1.0f)), y = empty(256);
  fails("reads_misaligned", 32, {{x.get()}, {y.get()}});
  expect(Fault::kMisaligned, "reads_misaligned", "x + i + 1", "multiple of");
}

TEST_F(Faults, MisalignedVector) {
  const auto x = buffer(std::vector<float>(64, 1.0f)), y = empty(256);
  fails("reads_misaligned_vector", 32, {{x.get()}, {y.get()}});
  expect(Fault::kMisaligned, "reads_misaligned_vector", "float4*", "multiple of 16");
}

TEST_F(Faults, IndexOutsideAnArray) {
  fails("indexes_past_an_array", 5);
  expect(Fault::kUndefined, "indexes_past_an_array", "mine[i]", "index 4 is outside");
}

TEST_F(Faults, DivisionByZero) {
  fails("divides_by_zero", 4);
  expect(Fault::kUndefined, "divides_by_zero", "100 / i", "division by zero");
}

TEST_F(Faults, EndlessLoop) {
  softmetal::Options options = checked();
  options.dispatch_timeout_seconds = 0.05;
  softmetal::set_options(options);
  const auto y = buffer(std::vector<float>(32));
  fails("never_ends", 32, {{y.get()}});
  expect(Fault::kEndless, "never_ends", "");
}

TEST_F(Faults, UnboundBuffer) {
  const auto x = buffer(std::vector<float>(64));
  EXPECT_THAT(run("doubles", {{x.get()}}, {1, 1, 1}, {64, 1, 1}),
              HasSubstr("nothing is bound at buffer(1), parameter y"));
}

// --- between dispatches and encoders -----------------------------------------------------------------------------

class Hazards : public Faults {
 protected:
  // fills(a), then doubles(a -> b), in one encoder; with or without a barrier.
  std::string chain(MTL::DispatchType type, bool barrier) {
    const auto a = empty(256), b = empty(256);
    const auto fills = pipeline("fills"), doubles = pipeline("doubles");
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder(type);
    encoder->setComputePipelineState(fills.get());
    encoder->setBuffer(a.get(), 0, 0);
    encoder->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    if (barrier) encoder->memoryBarrier(MTL::BarrierScopeBuffers);
    encoder->setComputePipelineState(doubles.get());
    bind(encoder, {{a.get()}, {b.get()}});
    encoder->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    encoder->endEncoding();
    const std::string error = finish(commands);
    if (error.empty()) {
      EXPECT_EQ(values<float>(b)[63], 126.0f);
    }
    return error;
  }

  // The same in two encoders on an untracked buffer; `fence` orders them.
  std::string two_encoders(MTL::ResourceOptions tracking, bool fence) {
    const auto a = empty(256, tracking), b = empty(256, tracking);
    const auto order = NS::TransferPtr(device_->newFence());
    const auto fills = pipeline("fills"), doubles = pipeline("doubles");
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* first = commands->computeCommandEncoder();
    first->setComputePipelineState(fills.get());
    first->setBuffer(a.get(), 0, 0);
    first->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    if (fence) first->updateFence(order.get());
    first->endEncoding();
    MTL::ComputeCommandEncoder* second = commands->computeCommandEncoder();
    if (fence) second->waitForFence(order.get());
    second->setComputePipelineState(doubles.get());
    bind(second, {{a.get()}, {b.get()}});
    second->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    second->endEncoding();
    return finish(commands);
  }
};

TEST_F(Hazards, ConcurrentDispatchesNeedABarrier) {
  EXPECT_NE(chain(MTL::DispatchTypeConcurrent, false), "");
  bool found = false;
  for (const auto& f : softmetal::take_findings())
    found = found || f.fault == Fault::kMissingBarrier || f.fault == Fault::kUninitialised;  // either order may run
  EXPECT_TRUE(found);
}

TEST_F(Hazards, TheBarrierSuffices) { EXPECT_EQ(chain(MTL::DispatchTypeConcurrent, true), ""); }

TEST_F(Hazards, SerialEncodersNeedNone) { EXPECT_EQ(chain(MTL::DispatchTypeSerial, false), ""); }

TEST_F(Hazards, MissingBarrierIsFoundEvenWhenTheResultIsRight) {
  softmetal::Options options = checked();
  options.shuffle = false;  // the order that happens to be right
  softmetal::set_options(options);
  EXPECT_THAT(chain(MTL::DispatchTypeConcurrent, false), HasSubstr("missing barrier"));
  expect(Fault::kMissingBarrier, "doubles", "", "as does fills");
}

TEST_F(Hazards, UntrackedBuffersNeedAFenceBetweenEncoders) {
  EXPECT_THAT(two_encoders(MTL::ResourceHazardTrackingModeUntracked, false), HasSubstr("missing fence"));
  expect(Fault::kMissingFence, "doubles", "", "untracked");
}

TEST_F(Hazards, TheFenceSuffices) { EXPECT_EQ(two_encoders(MTL::ResourceHazardTrackingModeUntracked, true), ""); }

TEST_F(Hazards, TrackedBuffersNeedNone) { EXPECT_EQ(two_encoders(MTL::ResourceHazardTrackingModeDefault, false), ""); }

TEST_F(Hazards, TwoQueuesNeedAnEvent) {
  for (const bool event : {false, true}) {
    const auto a = empty(256, MTL::ResourceHazardTrackingModeUntracked), b = empty(256);
    const auto other = NS::TransferPtr(device_->newCommandQueue());
    const auto done = NS::TransferPtr(device_->newEvent());
    const auto gate = NS::TransferPtr(device_->newSharedEvent());
    const auto fills = pipeline("fills"), doubles = pipeline("doubles");
    MTL::CommandBuffer* first = queue_->commandBuffer();
    first->encodeWait(gate.get(), 1);  // held back until both are committed
    MTL::ComputeCommandEncoder* encoder = first->computeCommandEncoder();
    encoder->setComputePipelineState(fills.get());
    encoder->setBuffer(a.get(), 0, 0);
    encoder->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    encoder->endEncoding();
    first->encodeSignalEvent(done.get(), 1);
    first->commit();
    MTL::CommandBuffer* second = other->commandBuffer();
    if (event) second->encodeWait(done.get(), 1);
    if (!event) second->encodeWait(gate.get(), 2);  // so that the test knows the order; it is no order to Metal
    encoder = second->computeCommandEncoder();
    encoder->setComputePipelineState(doubles.get());
    bind(encoder, {{a.get()}, {b.get()}});
    encoder->dispatchThreadgroups({1, 1, 1}, {64, 1, 1});
    encoder->endEncoding();
    second->commit();
    gate->setSignaledValue(1);
    first->waitUntilCompleted();
    gate->setSignaledValue(2);
    second->waitUntilCompleted();
    EXPECT_EQ(second->status(), event ? MTL::CommandBufferStatusCompleted : MTL::CommandBufferStatusError);
    if (!event) expect(Fault::kMissingFence, "doubles", "");
  }
}

}  // namespace
}  // namespace softmetal_test
