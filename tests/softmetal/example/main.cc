// Sums 1000 ones on the Metal device that there is; on softmetal, with its checks on. The right kernel gives 1000, the
// faulty one is found.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>

#include <softmetal/softmetal.h>
#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

namespace {

constexpr uint32_t kCount = 1000, kThreads = 64, kGroups = (kCount + kThreads - 1) / kThreads;

// The sum, or a negative number if the command buffer failed.
float sum_with(MTL::Device* device, const char* name) {
  auto library = NS::TransferPtr(device->newDefaultLibrary());
  auto function = NS::TransferPtr(library->newFunction(NS::String::string(name, NS::UTF8StringEncoding)));
  NS::Error* error = nullptr;
  auto pipeline = NS::TransferPtr(device->newComputePipelineState(function.get(), &error));
  auto values = NS::TransferPtr(device->newBuffer(kCount * sizeof(float), MTL::ResourceStorageModeShared));
  auto partial = NS::TransferPtr(device->newBuffer(kGroups * sizeof(float), MTL::ResourceStorageModeShared));
  std::fill_n(static_cast<float*>(values->contents()), kCount, 1.0f);

  auto queue = NS::TransferPtr(device->newCommandQueue());
  MTL::CommandBuffer* commands = queue->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(pipeline.get());
  encoder->setBuffer(values.get(), 0, 0);
  encoder->setBuffer(partial.get(), 0, 1);
  encoder->setBytes(&kCount, sizeof(kCount), 2);
  encoder->dispatchThreadgroups(MTL::Size(kGroups, 1, 1), MTL::Size(kThreads, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  if (commands->status() == MTL::CommandBufferStatusError) return -1;
  const auto* sums = static_cast<const float*>(partial->contents());
  return std::accumulate(sums, sums + kGroups, 0.0f);
}

}  // namespace

int main() {
  softmetal::Options options = softmetal::options();
  options.check = true;
  softmetal::set_options(options);

  auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  const float right = sum_with(device.get(), "sum");
  const bool clean = softmetal::take_findings().empty();
  const float faulty = sum_with(device.get(), "sum_past_the_end");
  const bool found = !softmetal::take_findings().empty();
  std::printf("sum: %g, %s; sum_past_the_end: %s\n", right, clean ? "no findings" : "FINDINGS",
              faulty < 0 && found ? "found" : "NOT FOUND");
  return right == kCount && clean && faulty < 0 && found ? 0 : 1;
}
