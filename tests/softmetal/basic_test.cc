// The device runs correct kernels correctly, in both builds, through the host interface.
#include <numeric>

#include "device_test.h"

namespace softmetal_test {
namespace {

class Basic : public DeviceTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    softmetal::Options options;
    options.check = GetParam();
    open(options);
  }
};

struct AddArgs {
  uint32_t n;
  float scale;
};

TEST_P(Basic, ScaledAddWithRaggedGrid) {
  const size_t n = 1001;
  std::vector<float> a(n), b(n), bias(n);
  std::iota(a.begin(), a.end(), 0.0f);
  std::iota(b.begin(), b.end(), 5.0f);
  std::iota(bias.begin(), bias.end(), 100.0f);
  for (const bool has_bias : {false, true}) {
    auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
    constants->setConstantValue(&has_bias, MTL::DataTypeBool, NS::UInteger{0});
    const auto state = pipeline("scaled_add", constants.get());
    const auto x = buffer(a), y = buffer(b), z = buffer(bias), out = empty(n * 4);
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(state.get());
    bind(encoder, {{x.get()}, {y.get()}, {out.get()}});
    const AddArgs args{static_cast<uint32_t>(n), 2.0f};
    encoder->setBytes(&args, sizeof args, 3);
    if (has_bias) encoder->setBuffer(z.get(), 0, 4);
    encoder->dispatchThreads({n, 1, 1}, {64, 1, 1});
    encoder->endEncoding();
    bool called = false;
    commands->addCompletedHandler([&](MTL::CommandBuffer*) { called = true; });
    EXPECT_EQ(finish(commands), "");
    EXPECT_TRUE(called);
    EXPECT_GE(commands->GPUEndTime(), commands->GPUStartTime());
    const auto result = values<float>(out);
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(result[i], 2.0f * a[i] + b[i] + 0.5f + (has_bias ? bias[i] : 0.0f)) << i;
  }
}

TEST_P(Basic, DerivedConstantFollowsItsSource) {
  auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  const bool has_bias = false;
  const int extra = 7;
  constants->setConstantValue(&has_bias, MTL::DataTypeBool, NS::UInteger{0});
  constants->setConstantValue(&extra, MTL::DataTypeInt, NS::UInteger{1});
  const auto state = pipeline("scaled_add", constants.get());
  const auto x = buffer(std::vector<float>(4, 1.0f)), out = empty(16);
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(state.get());
  bind(encoder, {{x.get()}, {x.get()}, {out.get()}});
  const AddArgs args{4, 1.0f};
  encoder->setBytes(&args, sizeof args, 3);
  encoder->dispatchThreads({4, 1, 1}, {32, 1, 1});
  encoder->endEncoding();
  EXPECT_EQ(finish(commands), "");
  EXPECT_EQ(values<float>(out), std::vector<float>(4, 9.0f));
}

TEST_P(Basic, RowSumUsesBarriersAndThreadgroupMemory) {
  EXPECT_EQ(pipeline("row_sum_float_256")->staticThreadgroupMemoryLength(), 32u);
  EXPECT_EQ(pipeline("row_sum_bfloat_1024")->staticThreadgroupMemoryLength(), 128u);
  const size_t rows = 37;
  std::vector<float> x(rows * 256);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97);
  const auto in = buffer(x), out = empty(rows * 4);
  EXPECT_EQ(run("row_sum_float_256", {{in.get()}, {out.get()}}, {rows, 1, 1}, {256, 1, 1}), "");
  const auto sums = values<float>(out);
  for (size_t r = 0; r < rows; ++r) {
    const auto row = x.begin() + static_cast<ptrdiff_t>(r) * 256;
    EXPECT_EQ(sums[r], std::accumulate(row, row + 256, 0.0f));
  }
}

TEST_P(Basic, LibraryIsFoundByItsSource) {
  NS::Error* error = nullptr;
  EXPECT_EQ(device_->newLibrary(MTLSTR("kernel void nothing() {}"), static_cast<MTL::CompileOptions*>(nullptr), &error),
            nullptr);
  ASSERT_NE(error, nullptr);
  EXPECT_THAT(error->localizedDescription()->utf8String(), ::testing::HasSubstr("not the text"));
  auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  EXPECT_EQ(library_->newFunction(MTLSTR("no_such_kernel"), constants.get(), &error), nullptr);
  EXPECT_EQ(library_->newFunction(MTLSTR("scaled_add"), constants.get(), &error), nullptr);
  EXPECT_THAT(error->localizedDescription()->utf8String(), ::testing::HasSubstr("has_bias (index 0) has no value"));
}

INSTANTIATE_TEST_SUITE_P(Flavours, Basic, ::testing::Values(false, true),
                         [](const auto& flavour) { return flavour.param ? "Checked" : "Plain"; });

}  // namespace
}  // namespace softmetal_test
