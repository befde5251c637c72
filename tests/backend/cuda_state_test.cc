// RecurrentPool without a card: which slots have logs, and what becomes of these, with an imitated CUDA runtime whose device
// memory is the host's and holds no zeros at first. A part's state is a number here: of the tokens that it has seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/gdn.h"
#include "backend/cuda/state.h"
#include "model/shape.h"
#include "selftest/random_model.h"

extern "C" {
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaErrorNotSupported;  // of KvPool
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
}

namespace calla::cuda {

void cuda_check(cudaError_t status, const char*, const std::source_location&) { check(status == cudaSuccess, "works"); }
DeviceBytes::DeviceBytes(size_t bytes, const char*) : data_(bytes > 0 ? std::malloc(bytes) : nullptr), size_(bytes) {
  if (bytes > 0) std::memset(data_, 0x5a, bytes);
}
DeviceBytes::~DeviceBytes() { std::free(data_); }

void apply_logs(float* states, size_t layer_floats, StateLog* logs, int layers, int parts, cudaStream_t) {
  for (int i = 0; i < layers * parts; ++i) {
    int32_t& count = logs[i].entries[0].count;
    states[static_cast<size_t>(i / parts) * layer_floats + static_cast<size_t>(i % parts) * kStatePartFloats] +=
        static_cast<float>(count);
    count = 0;
  }
}

namespace {

constexpr int kSlots = 7, kLogs = 3;

class CudaState : public ::testing::Test {
 protected:
  CudaState() { pool_.allocate(kSlots, kLogs, nullptr); }

  // What the rows program does in a layer of a step.
  void run_layer(int layer, const std::vector<int>& slots, const std::vector<int>& logs) {
    for (size_t i = 0; i < slots.size(); ++i) {
      float* state = pool_.layer(layer) + static_cast<size_t>(slots[i]) * pool_.slot_floats();
      StateLog* log = pool_.layer_log(layer) + static_cast<size_t>(logs[i]) * pool_.log_parts();
      for (int part = 0; part < parts_; ++part) {
        int32_t& count = log[part].entries[0].count;
        ASSERT_TRUE(count >= 0 && count <= kLogTokens);
        if (count < kLogTokens) {
          ++count;
        } else {
          state[static_cast<size_t>(part) * kStatePartFloats] += static_cast<float>(count + 1);
          count = 0;
        }
      }
    }
  }
  void step(const std::vector<int>& slots) {
    std::vector<int> logs(slots.size());
    pool_.open_logs(slots, logs, nullptr);
    for (int layer = 0; layer < shape_.gdn_layers(); ++layer) run_layer(layer, slots, logs);
  }
  float tokens(int layer, int slot) {
    std::vector<float> state(static_cast<size_t>(shape_.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim);
    std::vector<float> conv(3 * static_cast<size_t>(shape_.gdn_conv_width()));
    pool_.read(layer, slot, state, conv, nullptr);
    return state[0];
  }
  void expect_tokens(const std::vector<float>& expected) {
    for (int layer = 0; layer < shape_.gdn_layers(); ++layer)
      for (int slot = 0; slot < kSlots; ++slot)
        EXPECT_EQ(tokens(layer, slot), expected[static_cast<size_t>(slot)]) << "layer " << layer << ", slot " << slot;
  }

  const ModelShape shape_ = tiny_shape(4);
  const int parts_ = shape_.gdn_value_heads * kGdnHeadDim / kStateColumns;
  RecurrentPool pool_{shape_};
};

TEST_F(CudaState, TokensOfASlotStayItsOwn) {
  std::vector<float> expected(kSlots, 0);
  std::mt19937 random(1);
  const auto some_slot = [&] { return static_cast<int>(random() % kSlots); };
  std::vector<std::byte> exported(pool_.slot_bytes());
  for (int turn = 0; turn < 4000; ++turn) {
    const int slot = some_slot(), other = some_slot();
    switch (random() % 10) {
      case 0:
        pool_.clear(slot, nullptr);
        expected[static_cast<size_t>(slot)] = 0;
        break;
      case 1:
        pool_.copy(slot, other, nullptr);
        expected[static_cast<size_t>(other)] = expected[static_cast<size_t>(slot)];
        break;
      case 2:
        pool_.export_slot(slot, exported, nullptr);
        pool_.import_slot(other, exported, nullptr);
        expected[static_cast<size_t>(other)] = expected[static_cast<size_t>(slot)];
        break;
      case 3:
        pool_.settle(slot, nullptr);
        break;
      case 4:
        EXPECT_EQ(tokens(0, slot), expected[static_cast<size_t>(slot)]);
        break;
      default: {
        std::vector<int> slots(kSlots);
        for (int i = 0; i < kSlots; ++i) slots[static_cast<size_t>(i)] = i;
        std::shuffle(slots.begin(), slots.end(), random);
        slots.resize(2 + random() % 2);
        step(slots);
        for (const int s : slots) ++expected[static_cast<size_t>(s)];
      }
    }
    if (turn % 500 == 499) expect_tokens(expected);
  }
}

TEST_F(CudaState, ALogStaysOpenWhileItsStepGoesOn) {
  const std::vector<int> slots = {0, 1};
  std::vector<int> logs(2);
  pool_.open_logs(slots, logs, nullptr);
  run_layer(0, slots, logs);
  EXPECT_EQ(tokens(0, 0), 1);
  std::vector<std::byte> exported(pool_.slot_bytes());
  pool_.export_slot(1, exported, nullptr);
  pool_.copy(0, 5, nullptr);
  for (int layer = 1; layer < shape_.gdn_layers(); ++layer) run_layer(layer, slots, logs);
  step({2, 3});
  step({4, 6, 2});  // by now the first two have lost their logs
  for (const int slot : {0, 1, 3, 4, 6})
    for (int layer = 0; layer < shape_.gdn_layers(); ++layer) EXPECT_EQ(tokens(layer, slot), 1) << "slot " << slot;
}

}  // namespace
}  // namespace calla::cuda
