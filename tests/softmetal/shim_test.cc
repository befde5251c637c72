// The shim library against plain C++: collectives, vectors, matrices, tensors in each layout, and the counters.
#include <cmath>
#include <numeric>
#include <random>

#include "device_test.h"
#include "softmetal/half.h"

namespace softmetal_test {
namespace {

using ::testing::HasSubstr;

class Shim : public DeviceTest {
 protected:
  void SetUp() override { open(checked()); }
};

TEST_F(Shim, Collectives) {
  std::vector<float> x(32);
  for (size_t i = 0; i < 32; ++i) x[i] = static_cast<float>((i * 7) % 32);
  const auto in = buffer(x), out = empty(24 * 32 * 4);
  ASSERT_EQ(run("collectives", {{in.get()}, {out.get()}}, {1, 1, 1}, {32, 1, 1}), "");
  const auto y = values<float>(out);
  const float sum = std::accumulate(x.begin(), x.end(), 0.0f);
  float running = 0;
  for (size_t i = 0; i < 32; ++i) {
    size_t line = 0;
    const auto next = [&] { return y[32 * line++ + i]; };
    const auto window = [&](size_t begin) { return x[begin] + x[begin + 1] + x[begin + 2] + x[begin + 3]; };
    EXPECT_EQ(next(), sum);
    EXPECT_EQ(next(), (x[0] + 1) * (x[1] + 1) * (x[2] + 1) * (x[3] + 1));
    EXPECT_EQ(next(), 0.0f);
    EXPECT_EQ(next(), 31.0f);
    EXPECT_EQ(next(), running + x[i]);
    EXPECT_EQ(next(), running);
    running += x[i];
    EXPECT_EQ(next(), x[31 - i]);
    EXPECT_EQ(next(), x[i ^ 5]);
    EXPECT_EQ(next(), i >= 3 ? x[i - 3] : x[i]);
    EXPECT_EQ(next(), i + 3 < 32 ? x[i + 3] : x[i]);
    EXPECT_EQ(next(), x[(i + 29) % 32]);
    EXPECT_EQ(next(), x[(i + 3) % 32]);
    EXPECT_EQ(next(), x[17]);
    EXPECT_EQ(next(), x[0]);
    EXPECT_EQ(next(), 20.0f);
    EXPECT_EQ(next(), 8.0f);
    EXPECT_EQ(next(), 0.0f);
    EXPECT_EQ(next(), 1.0f);
    EXPECT_EQ(next(), 11.0f);
    EXPECT_EQ(next(), window(i / 4 * 4));
    EXPECT_EQ(next(), x[i ^ 2]);
    EXPECT_EQ(next(), i % 8 >= 2 ? x[i - 2] : -x[i + 6]);
    EXPECT_EQ(next(), i + 2 < 32 ? x[i + 2] : -x[i - 30]);
    EXPECT_EQ(next(), i == 0 ? 1.0f : 0.0f);
  }
}

TEST_F(Shim, LanesThatReturnedDoNotCount) {
  const auto out = empty(16 * 4);
  ASSERT_EQ(run("sums_what_is_there", {{out.get()}}, {1, 1, 1}, {32, 1, 1}), "");
  EXPECT_EQ(values<float>(out), std::vector<float>(16, 240.0f));
}

TEST_F(Shim, Vectors) {
  const auto out = empty(16 * 4);
  ASSERT_EQ(run("vectors", {{out.get()}}, {1, 1, 1}, {1, 1, 1}), "");
  const auto y = values<float>(out);
  const float expected[] = {40, 2.5f, 20, 4.5f, 67, 1, 2.5f, 1.0f, 16.0f, 8.0f, 7, 2.5f, 5, INFINITY, 191, 3.14159265f};
  for (size_t i = 0; i < 16; ++i) EXPECT_FLOAT_EQ(y[i], expected[i]) << i;
}

TEST_F(Shim, OverloadsOnAddressSpaces) {
  const auto out = empty(64 * 4);
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  const auto state = pipeline("overloads");
  encoder->setComputePipelineState(state.get());
  encoder->setBuffer(out.get(), 0, 0);
  encoder->setThreadgroupMemoryLength(128, 0);
  encoder->dispatchThreadgroups({1, 1, 1}, {32, 1, 1});
  encoder->endEncoding();
  ASSERT_EQ(finish(commands), "");
  EXPECT_EQ(values<float>(out)[32 + 5], 501.0f);
}

TEST_F(Shim, Positions) {
  const size_t n = 19 * 10 * 3;
  const auto out = empty(n * 4);
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  const auto state = pipeline("positions");
  encoder->setComputePipelineState(state.get());
  encoder->setBuffer(out.get(), 0, 0);
  encoder->dispatchThreads({19, 10, 3}, {8, 4, 1});
  encoder->endEncoding();
  ASSERT_EQ(finish(commands), "");
  const auto y = values<uint32_t>(out);
  for (uint32_t i = 0; i < n; ++i) EXPECT_EQ(y[i], i);
}

TEST_F(Shim, IndirectDispatch) {
  const auto out = empty(96 * 4), arguments = buffer(std::vector<uint32_t>{0xFFFFFFFF, 3, 1, 1});
  MTL::CommandBuffer* commands = queue_->commandBuffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  const auto state = pipeline("sums_what_is_there");
  encoder->setComputePipelineState(state.get());
  encoder->setBuffer(out.get(), 0, 0);
  encoder->dispatchThreadgroups(arguments.get(), 4, {2, 1, 1});
  encoder->endEncoding();
  softmetal::record_dispatches(true);
  finish(commands);  // the groups write the same place: a race, which is not this test's matter
  softmetal::record_dispatches(false);
  const auto dispatches = softmetal::take_dispatches();
  ASSERT_EQ(dispatches.size(), 1u);
  EXPECT_EQ(dispatches[0].threadgroups.x, 3u);
  EXPECT_EQ(softmetal::take_findings().size(), 1u);
}

TEST_F(Shim, Atomics) {
  for (const bool check : {true, false}) {
    softmetal::Options options;
    options.check = check;
    softmetal::set_options(options);
    const auto bins = buffer(std::vector<uint32_t>(7)), extreme = buffer(std::vector<int>{-5});
    ASSERT_EQ(run("counts", {{bins.get()}, {extreme.get()}}, {50, 1, 1}, {70, 1, 1}), "");
    EXPECT_EQ(values<uint32_t>(bins), std::vector<uint32_t>(7, 1000));
    EXPECT_EQ(values<int>(extreme)[0], 3499);
  }
}

// --- matrices and tensors --------------------------------------------------------------------------------------

std::vector<float> random_values(size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> v(n);
  for (float& f : v) f = static_cast<float>(static_cast<int>(random() % 33) - 16) / 8;  // exact in bfloat
  return v;
}
std::vector<metal::bfloat> to_bfloat(const std::vector<float>& v) {
  std::vector<metal::bfloat> b;
  for (const float f : v) b.emplace_back(f);
  return b;
}
// [m][n], b as [k][n] or, transposed, [n][k].
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, size_t m, size_t n, size_t k,
                           bool transposed) {
  std::vector<float> c(m * n);
  for (size_t i = 0; i < m; ++i)
    for (size_t j = 0; j < n; ++j)
      for (size_t l = 0; l < k; ++l) c[i * n + j] += a[i * k + l] * (transposed ? b[j * k + l] : b[l * n + j]);
  return c;
}

TEST_F(Shim, SimdgroupMatrices) {
  const auto a = random_values(16 * 32, 1), b = random_values(32 * 24, 2);
  auto out = empty(16 * 24 * 4);
  auto x = buffer(a), y = buffer(b);
  ASSERT_EQ(run("matrices_float", {{x.get()}, {y.get()}, {out.get()}}, {1, 1, 1}, {32, 1, 1}), "");
  EXPECT_EQ(values<float>(out), product(a, b, 16, 24, 32, false));
  out = empty(16 * 24 * 4);
  x = buffer(to_bfloat(a)), y = buffer(to_bfloat(b));
  ASSERT_EQ(run("matrices_bfloat_t", {{x.get()}, {y.get()}, {out.get()}}, {1, 1, 1}, {32, 1, 1}), "");
  EXPECT_EQ(values<float>(out), product(a, b, 16, 24, 32, true));
}

TEST_F(Shim, CooperativeTensorsInEachLayout) {
  const int k = 64;
  const auto a = random_values(16 * 64, 3), w = random_values(32 * 64, 4);
  const auto x = buffer(to_bfloat(a)), y = buffer(to_bfloat(w)), length = buffer(std::vector<int>{k});
  const auto expected = product(a, w, 16, 32, 64, true);
  for (const bool shuffled : {false, true}) {
    softmetal::Options options = checked();
    options.tensor_layout = shuffled ? softmetal::TensorLayout::kShuffled : softmetal::TensorLayout::kM5;
    softmetal::set_options(options);
    for (const std::string kernel : {"tensors_ask", "tensors_assume"}) {
      const auto out = empty(16 * 32 * 4);
      const std::string error = run(kernel, {{x.get()}, {y.get()}, {out.get()}, {length.get()}}, {1, 1, 1}, {32, 1, 1});
      ASSERT_EQ(error, "");
      // A kernel that assumes M5's layout is right there and wrong elsewhere.
      EXPECT_EQ(values<float>(out) == expected, !(shuffled && kernel == "tensors_assume")) << kernel << shuffled;
    }
  }
}

TEST_F(Shim, TensorFaults) {
  const int k = 64;
  const auto a = random_values(16 * 64, 7), w = random_values(32 * 64, 8);
  const auto x = buffer(to_bfloat(a)), y = buffer(to_bfloat(w)), length = buffer(std::vector<int>{k});
  const auto expected = product(a, w, 16, 32, 64, true);
  const auto wrong_elements = [&](softmetal::TensorFault fault) {
    softmetal::Options options = checked();
    options.tensor_fault = fault;
    softmetal::set_options(options);
    const auto out = empty(16 * 32 * 4);
    EXPECT_EQ(run("tensors_assume", {{x.get()}, {y.get()}, {out.get()}, {length.get()}}, {1, 1, 1}, {32, 1, 1}), "");
    const auto found = values<float>(out);
    int wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) wrong += found[i] != expected[i];
    return wrong;
  };
  using softmetal::TensorFault;
  EXPECT_EQ(wrong_elements(TensorFault::kNone), 0);
  EXPECT_EQ(wrong_elements(TensorFault::kOneElement), 1);
  EXPECT_GT(wrong_elements(TensorFault::kDroppedTail), 400);
  EXPECT_GT(wrong_elements(TensorFault::kShortSums), 0);  // most of these sums fit into fp16
}

TEST_F(Shim, TensorsInMemoryClipAtTheirEdges) {
  for (const int rows : {16, 5}) {
    const int k = 48;
    const auto a = random_values(static_cast<size_t>(rows * k), 5), w = random_values(32 * 48, 6);
    const auto x = buffer(to_bfloat(a)), y = buffer(to_bfloat(w));
    const auto length = buffer(std::vector<int>{k}), count = buffer(std::vector<int>{rows});
    const auto out = empty(static_cast<size_t>(rows) * 32 * 4);
    ASSERT_EQ(run("tensors_in_memory", {{x.get()}, {y.get()}, {out.get()}, {length.get()}, {count.get()}}, {1, 1, 1},
                  {32, 1, 1}),
              "");
    EXPECT_EQ(values<float>(out), product(a, w, static_cast<size_t>(rows), 32, 48, true));
  }
}

TEST(Half, ConversionsRoundToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto h = metal::half::from_bits(static_cast<uint16_t>(bits));
    const float f = h;
    if (std::isnan(f)) continue;
    EXPECT_EQ(metal::half(f).bits, bits);
    if (std::isinf(f)) continue;
    // Halfway to the next value goes to the even one.
    const float next = metal::half::from_bits(static_cast<uint16_t>(bits + 1));
    if (std::isinf(next)) continue;
    const uint32_t even = bits % 2 ? bits + 1 : bits;
    EXPECT_EQ(metal::half((f + next) / 2).bits, even) << bits;
  }
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = metal::bfloat::from_bits(static_cast<uint16_t>(bits));
    if (std::isnan(float(b))) continue;
    EXPECT_EQ(metal::bfloat(float(b)).bits, bits);
  }
  EXPECT_EQ(metal::bfloat(1.00390625f).bits, 0x3F80u);
  EXPECT_EQ(metal::bfloat(1.01171875f).bits, 0x3F82u);
}

// --- counters ------------------------------------------------------------------------------------------------------

class Counters : public DeviceTest {
 protected:
  softmetal::DispatchRecord count(const std::string& kernel, size_t bytes_in, size_t threads,
                                  std::vector<Bound> more = {}) {
    softmetal::Options options = checked();
    options.count = true;
    open(options);
    const auto x = buffer(std::vector<float>(bytes_in / 4)), y = empty(4096);
    softmetal::record_dispatches(true);
    std::vector<Bound> buffers = {{x.get()}, {y.get()}};
    buffers.insert(buffers.end(), more.begin(), more.end());
    EXPECT_EQ(run(kernel, buffers, {1, 1, 1}, {threads, 1, 1}), "");
    softmetal::record_dispatches(false);
    const auto dispatches = softmetal::take_dispatches();
    EXPECT_EQ(dispatches.size(), 1u);
    EXPECT_THAT(softmetal::report(dispatches), HasSubstr(kernel));
    return dispatches.at(0);
  }
};

TEST_F(Counters, CoalescedLoads) {
  const auto t = count("loads_coalesced", 256, 64).device;
  EXPECT_EQ(t.loaded_bytes, 256u);
  EXPECT_EQ(t.stored_bytes, 256u);
  EXPECT_EQ(t.load_lines, 2u);
  EXPECT_EQ(t.load_instructions, 2u);
  EXPECT_EQ(t.unique_load_lines, 2u);
}

TEST_F(Counters, StridedLoads) {
  const auto t = count("loads_strided", 64 * 128, 64).device;
  EXPECT_EQ(t.loaded_bytes, 256u);
  EXPECT_EQ(t.load_lines, 64u);
  EXPECT_EQ(t.load_instructions, 2u);
}

TEST_F(Counters, VectorLoadsAreOneInstruction) {
  const auto t = count("loads_vectors", 64 * 16, 64).device;
  EXPECT_EQ(t.loaded_bytes, 1024u);
  EXPECT_EQ(t.load_instructions, 2u);
  EXPECT_EQ(t.load_lines, 8u);
  EXPECT_EQ(t.store_instructions, 2u);
  EXPECT_EQ(t.store_lines, 8u);
}

TEST_F(Counters, PassesOfALoopAreApart) {
  open(checked());
  const auto n = buffer(std::vector<int>{16});
  const auto record = count("loads_in_a_loop", 16 * 128, 32, {{n.get()}});
  const auto& x = record.buffers.at(0);
  EXPECT_EQ(x.name, "x");
  EXPECT_EQ(x.traffic.loaded_bytes, 2048u);
  EXPECT_EQ(x.traffic.load_instructions, 16u);
  EXPECT_EQ(x.traffic.load_lines, 16u);
  EXPECT_EQ(record.buffers.at(2).traffic.unique_load_lines, 1u);  // n, from each lane
}

}  // namespace
}  // namespace softmetal_test
