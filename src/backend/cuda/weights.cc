#include "backend/cuda/weights.h"

#include <chrono>
#include <cmath>

#include "backend/cuda/pack.h"
#include "backend/cuda/uploader.h"
#include "backend/weights_outline.h"

namespace calla::cuda {

bool can_pack(const WeightMatrix& matrix) {
  return matrix.format == WeightFormat::kAffine && (matrix.bits == 4 || matrix.bits == 8) && matrix.group == kGroup &&
         matrix.k % kGroup == 0;
}

namespace {

size_t rows_of(const WeightMatrix& m) { return static_cast<size_t>(m.stack) * static_cast<size_t>(m.n); }
bool is_synthetic(const WeightMatrix& m) { return m.codes == nullptr && m.values == nullptr; }

}  // namespace

// Gives every matrix its place in one block of device memory and has it brought there. Without an uploader it only adds up
// how large the block must be.
class WeightPlacer {
 public:
  WeightPlacer(DeviceWeights& weights, Uploader* uploader, cudaStream_t stream)
      : weights_(weights), uploader_(uploader), stream_(stream) {}

  size_t used() const { return used_; }  // bytes of the block
  bool stages() const { return stages_; }

  const float* vector(const FloatVector& values) {
    auto* to = static_cast<float*>(allocate(values.size() * sizeof(float)));
    if (uploader_ != nullptr) uploader_->copy_now(to, values.data(), values.size() * sizeof(float));
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
        make_random(out.view, 1);
        break;
      }
      pack(out.view, out.columns[i++] / kTileRows, TileRows::kPlain, *part, *part);
    }
    return out;
  }

  static bool can_pack_experts(const WeightMatrix& gate, const WeightMatrix& up, const WeightMatrix& down) {
    for (const WeightMatrix* m : {&gate, &up, &down})
      if (!can_pack(*m) || m->bits != 4) return false;
    return gate.n % 8 == 0 && down.n % kTileRows == 0;
  }

  Experts experts(const WeightMatrix& gate, const WeightMatrix& up, const WeightMatrix& down, bool pack_them) {
    Experts out;
    out.count = gate.stack;
    out.width = gate.n;
    out.bytes = (gate.bytes() + up.bytes() + down.bytes()) / static_cast<size_t>(gate.stack);
    out.packed = pack_them;
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
      make_random(out.up, out.count);
      make_random(out.down, out.count);
      return out;
    }
    pack(out.up, 0, TileRows::kSwiglu, gate, up);
    pack(out.down, 0, TileRows::kPlain, down, down);
    return out;
  }

  // A matrix as it is.
  RawView raw(const WeightMatrix& m) {
    RawView v;
    v.n = m.n;
    v.k = m.k;
    v.bits = m.bits;
    v.group = m.group;
    if (m.format == WeightFormat::kBf16) {
      v.values = static_cast<uint16_t*>(copy(m.values, rows_of(m) * static_cast<size_t>(m.k) * 2));
      return v;
    }
    v.codes = static_cast<uint32_t*>(copy(m.codes, rows_of(m) * m.words_per_row() * 4));
    v.scales = static_cast<uint16_t*>(copy(m.scales, rows_of(m) * m.groups_per_row() * 2));
    v.biases = static_cast<uint16_t*>(copy(m.biases, rows_of(m) * m.groups_per_row() * 2));
    if (is_synthetic(m)) make_random(v, m.stack);
    return v;
  }

 private:
  void* allocate(size_t bytes) {
    const size_t at = used_;
    used_ += align(bytes);
    weights_.bytes_ += bytes;
    if (uploader_ == nullptr) return nullptr;
    check(used_ <= weights_.memory_.size(), "both walks need the same memory");
    return weights_.memory_.data() + at;
  }

  void* copy(const void* from, size_t bytes) {
    void* to = allocate(bytes);
    if (uploader_ != nullptr && from != nullptr) uploader_->copy(to, from, bytes);
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

  void pack(const PackedView& to, int first_tile, TileRows kind, const WeightMatrix& source, const WeightMatrix& up) {
    stages_ = true;
    if (uploader_ != nullptr) uploader_->pack(to, first_tile, kind, source, up);
  }

  template <class View>
  void make_random(const View& view, int stack) {
    if (uploader_ != nullptr) fill_random(view, stack, ++seed_, stream_);
  }

  DeviceWeights& weights_;
  Uploader* uploader_;
  cudaStream_t stream_;
  size_t used_ = 0;
  bool stages_ = false;  // something is packed
  uint64_t seed_ = 0;
};

DeviceWeights::DeviceWeights(const ModelShape& shape, const ModelWeights& weights, cudaStream_t stream,
                             const std::function<void(double done, double total)>& on_upload,
                             const UploadSizes& sizes) {
  const auto start = std::chrono::steady_clock::now();
  DeviceWeights measured;
  WeightPlacer measure(measured, nullptr, stream);
  measured.place(weights, measure);
  const size_t staging = measure.stages() ? Uploader::staging_bytes(sizes) : 0;
  require_free_memory(measure.used() + staging, "the weights and what their upload needs");

  size_t total = 0;
  for_each_matrix(weights, [&](const WeightMatrix& m) { total += is_synthetic(m) ? 0 : m.bytes(); });
  {
    Uploader uploader(stream, total, on_upload, sizes);  // whose threads touch its memory meanwhile
    memory_ = DeviceBytes(measure.used(), "memory for the weights");
    WeightPlacer placer(*this, &uploader, stream);
    place(weights, placer);
    uploader.finish();
  }
  check(static_cast<int>(layers.size()) == shape.layers(), "weights for every layer");
  upload_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void DeviceWeights::place(const ModelWeights& weights, WeightPlacer& placer) {
  embedding = placer.raw(weights.embedding);
  head = placer.linear({&weights.lm_head});
  final_norm = placer.vector(weights.final_norm);
  for (const LayerWeights& layer : weights.layers) {
    LayerOnDevice& to = layers.emplace_back();
    to.input_norm = placer.vector(layer.input_norm);
    to.post_norm = placer.vector(layer.post_norm);
    if (layer.gdn) {
      const GdnWeights& w = *layer.gdn;
      to.in = placer.linear({&w.in_qkv, &w.in_z, &w.in_a, &w.in_b});
      to.out = placer.linear({&w.out});
      FloatVector rate = w.a_log;
      for (float& v : rate) v = std::exp(v);
      to.conv = placer.vector(w.conv);
      to.decay_rate = placer.vector(rate);
      to.dt_bias = placer.vector(w.dt_bias);
      to.gdn_norm = placer.vector(w.norm);
    } else {
      check(layer.attention.has_value(), "a layer is GDN or attention");
      const AttentionWeights& w = *layer.attention;
      to.in = placer.linear({&w.q, &w.k, &w.v});
      to.out = placer.linear({&w.out});
      to.q_norm = placer.vector(w.q_norm);
      to.k_norm = placer.vector(w.k_norm);
    }
    const MoeWeights& m = layer.moe;
    to.router = placer.linear({&m.router, &m.shared_expert_gate});
    const bool pack = WeightPlacer::can_pack_experts(m.expert_gate_proj, m.expert_up_proj, m.expert_down_proj) &&
                      WeightPlacer::can_pack_experts(m.shared_gate_proj, m.shared_up_proj, m.shared_down_proj);
    to.experts = placer.experts(m.expert_gate_proj, m.expert_up_proj, m.expert_down_proj, pack);
    to.shared = placer.experts(m.shared_gate_proj, m.shared_up_proj, m.shared_down_proj, pack);
  }
}

}  // namespace calla::cuda
