// The device runs correct kernels correctly, through the host interface.
#include <gtest/gtest.h>
#include <Metal/Metal.hpp>

#include <cstring>
#include <numeric>
#include <vector>

#include "softmetal/softmetal.h"

namespace {

class Basic : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    pool_ = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    softmetal::Options options;
    options.check = GetParam();
    softmetal::set_options(options);
    device_ = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
    queue_ = NS::TransferPtr(device_->newCommandQueue());
    library_ = NS::TransferPtr(device_->newLibrary(MTLSTR("softmetal_test_kernels.metallib"), nullptr));
    ASSERT_TRUE(library_);
  }
  void TearDown() override {
    for (const auto& finding : softmetal::take_findings()) ADD_FAILURE() << softmetal::describe(finding);
  }

  NS::SharedPtr<MTL::ComputePipelineState> pipeline(const char* name,
                                                    MTL::FunctionConstantValues* constants = nullptr) {
    NS::Error* error = nullptr;
    auto function =
        NS::TransferPtr(library_->newFunction(NS::String::string(name, NS::UTF8StringEncoding), constants, &error));
    if (!function) {
      ADD_FAILURE() << error->localizedDescription()->utf8String();
      return {};
    }
    return NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
  }

  template <class T>
  NS::SharedPtr<MTL::Buffer> buffer(const std::vector<T>& values) {
    auto b = NS::TransferPtr(device_->newBuffer(values.size() * sizeof(T), MTL::ResourceStorageModeShared));
    std::memcpy(b->contents(), values.data(), values.size() * sizeof(T));
    return b;
  }

  NS::SharedPtr<NS::AutoreleasePool> pool_;
  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  NS::SharedPtr<MTL::Library> library_;
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
    const auto x = buffer(a), y = buffer(b), z = buffer(bias);
    auto out = NS::TransferPtr(device_->newBuffer(n * 4, MTL::ResourceStorageModeShared));
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    encoder->setComputePipelineState(state.get());
    encoder->setBuffer(x.get(), 0, 0);
    encoder->setBuffer(y.get(), 0, 1);
    encoder->setBuffer(out.get(), 0, 2);
    const AddArgs args{static_cast<uint32_t>(n), 2.0f};
    encoder->setBytes(&args, sizeof args, 3);
    if (has_bias) encoder->setBuffer(z.get(), 0, 4);
    encoder->dispatchThreads({n, 1, 1}, {64, 1, 1});
    encoder->endEncoding();
    bool called = false;
    commands->addCompletedHandler([&](MTL::CommandBuffer*) { called = true; });
    commands->commit();
    commands->waitUntilCompleted();
    EXPECT_TRUE(called);
    ASSERT_EQ(commands->status(), MTL::CommandBufferStatusCompleted);
    EXPECT_GE(commands->GPUEndTime(), commands->GPUStartTime());
    const auto* result = static_cast<const float*>(out->contents());
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(result[i], 2.0f * a[i] + b[i] + 0.5f + (has_bias ? bias[i] : 0.0f)) << i;
  }
}

TEST_P(Basic, RowSumUsesBarriersAndThreadgroupMemory) {
  const auto state = pipeline("row_sum_float_256");
  EXPECT_EQ(state->staticThreadgroupMemoryLength(), 32u);
  EXPECT_EQ(state->threadExecutionWidth(), 32u);
  const size_t rows = 37;
  std::vector<float> x(rows * 256);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97);
  const auto in = buffer(x);
  auto out = NS::TransferPtr(device_->newBuffer(rows * 4, MTL::ResourceStorageModeShared));
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(state.get());
  encoder->setBuffer(in.get(), 0, 0);
  encoder->setBuffer(out.get(), 0, 1);
  encoder->dispatchThreadgroups({rows, 1, 1}, {256, 1, 1});
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  ASSERT_EQ(commands->status(), MTL::CommandBufferStatusCompleted);
  for (size_t r = 0; r < rows; ++r)
    EXPECT_EQ(
        static_cast<const float*>(out->contents())[r],
        std::accumulate(x.begin() + static_cast<long>(r) * 256, x.begin() + static_cast<long>(r + 1) * 256, 0.0f));
}

INSTANTIATE_TEST_SUITE_P(Flavours, Basic, ::testing::Values(false, true),
                         [](const auto& flavour) { return flavour.param ? "Checked" : "Plain"; });

}  // namespace
