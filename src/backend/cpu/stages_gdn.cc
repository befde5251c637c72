// mix_gdn: one piece of work is a key head of a sequence with its value heads, from the convolution to the
// gated norm, so that everything between lies in the caches of one core. The state is read and written once.
#include <algorithm>
#include <cmath>

#include "backend/cpu/cpu_backend.h"

namespace calla::cpu {
namespace {

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The last three rows of (tail, x), for the next step's convolution: n channels from `channel` on.
void update_tail(const float* x, int rows, int n, size_t channels, int channel, float* tail) {
  constexpr int kTail = kConvWidth - 1;
  for (int j = 0; j < kTail; ++j) {
    const int from = rows - kTail + j;
    const float* source = from >= 0 ? x + from * channels : tail + (rows + j) * channels;
    std::copy_n(source + channel, n, tail + j * channels + channel);
  }
}

}  // namespace

void CpuBackend::mix_sequence(int layer, const RowRange& range, int key_head, int thread) {
  const GdnWeights& w = *weights_.layers[layer].gdn;
  const int rows = range.sequence->rows;
  const auto channels = static_cast<size_t>(shape_.gdn_conv_width());
  const int heads_per_key = shape_.gdn_value_heads / shape_.gdn_key_heads;
  const size_t room = static_cast<size_t>(options_.max_rows) * kGdnHeadDim;
  float* q = gdn_scratch_.data() + thread * (4 * room + 2 * static_cast<size_t>(options_.max_rows));
  float *k = q + room, *v = k + room, *o = v + room, *decay = o + room, *beta = decay + options_.max_rows;
  const float* x = row(Slot::kGdnQkv, range.first);
  float* tail = pool_.conv_tail(layer, range.sequence->recurrent_slot);
  float* states = pool_.gdn_state(layer, range.sequence->recurrent_slot);

  const auto convolve = [&](int channel, float* out) {
    kernels_.gdn.conv_silu(x + channel, channels, tail + channel, channels, conv_taps_[layer].data() + channel,
                           channels, rows, kGdnHeadDim, out);
    update_tail(x, rows, kGdnHeadDim, channels, channel, tail);
  };
  convolve(key_head * kGdnHeadDim, q);
  convolve(shape_.gdn_key_width() + key_head * kGdnHeadDim, k);
  kernels_.gdn.l2norm(q, rows, 1 / std::sqrt(float{kGdnHeadDim}));
  kernels_.gdn.l2norm(k, rows, 1);
  for (int head = key_head * heads_per_key; head < (key_head + 1) * heads_per_key; ++head) {
    convolve(2 * shape_.gdn_key_width() + head * kGdnHeadDim, v);
    for (int t = 0; t < rows; ++t) {
      const float a = row(Slot::kGdnA, range.first + t)[head], b = row(Slot::kGdnB, range.first + t)[head];
      decay[t] = std::exp(-std::exp(w.a_log[head]) * softplus(a + w.dt_bias[head]));
      beta[t] = 1 / (1 + std::exp(-b));
    }
    kernels_.gdn.scan(q, k, v, decay, beta, rows, states + static_cast<size_t>(head) * kGdnStateFloats, o);
    for (int t = 0; t < rows; ++t)
      kernels_.gdn.gated_norm(o + t * kGdnHeadDim, w.norm.data(),
                              row(Slot::kGdnZ, range.first + t) + head * kGdnHeadDim, shape_.rms_eps,
                              row(Slot::kMixed, range.first + t) + head * kGdnHeadDim);
  }
}

void CpuBackend::mix_gdn(int layer) {
  Profile::Scope scope(profile_, Stage::kMixGdn);
  const auto key_heads = static_cast<size_t>(shape_.gdn_key_heads);
  threads_.for_each(ranges_.size() * key_heads, [&](size_t piece, size_t, int thread) {
    mix_sequence(layer, ranges_[piece / key_heads], static_cast<int>(piece % key_heads), thread);
  });
  scope.add_bytes(ranges_.size() * 2 * shape_.gdn_value_heads * kGdnStateFloats * sizeof(float));
}

}  // namespace calla::cpu
