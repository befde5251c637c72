#include <algorithm>

#include "backend/cuda/weights.h"

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>

#include "backend/cuda/pack.h"
#include "backend/weights_outline.h"
#include "base/background_copies.h"
#include "base/thread_pool.h"

namespace calla::cuda {

bool can_pack(const WeightMatrix& matrix) {
  return matrix.format == WeightFormat::kAffine && (matrix.bits == 4 || matrix.bits == 8) && matrix.group == kGroup &&
         matrix.k % kGroup == 0;
}

namespace {

size_t rows_of(const WeightMatrix& m) { return static_cast<size_t>(m.stack) * static_cast<size_t>(m.n); }
size_t code_bytes(const WeightMatrix& m) { return rows_of(m) * m.words_per_row() * 4; }
size_t scale_bytes(const WeightMatrix& m) { return rows_of(m) * m.groups_per_row() * 2; }
size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }
bool is_synthetic(const WeightMatrix& m) { return m.codes == nullptr && m.values == nullptr; }

}  // namespace

// Copies through page-locked buffers: half of them are filled from the mapping by several threads (which also takes the page
// faults) while the other half travels. So what is to be done on the device waits in a queue until its data are on their
// way: send() does the oldest, and the stream keeps the order.
class WeightUploader {
 public:
  WeightUploader(DeviceWeights& weights, cudaStream_t stream, size_t total,
                 const std::function<void(double, double)>& on_upload)
      : weights_(weights), stream_(stream), total_(total), on_upload_(on_upload) {}

  const float* vector(const FloatVector& values) {
    auto* to = static_cast<float*>(allocate(values.size() * sizeof(float)));
    copy(to, values.data(), values.size() * sizeof(float));
    return to;
  }

  Linear linear(std::initializer_list<const WeightMatrix*> parts) {
    Linear out;
    out.k = (*parts.begin())->k;
    out.packed = true;
    for (const WeightMatrix* part : parts) {
      check(part->k == out.k && part->stack == 1, "parts of a projection read the same input");
      out.columns.push_back(out.width);
      out.rows.push_back(part->n);
      out.width += (part->n + kTileRows - 1) / kTileRows * kTileRows;
      out.bytes += part->bytes();
      out.packed &= can_pack(*part) && part->bits == (*parts.begin())->bits;
    }
    if (!out.packed) {
      weights_.unpacked_ += static_cast<int>(parts.size());
      for (const WeightMatrix* part : parts) out.raw.push_back(raw(*part));
      return out;
    }
    out.view = allocate_packed(1, out.width / kTileRows, out.k / kGroup, (*parts.begin())->bits);
    int i = 0;
    for (const WeightMatrix* part : parts) {
      if (is_synthetic(*part)) {
        fill_random(out.view, 1, ++seed_, stream_);
        break;
      }
      const RawView source = stage(*part, 0);
      pack_staged(out.view, 1, out.columns[i++] / kTileRows, TileRows::kPlain, source, source);
    }
    return out;
  }

  static bool can_pack_experts(const WeightMatrix& gate, const WeightMatrix& up, const WeightMatrix& down) {
    for (const WeightMatrix* m : {&gate, &up, &down})
      if (!can_pack(*m) || m->bits != 4) return false;
    return gate.n % 8 == 0 && down.n % kTileRows == 0;
  }

  Experts experts(const WeightMatrix& gate, const WeightMatrix& up, const WeightMatrix& down, bool pack) {
    Experts out;
    out.count = gate.stack;
    out.width = gate.n;
    out.bytes = (gate.bytes() + up.bytes() + down.bytes()) / static_cast<size_t>(gate.stack);
    out.packed = pack;
    if (!out.packed) {
      weights_.unpacked_ += 3;
      out.raw_gate = raw(gate);
      out.raw_up = raw(up);
      out.raw_down = raw(down);
      return out;
    }
    out.up = allocate_packed(out.count, gate.n / 8, gate.k / kGroup, 4);
    out.down = allocate_packed(out.count, down.n / kTileRows, down.k / kGroup, 4);
    if (is_synthetic(gate)) {
      fill_random(out.up, out.count, ++seed_, stream_);
      fill_random(out.down, out.count, ++seed_, stream_);
      return out;
    }
    const RawView gate_source = stage(gate, 0);
    const RawView up_source = stage(up, align(code_bytes(gate)) + 2 * align(scale_bytes(gate)));
    pack_staged(out.up, out.count, 0, TileRows::kSwiglu, gate_source, up_source);
    const RawView down_source = stage(down, 0);
    pack_staged(out.down, out.count, 0, TileRows::kPlain, down_source, down_source);
    return out;
  }

  // A matrix as it is.
  RawView raw(const WeightMatrix& m) {
    RawView v = shape_of(m);
    if (m.format == WeightFormat::kBf16) {
      v.values = static_cast<uint16_t*>(copy_new(m.values, rows_of(m) * static_cast<size_t>(m.k) * 2));
      return v;
    }
    if (is_synthetic(m)) {
      v.codes = static_cast<uint32_t*>(allocate(code_bytes(m)));
      v.scales = static_cast<uint16_t*>(allocate(scale_bytes(m)));
      v.biases = static_cast<uint16_t*>(allocate(scale_bytes(m)));
      fill_random(v, m.stack, ++seed_, stream_);
      return v;
    }
    v.codes = static_cast<uint32_t*>(copy_new(m.codes, code_bytes(m)));
    v.scales = static_cast<uint16_t*>(copy_new(m.scales, scale_bytes(m)));
    v.biases = static_cast<uint16_t*>(copy_new(m.biases, scale_bytes(m)));
    return v;
  }

  // Device memory for the raw form of the largest pair of matrices.
  void reserve_staging(size_t bytes) { staging_ = DeviceBytes(bytes, "staging memory for the upload"); }
  static size_t staging_bytes(const WeightMatrix& m) { return align(code_bytes(m)) + 2 * align(scale_bytes(m)); }

  void finish() {
    while (!queue_.empty()) send();
    cuda_check(cudaStreamSynchronize(stream_), "upload of the weights");
    if (on_upload_) on_upload_(static_cast<double>(total_), static_cast<double>(total_));
  }

 private:
  static constexpr size_t kBuffers = 8, kPart = size_t{8} << 20;  // bytes of a buffer
  static constexpr size_t kSmall = size_t{1} << 20;               // is copied at once, so it need not last
  static constexpr int kMostThreads = 12;                         // more brought no more

  static RawView shape_of(const WeightMatrix& m) {
    RawView v;
    v.n = m.n;
    v.k = m.k;
    v.bits = m.bits;
    v.group = m.group;
    return v;
  }

  void* allocate(size_t bytes) {
    weights_.owned_.emplace_back(bytes, "memory for the weights");
    weights_.bytes_ += bytes;
    return weights_.owned_.back().data();
  }

  void* copy_new(const void* from, size_t bytes) {
    void* to = allocate(bytes);
    copy(to, from, bytes);
    return to;
  }

  PackedView allocate_packed(int stack, int tiles, int groups, int bits) {
    PackedView v;
    v.tiles = tiles;
    v.groups = groups;
    v.padded_groups = (groups + kChunkGroups - 1) / kChunkGroups * kChunkGroups;
    v.bits = bits;
    const size_t all = static_cast<size_t>(stack) * static_cast<size_t>(tiles);
    v.codes = static_cast<uint4*>(allocate(all * v.codes_per_tile() * sizeof(uint4)));
    v.scales = static_cast<uint2*>(allocate(all * v.scales_per_tile() * sizeof(uint2)));
    return v;
  }

  // Copies a matrix to the staging memory. The stream's order protects the previous contents.
  RawView stage(const WeightMatrix& m, size_t offset) {
    check(offset + staging_bytes(m) <= staging_.size(), "staging memory holds the largest matrices");
    std::byte* at = staging_.data() + offset;
    RawView v = shape_of(m);
    v.codes = reinterpret_cast<uint32_t*>(at);
    v.scales = reinterpret_cast<uint16_t*>(at + align(code_bytes(m)));
    v.biases = reinterpret_cast<uint16_t*>(at + align(code_bytes(m)) + align(scale_bytes(m)));
    copy(at, m.codes, code_bytes(m));
    copy(const_cast<uint16_t*>(v.scales), m.scales, scale_bytes(m));
    copy(const_cast<uint16_t*>(v.biases), m.biases, scale_bytes(m));
    return v;
  }

  void pack_staged(const PackedView& to, int stack, int first_tile, TileRows rows, const RawView& first,
                   const RawView& second) {
    queue_.push_back([=, this] { pack_tiles(to, stack, first_tile, rows, first, second, stream_); });
  }

  void copy(void* to, const void* from, size_t bytes) {
    for (size_t done = 0; done < bytes; done += kPart) {
      while (filling_ >= kBuffers / 2) send();
      const size_t n = std::min(kPart, bytes - done);
      Buffer& buffer = buffers_[next_++ % kBuffers];
      buffer.free.synchronize();  // it was sent some parts ago
      const auto* source = static_cast<const std::byte*>(from) + done;
      uint64_t fill = 0;
      if (n < kSmall) {
        std::memcpy(buffer.memory.data(), source, n);
      } else {
        fill = fills_.start(buffer.memory.data(), source, n);
      }
      ++filling_;
      queue_.push_back([=, this, &buffer, to = static_cast<std::byte*>(to) + done] {
        if (n >= kSmall) fills_.wait(fill);
        cuda_check(cudaMemcpyAsync(to, buffer.memory.data(), n, cudaMemcpyHostToDevice, stream_),
                   "upload of the weights");
        buffer.free.record(stream_);
        --filling_;
        sent_ += n;
        if (on_upload_ && n == kPart) on_upload_(static_cast<double>(sent_), static_cast<double>(total_));
      });
    }
  }
  void send() {
    queue_.front()();
    queue_.pop_front();
  }

  struct Buffer {
    PinnedArray<std::byte> memory{kPart, "page-locked upload buffer"};
    Event free;
  };

  DeviceWeights& weights_;
  cudaStream_t stream_;
  const size_t total_;
  const std::function<void(double, double)>& on_upload_;
  size_t sent_ = 0;
  std::array<Buffer, kBuffers> buffers_;
  size_t next_ = 0;     // part, counted from 0
  size_t filling_ = 0;  // parts that are not sent yet
  // Behind the buffers: its threads end before those go.
  BackgroundCopies fills_{std::min(kMostThreads, available_cores())};
  std::deque<std::function<void()>> queue_;
  DeviceBytes staging_;
  uint64_t seed_ = 0;
};

DeviceWeights::DeviceWeights(const ModelShape& shape, const ModelWeights& weights, cudaStream_t stream,
                             const std::function<void(double done, double total)>& on_upload) {
  const auto start = std::chrono::steady_clock::now();
  size_t total = 0, made = 0;
  for_each_matrix(weights, [&](const WeightMatrix& m) { (is_synthetic(m) ? made : total) += m.bytes(); });
  WeightUploader upload(*this, stream, total, on_upload);
  size_t staging = WeightUploader::staging_bytes(weights.lm_head);
  for (const LayerWeights& layer : weights.layers) {
    const MoeWeights& m = layer.moe;
    staging = std::max(staging, WeightUploader::staging_bytes(m.expert_gate_proj) * 2);
    staging = std::max(staging, WeightUploader::staging_bytes(m.shared_gate_proj) * 2);
    for (const WeightMatrix* w : {&m.expert_down_proj, &m.shared_down_proj, &m.router})
      staging = std::max(staging, WeightUploader::staging_bytes(*w));
    if (layer.gdn)
      for (const WeightMatrix* w : {&layer.gdn->in_qkv, &layer.gdn->out})
        staging = std::max(staging, WeightUploader::staging_bytes(*w));
    if (layer.attention)
      for (const WeightMatrix* w : {&layer.attention->q, &layer.attention->out})
        staging = std::max(staging, WeightUploader::staging_bytes(*w));
  }
  if (is_synthetic(weights.lm_head)) staging = 0;
  require_free_memory(total + made + staging, "the weights and what their upload needs");
  if (staging > 0) upload.reserve_staging(staging);

  embedding = upload.raw(weights.embedding);
  head = upload.linear({&weights.lm_head});
  final_norm = upload.vector(weights.final_norm);
  for (const LayerWeights& layer : weights.layers) {
    LayerOnDevice& to = layers.emplace_back();
    to.input_norm = upload.vector(layer.input_norm);
    to.post_norm = upload.vector(layer.post_norm);
    if (layer.gdn) {
      const GdnWeights& w = *layer.gdn;
      to.in = upload.linear({&w.in_qkv, &w.in_z, &w.in_a, &w.in_b});
      to.out = upload.linear({&w.out});
      FloatVector rate = w.a_log;
      for (float& v : rate) v = std::exp(v);
      to.conv = upload.vector(w.conv);
      to.decay_rate = upload.vector(rate);
      to.dt_bias = upload.vector(w.dt_bias);
      to.gdn_norm = upload.vector(w.norm);
    } else {
      check(layer.attention.has_value(), "a layer is GDN or attention");
      const AttentionWeights& w = *layer.attention;
      to.in = upload.linear({&w.q, &w.k, &w.v});
      to.out = upload.linear({&w.out});
      to.q_norm = upload.vector(w.q_norm);
      to.k_norm = upload.vector(w.k_norm);
    }
    const MoeWeights& m = layer.moe;
    to.router = upload.linear({&m.router, &m.shared_expert_gate});
    const bool pack = WeightUploader::can_pack_experts(m.expert_gate_proj, m.expert_up_proj, m.expert_down_proj) &&
                      WeightUploader::can_pack_experts(m.shared_gate_proj, m.shared_up_proj, m.shared_down_proj);
    to.experts = upload.experts(m.expert_gate_proj, m.expert_up_proj, m.expert_down_proj, pack);
    to.shared = upload.experts(m.shared_gate_proj, m.shared_up_proj, m.shared_down_proj, pack);
  }
  check(static_cast<int>(layers.size()) == shape.layers(), "weights for every layer");
  upload.finish();
  upload_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace calla::cuda
