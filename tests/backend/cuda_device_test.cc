// What the CUDA backend says when the card is missing or full.
#include "backend/cuda/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/create.h"

namespace calla::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "no error";
}

TEST(CudaDevice, WithoutACardSaysWhatToDo) {
  const std::string reason = why_no_device();
  if (reason.empty()) GTEST_SKIP() << "there is a card";
  EXPECT_THAT(reason, HasSubstr("NVIDIA"));
  EXPECT_THAT(reason, ::testing::ContainsRegex("nvidia-smi|update the driver"));
  EXPECT_EQ(reason.find('\n'), std::string::npos);
  EXPECT_THAT(error_of([] { open_device(); }), HasSubstr(reason));
  EXPECT_THAT(error_of([] { choose_backend("cuda"); }), HasSubstr(reason));
}

TEST(CudaDevice, AFullCardSaysWhatForAndHowMuch) {
  if (!why_no_device().empty()) GTEST_SKIP() << why_no_device();
  open_device();
  const std::string error = error_of([] { DeviceBytes(size_t{1} << 50, "memory for the KV cache"); });
  EXPECT_THAT(error, AllOf(HasSubstr("memory for the KV cache: 1125899.9 GB needed"), HasSubstr(" of the card's "),
                           HasSubstr("free; try a smaller --context")));
  EXPECT_THAT(error_of([] { require_free_memory(size_t{1} << 50, "the weights"); }),
              AllOf(HasSubstr("the weights: 1125899.9 GB needed"), HasSubstr("free; try a smaller --context")));
  EXPECT_NO_THROW(require_free_memory(1, "a byte"));
  // The next launch, of something else, is not blamed for it.
  EXPECT_NO_THROW(check_launch("a kernel"));
  EXPECT_THAT(error_of([] { cuda_check(cudaErrorMemoryAllocation, "page-locked memory for logits"); }),
              AllOf(HasSubstr("page-locked memory for logits: out of memory; "), HasSubstr("cuda_device_test.cc:")));
  EXPECT_THAT(error_of([] { cuda_check(cudaMemset(nullptr, 0, 1 << 20), "clear memory"); }), HasSubstr("clear memory"));
  EXPECT_NO_THROW(check_launch("a kernel"));
}

}  // namespace
}  // namespace calla::cuda
