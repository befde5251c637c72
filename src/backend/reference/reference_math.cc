#include "backend/reference/reference_math.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "model/shape.h"

namespace calla::reference {

void weight_row(const WeightMatrix& matrix, int n, std::span<float> out) {
  const auto k_size = static_cast<size_t>(matrix.k);
  if (matrix.format == WeightFormat::kBf16) {
    for (size_t k = 0; k < k_size; ++k) out[k] = to_float(matrix.values[n * k_size + k]);
    return;
  }
  const uint32_t* codes = matrix.codes + n * matrix.words_per_row();
  const bf16* scales = matrix.scales + n * matrix.groups_per_row();
  const bf16* biases = matrix.biases + n * matrix.groups_per_row();
  const size_t codes_per_word = 32 / matrix.bits;
  const uint32_t mask = (1u << matrix.bits) - 1;
  for (size_t k = 0; k < k_size; ++k) {
    const uint32_t code = (codes[k / codes_per_word] >> (k % codes_per_word * matrix.bits)) & mask;
    const size_t group = k / matrix.group;
    out[k] = to_float(scales[group]) * static_cast<float>(code) + to_float(biases[group]);
  }
}

void matmul(const WeightMatrix& matrix, std::span<const float> x, std::span<float> y, int rows) {
  std::vector<float> weights(matrix.k);
  for (int n = 0; n < matrix.n; ++n) {
    weight_row(matrix, n, weights);
    for (int m = 0; m < rows; ++m) {
      const float* row = x.data() + static_cast<size_t>(m) * matrix.k;
      double sum = 0;
      for (int k = 0; k < matrix.k; ++k) sum += static_cast<double>(weights[k]) * row[k];
      y[static_cast<size_t>(m) * matrix.n + n] = static_cast<float>(sum);
    }
  }
}

void rmsnorm(std::span<const float> x, std::span<const float> weight, float eps, std::span<float> out) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  const double scale = 1 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
  for (size_t i = 0; i < x.size(); ++i) out[i] = static_cast<float>(x[i] * scale * weight[i]);
}

void l2norm(std::span<float> x, float scale) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  const double factor = scale / std::sqrt(sum + 1e-6);
  for (float& v : x) v = static_cast<float>(v * factor);
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float silu(float x) { return x * sigmoid(x); }

float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

void gated_delta_step(std::span<float> state, std::span<const float> q, std::span<const float> k,
                      std::span<const float> v, float decay, float beta, std::span<float> out) {
  constexpr int kDim = kGdnHeadDim;
  for (int j = 0; j < kDim; ++j) {
    double memory = 0;
    for (int i = 0; i < kDim; ++i) {
      float& s = state[i * kDim + j];
      s *= decay;
      memory += static_cast<double>(s) * k[i];
    }
    const float delta = beta * (v[j] - static_cast<float>(memory));
    double sum = 0;
    for (int i = 0; i < kDim; ++i) {
      float& s = state[i * kDim + j];
      s += k[i] * delta;
      sum += static_cast<double>(s) * q[i];
    }
    out[j] = static_cast<float>(sum);
  }
}

void rope(std::span<float> x, int position, int rotary_dim, float theta) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = position * std::pow(static_cast<double>(theta), -2.0 * i / rotary_dim);
    const double c = std::cos(angle), s = std::sin(angle);
    const double a = x[i], b = x[i + half];
    x[i] = static_cast<float>(a * c - b * s);
    x[i + half] = static_cast<float>(b * c + a * s);
  }
}

void softmax(std::span<float> x) {
  const float max = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (float& v : x) sum += v = std::exp(v - max);
  for (float& v : x) v = static_cast<float>(v / sum);
}

std::vector<int> top_k(std::span<const float> values, int count) {
  std::vector<int> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(),
                    [&](int a, int b) { return values[a] != values[b] ? values[a] > values[b] : a < b; });
  ids.resize(count);
  return ids;
}

}  // namespace calla::reference
