// The parts of the Metal backend that need no device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "backend/metal/hazards.h"
#include "backend/metal/kernel_sources.h"
#include "backend/metal/options.h"
#include "backend/metal/policy.h"
#include "backend/metal/residency.h"
#include "backend/metal/weight_buffers.h"
#include "base/error.h"

namespace calla::metal {
namespace {

using ::testing::HasSubstr;

// Feeds a tracker dispatch by dispatch; true where it asks for a barrier.
class Trace {
 public:
  bool operator()(std::initializer_list<ByteRange> reads, std::initializer_list<ByteRange> writes) {
    return tracker_.add({reads.begin(), reads.size()}, {writes.begin(), writes.size()});
  }

 private:
  HazardTracker tracker_;
};

TEST(Hazards, ReadersRunTogether) {
  int buffer = 0, out_a = 0, out_b = 0;
  Trace add;
  EXPECT_FALSE(add({{&buffer, 0, 8}}, {{&out_a, 0, 8}}));
  EXPECT_FALSE(add({{&buffer, 0, 8}}, {{&out_b, 0, 8}}));
}

TEST(Hazards, BarrierForEachKind) {
  int a = 0, b = 0, c = 0;
  {
    Trace add;  // read after write
    add({{&a, 0, 8}}, {{&b, 0, 8}});
    EXPECT_TRUE(add({{&b, 0, 8}}, {{&c, 0, 8}}));
  }
  {
    Trace add;  // write after read
    add({{&a, 0, 8}}, {{&b, 0, 8}});
    EXPECT_TRUE(add({{&c, 0, 8}}, {{&a, 0, 8}}));
  }
  {
    Trace add;  // write after write
    add({}, {{&b, 0, 8}});
    EXPECT_TRUE(add({}, {{&b, 4, 12}}));
  }
}

TEST(Hazards, PartsOfOneBuffer) {
  int a = 0;
  Trace add;
  EXPECT_FALSE(add({}, {{&a, 0, 8}}));
  EXPECT_FALSE(add({}, {{&a, 8, 16}}));
  EXPECT_TRUE(add({{&a, 7, 9}}, {}));
}

TEST(Hazards, ABarrierSettlesThePast) {
  int a = 0, b = 0, c = 0;
  Trace add;
  add({}, {{&a, 0, 8}, {&b, 0, 8}});
  EXPECT_TRUE(add({{&a, 0, 8}}, {{&c, 0, 8}}));
  EXPECT_FALSE(add({{&b, 0, 8}}, {}));  // written before that barrier
  EXPECT_TRUE(add({{&c, 0, 8}}, {}));
}

TEST(WeightViews, TouchingPagesBecomeOneView) {
  const auto views = plan_views({{0x1100, 0x1200}, {0x1f00, 0x2100}, {0x9000, 0x9001}}, 0x1000, 0x100000);
  ASSERT_EQ(views.size(), 2u);
  EXPECT_EQ(views[0].begin, 0x1000u);
  EXPECT_EQ(views[0].end, 0x3000u);
  EXPECT_EQ(views[1].begin, 0x9000u);
  EXPECT_EQ(views[1].end, 0xa000u);
}

TEST(WeightViews, LongSpansOverlapByTheLargestTensor) {
  std::vector<MemorySpan> tensors;
  for (uintptr_t at = 0x1000; at < 0x40000; at += 0x1800) tensors.push_back({at, at + 0x1800});
  const size_t limit = 0x8000;
  const auto views = plan_views(tensors, 0x1000, limit);
  EXPECT_GT(views.size(), 4u);
  for (const MemorySpan& view : views) {
    EXPECT_LE(view.bytes(), limit);
    EXPECT_EQ(view.begin % 0x1000, 0u);
  }
  for (const MemorySpan& t : tensors) {
    EXPECT_TRUE(std::any_of(views.begin(), views.end(),
                            [&](const MemorySpan& v) { return v.begin <= t.begin && t.end <= v.end; }))
        << std::hex << t.begin;
  }
}

TEST(WeightViews, RefusesATensorLongerThanABuffer) {
  EXPECT_THROW(plan_views({{0, 0x9000}}, 0x1000, 0x8000), DeviceError);
}

TEST(WorkingSet, SaysWhichLimitToRaise) {
  DeviceTraits traits;
  traits.name = "Apple M2";
  traits.working_set_bytes = size_t{17} << 30;
  EXPECT_EQ(working_set_refusal(traits, size_t{16} << 30, "the model"), "");
  const std::string text = working_set_refusal(traits, size_t{20} << 30, "the model");
  EXPECT_THAT(text, HasSubstr("21.5 GB"));
  EXPECT_THAT(text, HasSubstr("18.3 GB"));
  EXPECT_THAT(text, HasSubstr("sudo sysctl iogpu.wired_limit_mb=20992"));  // 20,480 and 512 to spare
}

TEST(Ablations, NamesAreChecked) {
  EXPECT_TRUE(parse_ablations({"gqa-packing"}).gqa_packing);
  EXPECT_FALSE(parse_ablations({"gqa-packing"}).split_kv);
  EXPECT_THROW(parse_ablations({"gqa_packing"}), UsageError);
  for (const std::string& name : ablation_names()) EXPECT_NO_THROW(parse_ablations({name}));
}

TEST(Policy, AttentionLayouts) {
  const Policy policy;
  EXPECT_EQ(policy.splits(1), 1);
  EXPECT_EQ(policy.splits(127), 1);
  EXPECT_EQ(policy.splits(128), 2);
  EXPECT_EQ(policy.splits(1024), 16);
  EXPECT_EQ(policy.splits(4096), 16);
  EXPECT_EQ(policy.splits(8192), 32);
  EXPECT_EQ(policy.splits(32767), 32);
  EXPECT_FALSE(policy.fixed_blocks(32767));
  EXPECT_TRUE(policy.fixed_blocks(32768));
  EXPECT_EQ(policy.splits(32768), 64);
  EXPECT_EQ(policy.splits(32769), 65);
}

TEST(Policy, ExpertTilesFollowTheLoad) {
  EXPECT_EQ(Policy::expert_tile(256, 256, true), 16);   // 8 rows an expert
  EXPECT_EQ(Policy::expert_tile(512, 256, true), 32);   // 16
  EXPECT_EQ(Policy::expert_tile(2048, 256, true), 32);  // 64
  EXPECT_EQ(Policy::expert_tile(2048, 256, false), 16);
}

TEST(KernelSources, HaveNoHeadersLeft) {
  for (const std::string source : {kernel_source(), tensor_kernel_source()}) {
    EXPECT_EQ(source.find("#include \""), std::string::npos);
    EXPECT_NE(source.find("kernel void"), std::string::npos);
    EXPECT_NE(source.find("[[buffer(0)]]"), std::string::npos);
    EXPECT_EQ(source.find("@open@"), std::string::npos);
  }
}

}  // namespace
}  // namespace calla::metal
