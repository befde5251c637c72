// DeviceWeights without a card: the upload code with an imitated CUDA runtime, whose device memory is the host's. A stream
// does nothing until somebody waits for it or for one of its events, or else does everything at once and pulls along what
// that waits for. So a buffer or an area that is written again too early, a copy that is out of order, and data that are
// packed before they have come, show in what arrives.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/uploader.h"
#include "backend/cuda/weights.h"
#include "backend/weights_outline.h"
#include "selftest/random_model.h"

namespace {

enum class Which { kNone, kPacks, kCopies };

// A stream: what was asked for, and how much of it has been done.
struct ImitatedStream {
  std::vector<std::function<void()>> asked;
  size_t done = 0;
};
struct ImitatedEvent {
  cudaStream_t stream = nullptr;
  size_t end = 0;  // of what had been asked for
};

struct ImitatedRuntime {
  std::map<cudaStream_t, ImitatedStream> streams;
  std::map<cudaEvent_t, ImitatedEvent> events;
  cudaStream_t packs = nullptr;  // the backend's stream; others are for copies
  Which eager = Which::kNone;    // does at once what it is asked for
  Which faulty = Which::kNone;   // reports an error when it is waited for
  size_t device_bytes = 0, most_device_bytes = 0, required_bytes = 0;
  std::map<const std::byte*, size_t> device_memory;  // allocations
  std::span<std::byte> arena;                        // unless empty, allocations are taken from it, side by side
  std::function<void()> at_copy, at_pack;            // may throw
  cudaError_t locking = cudaSuccess;                 // what an attempt comes to
  void* locked = nullptr;
  cudaError_t last_error = cudaSuccess;
  size_t transfers = 0;

  template <class Handle>
  static Handle new_handle() {
    static std::deque<char> all;  // each has an address of its own
    return reinterpret_cast<Handle>(&all.emplace_back());
  }
  void run(cudaStream_t stream, size_t end) {
    ImitatedStream& s = streams[stream];
    while (s.done < end) {
      const std::function<void()> next = std::move(s.asked[s.done]);
      ++s.done;
      next();
    }
  }
  void run(cudaStream_t stream) { run(stream, streams[stream].asked.size()); }
  void run(const ImitatedEvent& event) { run(event.stream, event.end); }
  void ask(cudaStream_t stream, std::function<void()> what) {
    streams[stream].asked.push_back(std::move(what));
    if (eager == (stream == packs ? Which::kPacks : Which::kCopies)) run(stream);
  }
  // Before memory goes that a stream may still use.
  void expect_idle(const char* what) const {
    for (const auto& [stream, s] : streams)
      EXPECT_EQ(s.done, s.asked.size()) << what << " goes while a stream has work";
  }
  // The real runtime refuses a copy that goes beyond an allocation, whatever lies behind it.
  void expect_within_allocation(const void* to, size_t bytes) const {
    const auto* begin = static_cast<const std::byte*>(to);
    auto after = device_memory.upper_bound(begin);
    ASSERT_NE(after, device_memory.begin()) << "a copy goes to no device memory";
    const auto& [memory, size] = *--after;
    EXPECT_LE(begin + bytes, memory + size) << "a copy goes beyond an allocation";
  }
  cudaError_t error(cudaError_t status) {
    if (status != cudaSuccess) last_error = status;
    return status;
  }
};
ImitatedRuntime& runtime() {
  static ImitatedRuntime instance;
  return instance;
}

}  // namespace

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = ImitatedRuntime::new_handle<cudaStream_t>();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  runtime().expect_idle("a stream");
  runtime().streams.erase(stream);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (runtime().at_copy) runtime().at_copy();
  ++runtime().transfers;
  runtime().expect_within_allocation(to, bytes);
  runtime().ask(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  runtime().run(stream);
  const bool faulty =
      runtime().faulty != Which::kNone && (stream == runtime().packs) == (runtime().faulty == Which::kPacks);
  return runtime().error(faulty ? cudaErrorLaunchFailure : cudaSuccess);
}
cudaError_t cudaGetLastError() { return std::exchange(runtime().last_error, cudaSuccess); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  runtime().ask(stream, [recorded = runtime().events[event]] { runtime().run(recorded); });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = ImitatedRuntime::new_handle<cudaEvent_t>();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  runtime().events.erase(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  runtime().events[event] = {stream, runtime().streams[stream].asked.size()};
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  runtime().run(runtime().events[event]);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  // From its end on, which is touched last.
  const std::span all(static_cast<const char*>(memory), bytes);
  EXPECT_TRUE(std::all_of(all.rbegin(), all.rend(), [](char c) { return c == 0; })) << "locked before it was touched";
  if (runtime().locking != cudaSuccess) return runtime().error(runtime().locking);
  EXPECT_EQ(std::exchange(runtime().locked, memory), nullptr);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  runtime().expect_idle("a buffer");
  EXPECT_EQ(std::exchange(runtime().locked, nullptr), memory);
  std::memset(memory, 0xee, 1);  // it is still there
  return cudaSuccess;
}
}

namespace calla::cuda {

void cuda_check(cudaError_t status, const char* what, const std::source_location&) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(what);
}
void require_free_memory(size_t bytes, const char*) { runtime().required_bytes = bytes; }
void page_lock_check(cudaError_t status, size_t, const char* what) { cuda_check(status, what); }
DeviceBytes::DeviceBytes(size_t bytes, const char*) : size_(bytes) {
  const size_t taken = (bytes + 255) / 256 * 256;
  std::span<std::byte>& arena = runtime().arena;
  if (arena.empty()) {
    data_ = std::aligned_alloc(256, taken);
    check(data_ != nullptr, "this machine has the imitated card's memory");
  } else {
    check(taken < arena.size(), "the arena is large enough");
    data_ = arena.data();
    arena = arena.subspan(taken);
  }
  std::memset(data_, 0xaa, bytes);
  runtime().device_memory[data()] = bytes;
  runtime().device_bytes += bytes;
  runtime().most_device_bytes = std::max(runtime().most_device_bytes, runtime().device_bytes);
}
DeviceBytes::~DeviceBytes() {
  if (data_ == nullptr) return;
  runtime().expect_idle("device memory");
  runtime().device_memory.erase(data());
  runtime().device_bytes -= size_;
  if (runtime().arena.empty()) std::free(data_);
}

namespace {

// One row of a packed tile, as the imitated kernel lays it out: rows of a tile one behind another, in the bytes that the
// real layout takes.
struct TileRow {
  std::byte* codes;
  uint32_t* scales;  // a group's scale and bias
  size_t code_bytes, groups;

  TileRow(const PackedView& view, int tile, int row)
      : code_bytes(view.codes_per_tile() * sizeof(uint4) / kTileRows), groups(static_cast<size_t>(view.padded_groups)) {
    const size_t at = static_cast<size_t>(tile) * kTileRows + static_cast<size_t>(row);
    codes = reinterpret_cast<std::byte*>(const_cast<uint4*>(view.codes)) + at * code_bytes;
    scales = reinterpret_cast<uint32_t*>(const_cast<uint2*>(view.scales)) + at * groups;
  }
};

// What belongs there; padding is zero.
struct PackedRow {
  std::vector<std::byte> codes;
  std::vector<uint32_t> scales;

  PackedRow(const TileRow& to, const RawView& from, int row) : codes(to.code_bytes), scales(to.groups) {
    if (row >= from.n) return;
    const size_t bytes = static_cast<size_t>(from.k) * from.bits / 8, all = static_cast<size_t>(from.k / from.group);
    std::memcpy(codes.data(), reinterpret_cast<const std::byte*>(from.codes) + static_cast<size_t>(row) * bytes, bytes);
    for (size_t g = 0; g < all; ++g) {
      const size_t i = static_cast<size_t>(row) * all + g;
      scales[g] = from.scales[i] | static_cast<uint32_t>(from.biases[i]) << 16;
    }
  }
  void write(const TileRow& to) const {
    std::memcpy(to.codes, codes.data(), codes.size());
    std::memcpy(to.scales, scales.data(), scales.size() * sizeof(uint32_t));
  }
  bool is_at(const TileRow& at) const {
    return std::memcmp(at.codes, codes.data(), codes.size()) == 0 &&
           std::memcmp(at.scales, scales.data(), scales.size() * sizeof(uint32_t)) == 0;
  }
};

// Calls visit(tile row, what belongs there) for the tiles that `stack` matrices take.
template <class Visit>
void for_each_tile_row(const PackedView& view, int stack, int first_tile, TileRows kind, const RawView& source,
                       const RawView& up, Visit visit) {
  const bool swiglu = kind == TileRows::kSwiglu;
  const int units = swiglu ? 8 : kTileRows, tiles = (source.n + units - 1) / units;
  ASSERT_LE(first_tile + tiles, view.tiles);
  for (int entry = 0; entry < stack; ++entry)
    for (int tile = 0; tile < tiles; ++tile)
      for (int r = 0; r < kTileRows; ++r) {
        const TileRow to(view.entry(entry), first_tile + tile, r);
        visit(to, PackedRow(to, (swiglu && r >= 8 ? up : source).entry(entry), tile * units + r % units));
      }
}

}  // namespace

void pack_tiles(const PackedView& view, int stack, int first_tile, TileRows kind, const RawView& source,
                const RawView& up, cudaStream_t stream) {
  if (runtime().at_pack) runtime().at_pack();
  EXPECT_EQ(stream, runtime().packs);
  runtime().ask(stream, [=] {
    for_each_tile_row(view, stack, first_tile, kind, source, up,
                      [](const TileRow& to, const PackedRow& row) { row.write(to); });
  });
}
void fill_random(const PackedView& view, int, uint64_t, cudaStream_t stream) {
  runtime().ask(stream, [=] { *reinterpret_cast<uint32_t*>(const_cast<uint4*>(view.codes)) = 1; });
}
void fill_random(const RawView& view, int, uint64_t, cudaStream_t stream) {
  runtime().ask(stream, [=] { *const_cast<uint32_t*>(view.codes) = 1; });
}

namespace {

// The matrix where it lies.
RawView view_of(const WeightMatrix& m) {
  RawView v;
  v.codes = m.codes;
  v.scales = reinterpret_cast<const uint16_t*>(m.scales);
  v.biases = reinterpret_cast<const uint16_t*>(m.biases);
  v.n = m.n;
  v.k = m.k;
  v.bits = m.bits;
  v.group = m.group;
  return v;
}

void expect_packed(const PackedView& view, int first_tile, TileRows kind, const WeightMatrix& source,
                   const WeightMatrix& up) {
  size_t wrong = 0, rows = 0;
  for_each_tile_row(view, source.stack, first_tile, kind, view_of(source), view_of(up),
                    [&](const TileRow& at, const PackedRow& row) {
                      wrong += !row.is_at(at);
                      ++rows;
                    });
  EXPECT_EQ(wrong, 0u) << "of " << rows << " rows of a matrix [" << source.stack << "][" << source.n << "][" << source.k
                       << "] of " << source.bits << " bits";
}

void expect_raw(const RawView& at, const WeightMatrix& m) {
  const size_t rows = static_cast<size_t>(m.stack) * static_cast<size_t>(m.n);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at.codes) % 256, 0u);
  EXPECT_EQ(std::memcmp(at.codes, m.codes, rows * m.words_per_row() * 4), 0);
  EXPECT_EQ(std::memcmp(at.scales, m.scales, rows * m.groups_per_row() * 2), 0);
  EXPECT_EQ(std::memcmp(at.biases, m.biases, rows * m.groups_per_row() * 2), 0);
}

void expect_vector(const float* at, const FloatVector& expected) {
  EXPECT_EQ(std::memcmp(at, expected.data(), expected.size() * sizeof(float)), 0);
}

void expect_linear(const Linear& at, const std::vector<const WeightMatrix*>& parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (at.packed) {
      expect_packed(at.view, at.columns[i] / kTileRows, TileRows::kPlain, *parts[i], *parts[i]);
    } else {
      expect_raw(at.raw[i], *parts[i]);
    }
  }
}

void expect_experts(const Experts& at, const WeightMatrix& gate, const WeightMatrix& up, const WeightMatrix& down) {
  if (at.packed) {
    expect_packed(at.up, 0, TileRows::kSwiglu, gate, up);
    expect_packed(at.down, 0, TileRows::kPlain, down, down);
  } else {
    expect_raw(at.raw_gate, gate);
    expect_raw(at.raw_up, up);
    expect_raw(at.raw_down, down);
  }
}

void expect_everything(const DeviceWeights& uploaded, const ModelWeights& weights) {
  expect_vector(uploaded.final_norm, weights.final_norm);
  expect_raw(uploaded.embedding, weights.embedding);
  expect_linear(uploaded.head, {&weights.lm_head});
  for (size_t i = 0; i < weights.layers.size(); ++i) {
    SCOPED_TRACE("layer " + std::to_string(i));
    const LayerWeights& from = weights.layers[i];
    const LayerOnDevice& to = uploaded.layers[i];
    expect_vector(to.input_norm, from.input_norm);
    expect_vector(to.post_norm, from.post_norm);
    if (from.gdn) {
      const GdnWeights& w = *from.gdn;
      expect_vector(to.conv, w.conv);
      expect_vector(to.dt_bias, w.dt_bias);
      expect_vector(to.gdn_norm, w.norm);
      for (size_t head = 0; head < w.a_log.size(); ++head)
        EXPECT_EQ(to.decay_rate[head], std::exp(w.a_log[head])) << "of a vector that did not last";
      expect_linear(to.in, {&w.in_qkv, &w.in_z, &w.in_a, &w.in_b});
      expect_linear(to.out, {&w.out});
    } else {
      const AttentionWeights& w = *from.attention;
      expect_vector(to.q_norm, w.q_norm);
      expect_vector(to.k_norm, w.k_norm);
      expect_linear(to.in, {&w.q, &w.k, &w.v});
      expect_linear(to.out, {&w.out});
    }
    const MoeWeights& m = from.moe;
    expect_linear(to.router, {&m.router, &m.shared_expert_gate});
    expect_experts(to.experts, m.expert_gate_proj, m.expert_up_proj, m.expert_down_proj);
    expect_experts(to.shared, m.shared_gate_proj, m.shared_up_proj, m.shared_down_proj);
  }
}

// Buffers and areas that are used again many times: an area holds gate and up of 4 of 32 experts and some rows of a fifth.
constexpr UploadSizes kSmall{size_t{16} << 10, 4, size_t{90} << 10};

class CudaUpload : public testing::Test {
 protected:
  CudaUpload() {
    mallopt(M_PERTURB, 1);  // so that memory which nobody has touched is not zero by chance
    runtime() = {};
    stream_ = std::make_unique<Stream>();
    runtime().packs = stream_->get();
  }

  void expect_arrival(const RandomModel& model, const UploadSizes& sizes, int least_calls) {
    for (const Which eager : {Which::kNone, Which::kPacks, Which::kCopies}) {
      SCOPED_TRACE("eager: " + std::to_string(static_cast<int>(eager)));
      runtime().eager = eager;
      runtime().most_device_bytes = runtime().transfers = 0;
      double last = 0, before_last = 0, all = 0;
      int calls = 0, between = 0;
      const std::function<void(double, double)> on_upload = [&](double done, double total) {
        EXPECT_GE(done, last);
        EXPECT_LE(done, total);
        before_last = std::exchange(last, done);
        all = total;
        ++calls;
        between += done > 0 && done < total;
      };
      const DeviceWeights uploaded(model.shape(), model.weights(), stream_->get(), on_upload, sizes);
      EXPECT_GT(all, 0);
      EXPECT_EQ(last, all);
      EXPECT_EQ(before_last, all) << "what was sent adds up to all";
      EXPECT_GT(calls, least_calls) << "progress is told while it goes on";
      EXPECT_GT(between, least_calls / 2) << "and grows";
      EXPECT_LE(runtime().most_device_bytes, runtime().required_bytes);
      EXPECT_GE(runtime().most_device_bytes + sizes.area, runtime().required_bytes);  // one area may be enough
      expect_everything(uploaded, model.weights());
    }
    EXPECT_EQ(runtime().device_bytes, 0u);
    EXPECT_EQ(runtime().locked, nullptr);
    EXPECT_EQ(runtime().last_error, cudaSuccess) << "the next check of a launch finds it";
  }

  std::unique_ptr<Stream> stream_;
};

TEST_F(CudaUpload, EverythingArrivesWhole) {
  ModelShape shape = tiny_shape(4);
  shape.vocab = 200001;  // a matrix of many parts, whose last tile is not full
  expect_arrival(RandomModel(shape, 9), {}, 3);
}

TEST_F(CudaUpload, InSmallPieces) {
  ModelShape shape = tiny_shape(4);
  shape.vocab = 4003;
  expect_arrival(RandomModel(shape, 10), kSmall, 50);
}

TEST_F(CudaUpload, ExpertsThatFitNoArea) {
  ModelShape shape = tiny_shape(4);
  shape.expert_width = shape.shared_expert_width = 128;  // 36 KiB of gate and up
  expect_arrival(RandomModel(shape, 11), {size_t{16} << 10, 3, size_t{20} << 10}, 50);
}

TEST_F(CudaUpload, EightBits) { expect_arrival(RandomModel(tiny_shape(4), 12, 8), kSmall, 50); }

TEST_F(CudaUpload, NothingThatCanBePacked) {
  expect_arrival(RandomModel(tiny_shape(4), 13, 4, 32), kSmall, 50);
  // Nearly all of it lies side by side, so buffers travel in one piece; the required memory includes areas, that are more
  // than the few exceptions.
  EXPECT_LE(runtime().transfers, runtime().required_bytes / kSmall.buffer);
}

TEST_F(CudaUpload, OneBuffer) {
  expect_arrival(RandomModel(tiny_shape(4), 14), {size_t{64} << 10, 1, size_t{64} << 10}, 3);
}

TEST_F(CudaUpload, WhereMemoryCannotBeLocked) {
  runtime().locking = cudaErrorNotSupported;
  expect_arrival(RandomModel(tiny_shape(4), 18), kSmall, 50);
}

// What goes to the end of an allocation and what goes to the beginning of the next are in one buffer, but are two copies.
TEST_F(CudaUpload, AllocationsSideBySide) {
  const RandomModel model(tiny_shape(4), 19);
  const WeightMatrix& matrix = model.weights().lm_head;
  ASSERT_TRUE(can_pack(matrix));
  constexpr size_t kArena = size_t{8} << 20;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(256, kArena), &std::free);
  runtime().arena = {static_cast<std::byte*>(memory.get()), kArena};
  {
    PackedView view;
    view.tiles = (matrix.n + kTileRows - 1) / kTileRows;
    view.groups = matrix.k / kGroup;
    view.padded_groups = (view.groups + kChunkGroups - 1) / kChunkGroups * kChunkGroups;
    view.bits = matrix.bits;
    const auto tiles = static_cast<size_t>(view.tiles);
    const DeviceArray<uint4> codes(tiles * view.codes_per_tile(), "codes");
    const DeviceArray<uint2> scales(tiles * view.scales_per_tile(), "scales");
    view.codes = codes.data();
    view.scales = scales.data();
    const std::vector<std::byte> from(1024, std::byte{5});
    const DeviceBytes last(from.size(), "behind which the staging area will be");
    const std::function<void(double, double)> no_progress;
    Uploader uploader(stream_->get(), 0, no_progress, kSmall);
    uploader.copy(last.data(), from.data(), from.size());
    uploader.pack(view, 0, TileRows::kPlain, matrix, matrix);
    ASSERT_TRUE(runtime().device_memory.contains(last.data() + last.size()));
    uploader.finish();
    EXPECT_EQ(std::memcmp(last.data(), from.data(), from.size()), 0);
    expect_packed(view, 0, TileRows::kPlain, matrix, matrix);
  }
  EXPECT_EQ(runtime().device_bytes, 0u);
  runtime().arena = {};
}

TEST_F(CudaUpload, RandomContentsNeedNoStaging) {
  const ModelShape shape = tiny_shape(4);
  const ModelWeights weights = outline_weights(shape, 15);
  const DeviceWeights uploaded(shape, weights, stream_->get());
  stream_->synchronize();
  EXPECT_EQ(runtime().most_device_bytes, runtime().required_bytes);
  EXPECT_LT(runtime().required_bytes, uploaded.bytes() * 101 / 100);
  EXPECT_EQ(*reinterpret_cast<const uint32_t*>(uploaded.head.view.codes), 1u);
  expect_vector(uploaded.final_norm, weights.final_norm);
  for (size_t i = 0; i < weights.layers.size(); ++i) {  // between which there are matrices that nobody sends
    expect_vector(uploaded.layers[i].input_norm, weights.layers[i].input_norm);
    expect_vector(uploaded.layers[i].post_norm, weights.layers[i].post_norm);
    if (weights.layers[i].gdn) expect_vector(uploaded.layers[i].conv, weights.layers[i].gdn->conv);
  }
}

// Whatever throws in the middle: memory goes when no stream uses it (expect_idle).
TEST_F(CudaUpload, GivesUpInTheMiddle) {
  ModelShape shape = tiny_shape(4);
  shape.vocab = 4003;
  const RandomModel model(shape, 16);
  for (const int end : {1, 2, 7, 60, 150}) {
    int calls = 0;
    const std::function<void()> fail = [&] {
      if (++calls == end) throw std::runtime_error("enough");
    };
    const auto upload = [&](const std::function<void(double, double)>& on_upload) {
      const DeviceWeights uploaded(shape, model.weights(), stream_->get(), on_upload, kSmall);
    };
    runtime().at_copy = fail;
    EXPECT_THROW(upload({}), std::runtime_error);
    runtime().at_copy = {};
    calls = 0;
    EXPECT_THROW(upload([&](double, double) { fail(); }), std::runtime_error);
    calls = 0;
    if (end > 7) continue;
    runtime().at_pack = fail;
    EXPECT_THROW(upload({}), std::runtime_error);
    runtime().at_pack = {};
  }
  runtime().locking = cudaErrorMemoryAllocation;
  EXPECT_THROW(DeviceWeights(shape, model.weights(), stream_->get(), {}, kSmall), DeviceError);
  EXPECT_EQ(runtime().device_bytes, 0u);
}

TEST_F(CudaUpload, ErrorsOfEitherStreamAreTold) {
  const RandomModel model(tiny_shape(4), 17);
  for (const Which which : {Which::kPacks, Which::kCopies}) {
    runtime().faulty = which;
    EXPECT_THROW(DeviceWeights(model.shape(), model.weights(), stream_->get()), DeviceError);
  }
}

}  // namespace
}  // namespace calla::cuda
