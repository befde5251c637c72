#pragma once
// The model's weights as views into the mapped checkpoint: what each matrix is, and where its bytes lie.
// Built once by model/bind_weights.cc; the checkpoint must outlive every view. Backends read them in place (cpu), map
// them without a copy (metal) or upload them once (cuda). Nothing here expands a weight.
#include <cstdint>
#include <optional>
#include <vector>

#include "base/bf16.h"

namespace calla {

enum class WeightFormat : uint8_t {
  kAffine,  // unsigned codes of `bits` bits with a bf16 scale and bias per group: w = scale * code + bias
  kBf16,    // plain bf16
};

// A matrix [stack][n][k]: n outputs, k inputs, row-major; `stack` experts behind one another (1 for a plain matrix).
// y[n] = sum_k w[n][k] * x[k].
struct WeightMatrix {
  WeightFormat format = WeightFormat::kAffine;
  int stack = 1;
  int n = 0;
  int k = 0;
  int bits = 4;                     // kAffine: 4 or 8
  int group = 64;                   // kAffine: inputs per scale: 32, 64 or 128
  const uint32_t* codes = nullptr;  // kAffine: [stack][n][k * bits / 32], packed from the low bits up along k
  const bf16* scales = nullptr;     // kAffine: [stack][n][k / group]; may be negative
  const bf16* biases = nullptr;     // kAffine: [stack][n][k / group]
  const bf16* values = nullptr;     // kBf16: [stack][n][k]

  size_t words_per_row() const { return static_cast<size_t>(k) * bits / 32; }
  size_t groups_per_row() const { return static_cast<size_t>(k) / group; }
  // The matrix of one expert of a stack.
  WeightMatrix expert(int index) const {
    WeightMatrix m = *this;
    m.stack = 1;
    const auto row = static_cast<size_t>(index) * n;
    if (format == WeightFormat::kAffine) {
      m.codes += row * words_per_row();
      m.scales += row * groups_per_row();
      m.biases += row * groups_per_row();
    } else {
      m.values += row * k;
    }
    return m;
  }
  // Bytes that reading the whole matrix once moves.
  size_t bytes() const {
    const size_t rows = static_cast<size_t>(stack) * n;
    return format == WeightFormat::kAffine ? rows * (words_per_row() * 4 + groups_per_row() * 4) : rows * k * 2;
  }
};

using FloatVector = std::vector<float>;  // norms and other small vectors, widened to float when bound

struct GdnWeights {
  WeightMatrix in_qkv;  // [2 * key_width + value_width, hidden]: all q heads, all k heads, all v heads
  WeightMatrix in_z;    // [value_width, hidden]
  WeightMatrix in_a;    // [value_heads, hidden]
  WeightMatrix in_b;    // [value_heads, hidden]
  WeightMatrix out;     // [hidden, value_width]
  FloatVector conv;     // [channels, 4], last tap = current token
  FloatVector a_log;    // [value_heads]
  FloatVector dt_bias;  // [value_heads]
  FloatVector norm;     // [128], never shifted by one
};

struct AttentionWeights {
  WeightMatrix q;      // [q_heads * 2 * 256, hidden]: per head 256 query rows, then 256 output-gate rows
  WeightMatrix k;      // [kv_heads * 256, hidden]
  WeightMatrix v;      // [kv_heads * 256, hidden]
  WeightMatrix out;    // [hidden, q_heads * 256]
  FloatVector q_norm;  // [256]
  FloatVector k_norm;  // [256]
};

struct MoeWeights {
  WeightMatrix router;              // [experts, hidden]
  WeightMatrix expert_gate_proj;    // [experts][expert_width, hidden]
  WeightMatrix expert_up_proj;      // [experts][expert_width, hidden]
  WeightMatrix expert_down_proj;    // [experts][hidden, expert_width]
  WeightMatrix shared_gate_proj;    // [shared_width, hidden]
  WeightMatrix shared_up_proj;      // [shared_width, hidden]
  WeightMatrix shared_down_proj;    // [hidden, shared_width]
  WeightMatrix shared_expert_gate;  // [1, hidden]
};

struct LayerWeights {
  FloatVector input_norm;         // [hidden]; ready to multiply
  FloatVector post_norm;          // [hidden]; ready to multiply
  std::optional<GdnWeights> gdn;  // exactly one of the two
  std::optional<AttentionWeights> attention;
  MoeWeights moe;
};

struct ModelWeights {
  WeightMatrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  FloatVector final_norm;  // [hidden]; ready to multiply
  WeightMatrix lm_head;    // [vocab, hidden]
};

}  // namespace calla
