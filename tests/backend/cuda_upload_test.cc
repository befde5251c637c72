// DeviceWeights without a card: the upload code with an imitated CUDA runtime, whose device memory is the host's and whose
// stream does nothing until somebody waits for it. So a buffer that is filled again too early, or a copy that is out of
// order, shows in what arrives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/weights.h"
#include "selftest/random_model.h"

namespace {

// The stream: what was asked for, and how much of it has been done.
struct ImitatedStream {
  std::vector<std::function<void()>> asked;
  size_t done = 0;

  void run_until(size_t end) {
    for (; done < end; ++done) asked[done]();
  }
};
ImitatedStream& imitated_stream() {
  static ImitatedStream stream;
  return stream;
}
// Events: what had been asked for when they were recorded.
std::map<cudaEvent_t, size_t>& events() {
  static std::map<cudaEvent_t, size_t> all;
  return all;
}

}  // namespace

extern "C" {
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  imitated_stream().asked.emplace_back([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  imitated_stream().run_until(imitated_stream().asked.size());
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static std::uintptr_t last = 0;
  *event = reinterpret_cast<cudaEvent_t>(++last);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  events().erase(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  events()[event] = imitated_stream().asked.size();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto found = events().find(event); found != events().end()) imitated_stream().run_until(found->second);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
}

namespace calla::cuda {

void cuda_check(cudaError_t status, const char*, const std::source_location&) { check(status == cudaSuccess, "works"); }
void require_free_memory(size_t, const char*) {}
void* allocate_pinned(size_t bytes, const char*) { return std::malloc(bytes); }
DeviceBytes::DeviceBytes(size_t bytes, const char*) : data_(std::malloc(bytes)), size_(bytes) {}
DeviceBytes::~DeviceBytes() { std::free(data_); }

namespace {

// What a kernel finds in the raw form of a matrix when the stream comes to it.
struct Raw {
  std::vector<uint32_t> codes;
  std::vector<uint16_t> scales, biases;
  bool operator==(const Raw&) const = default;
};
Raw raw_of(const void* codes, const void* scales, const void* biases, size_t rows, size_t words, size_t groups) {
  Raw raw{std::vector<uint32_t>(rows * words), std::vector<uint16_t>(rows * groups),
          std::vector<uint16_t>(rows * groups)};
  std::memcpy(raw.codes.data(), codes, raw.codes.size() * 4);
  std::memcpy(raw.scales.data(), scales, raw.scales.size() * 2);
  std::memcpy(raw.biases.data(), biases, raw.biases.size() * 2);
  return raw;
}
Raw raw_of(const WeightMatrix& m) {
  return raw_of(m.codes, m.scales, m.biases, static_cast<size_t>(m.stack) * static_cast<size_t>(m.n), m.words_per_row(),
                m.groups_per_row());
}
std::vector<Raw>& packed() {
  static std::vector<Raw> all;
  return all;
}

bool holds(const float* device, const FloatVector& expected) {
  return std::memcmp(device, expected.data(), expected.size() * sizeof(float)) == 0;
}

}  // namespace

void pack_tiles(const PackedView&, int stack, int, TileRows kind, const RawView& source, const RawView& up,
                cudaStream_t) {
  imitated_stream().asked.emplace_back([=] {
    for (const RawView* v : {&source, &up}) {
      packed().push_back(raw_of(v->codes, v->scales, v->biases, static_cast<size_t>(stack) * static_cast<size_t>(v->n),
                                static_cast<size_t>(v->k * v->bits / 32), static_cast<size_t>(v->k / v->group)));
      if (kind == TileRows::kPlain) break;
    }
  });
}
void fill_random(const PackedView&, int, uint64_t, cudaStream_t) { check(false, "nothing is made here"); }
void fill_random(const RawView&, int, uint64_t, cudaStream_t) { check(false, "nothing is made here"); }

namespace {

TEST(CudaUpload, EverythingArrivesWhole) {
  ModelShape shape = tiny_shape(4);
  shape.vocab = 400000;  // a matrix of many parts
  const RandomModel model(shape, 9);
  const ModelWeights& weights = model.weights();
  double last = 0, all = 0;
  int calls = 0;
  const DeviceWeights uploaded(shape, weights, nullptr, [&](double done, double total) {
    EXPECT_GE(done, last);
    EXPECT_LE(done, total);
    last = done;
    all = total;
    ++calls;
  });
  EXPECT_EQ(last, all);
  EXPECT_GT(calls, 3) << "progress is told while it goes on";

  EXPECT_TRUE(holds(uploaded.final_norm, weights.final_norm));
  const RawView& e = uploaded.embedding;
  EXPECT_EQ(raw_of(e.codes, e.scales, e.biases, static_cast<size_t>(e.n), weights.embedding.words_per_row(),
                   weights.embedding.groups_per_row()),
            raw_of(weights.embedding));
  std::vector<const WeightMatrix*> in_order = {&weights.lm_head};
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    const LayerWeights& from = weights.layers[i];
    const LayerOnDevice& to = uploaded.layers[i];
    EXPECT_TRUE(holds(to.input_norm, from.input_norm));
    EXPECT_TRUE(holds(to.post_norm, from.post_norm));
    if (from.gdn) {
      const GdnWeights& w = *from.gdn;
      EXPECT_TRUE(holds(to.conv, w.conv));
      EXPECT_TRUE(holds(to.dt_bias, w.dt_bias));
      EXPECT_TRUE(holds(to.gdn_norm, w.norm));
      for (size_t head = 0; head < w.a_log.size(); ++head)
        EXPECT_EQ(to.decay_rate[head], std::exp(w.a_log[head])) << "of a vector that did not last";
      for (const WeightMatrix* m : {&w.in_qkv, &w.in_z, &w.in_a, &w.in_b, &w.out}) in_order.push_back(m);
    } else {
      const AttentionWeights& w = *from.attention;
      EXPECT_TRUE(holds(to.q_norm, w.q_norm));
      EXPECT_TRUE(holds(to.k_norm, w.k_norm));
      for (const WeightMatrix* m : {&w.q, &w.k, &w.v, &w.out}) in_order.push_back(m);
    }
    const MoeWeights& m = from.moe;
    for (const WeightMatrix* w : {&m.router, &m.shared_expert_gate, &m.expert_gate_proj, &m.expert_up_proj,
                                  &m.expert_down_proj, &m.shared_gate_proj, &m.shared_up_proj, &m.shared_down_proj})
      in_order.push_back(w);
  }
  ASSERT_EQ(packed().size(), in_order.size());
  for (size_t i = 0; i < in_order.size(); ++i) EXPECT_TRUE(packed()[i] == raw_of(*in_order[i])) << "matrix " << i;
}

}  // namespace
}  // namespace calla::cuda
