#pragma once
// What the tests of softmetal share: a device with one library, buffers, and one-dispatch command buffers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <Metal/Metal.hpp>

#include <cstring>
#include <string>
#include <vector>

#include "softmetal/softmetal.h"

namespace softmetal_test {

class DeviceTest : public ::testing::Test {
 protected:
  void open(const softmetal::Options& options, const char* library = "softmetal_test_kernels.metallib") {
    softmetal::set_options(options);
    device_ = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
    queue_ = NS::TransferPtr(device_->newCommandQueue());
    library_ = NS::TransferPtr(device_->newLibrary(NS::String::string(library, NS::UTF8StringEncoding), nullptr));
    ASSERT_TRUE(library_);
  }
  static softmetal::Options checked() {
    softmetal::Options options;
    options.check = true;
    return options;
  }
  void TearDown() override {
    for (const auto& finding : softmetal::take_findings()) ADD_FAILURE() << softmetal::describe(finding);
  }

  NS::SharedPtr<MTL::ComputePipelineState> pipeline(const std::string& name,
                                                    MTL::FunctionConstantValues* constants = nullptr) {
    NS::Error* error = nullptr;
    auto function = NS::TransferPtr(
        library_->newFunction(NS::String::string(name.c_str(), NS::UTF8StringEncoding), constants, &error));
    if (function) {
      auto state = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
      if (state) return state;
    }
    ADD_FAILURE() << error->localizedDescription()->utf8String();
    return {};
  }

  NS::SharedPtr<MTL::Buffer> empty(size_t bytes, MTL::ResourceOptions options = MTL::ResourceStorageModeShared) {
    return NS::TransferPtr(device_->newBuffer(bytes, options));
  }
  template <class T>
  NS::SharedPtr<MTL::Buffer> buffer(const std::vector<T>& values,
                                    MTL::ResourceOptions options = MTL::ResourceStorageModeShared) {
    auto b = empty(values.size() * sizeof(T), options);
    std::memcpy(b->contents(), values.data(), values.size() * sizeof(T));
    return b;
  }
  template <class T>
  static std::vector<T> values(const NS::SharedPtr<MTL::Buffer>& b) {
    const T* data = static_cast<const T*>(b->contents());
    return {data, data + b->length() / sizeof(T)};
  }

  struct Bound {
    MTL::Buffer* buffer;
    size_t offset = 0;
  };
  static void bind(MTL::ComputeCommandEncoder* encoder, const std::vector<Bound>& buffers) {
    for (size_t i = 0; i < buffers.size(); ++i) encoder->setBuffer(buffers[i].buffer, buffers[i].offset, i);
  }
  // One dispatch in a command buffer of its own. Returns its error text, "" if it succeeded.
  std::string run(const std::string& kernel, const std::vector<Bound>& buffers, MTL::Size groups, MTL::Size threads) {
    MTL::CommandBuffer* commands = queue_->commandBuffer();
    MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
    const auto state = pipeline(kernel);
    encoder->setComputePipelineState(state.get());
    bind(encoder, buffers);
    encoder->dispatchThreadgroups(groups, threads);
    encoder->endEncoding();
    return finish(commands);
  }
  static std::string finish(MTL::CommandBuffer* commands) {
    commands->commit();
    commands->waitUntilCompleted();
    NS::Error* error = commands->error();
    EXPECT_EQ(commands->status(), error ? MTL::CommandBufferStatusError : MTL::CommandBufferStatusCompleted);
    return error ? error->localizedDescription()->utf8String() : "";
  }

  const NS::SharedPtr<NS::AutoreleasePool> pool_ = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  NS::SharedPtr<MTL::Library> library_;
};

}  // namespace softmetal_test
