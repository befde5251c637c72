#pragma once
// Affine-quantised rows times activations in registers: the heart of every GEMV.
//
// A lane takes 64 bits of codes at a time (16 codes of 4 bits, 8 of 8 bits; 8 values of bf16), so that a simdgroup
// reads 256 consecutive bytes of a row. Codes are masked, never shifted: the activation that meets code i of a word is
// scaled by 2^-(bits * i) beforehand, and a masked code has few enough significant bits to be exact in fp32.
// Per group, sum (scale * code + bias) * x = scale * sum code * x + bias * sum x: the bias costs one sum a step.
// The idea of both is MLX's qmv_fast; here over 32-bit words and for any group of 32 or more.
#include "common.h"

// One matrix, or one expert of a stack.
struct Matrix {
  const device uint* codes;
  const device bfloat* scales;
  const device bfloat* biases;
  MatrixShape shape;
};

inline Matrix expert_of(Matrix m, int bits, int expert) {
  const uint row = uint(expert) * uint(m.shape.n);
  m.codes += row * (uint(m.shape.k) * uint(bits) / 32u);
  m.scales += row * (uint(m.shape.k) >> m.shape.group_shift);
  m.biases += row * (uint(m.shape.k) >> m.shape.group_shift);
  return m;
}

template <int kBits>
constexpr int lane_values() {
  return kBits == 4 ? 16 : 8;
}

// An activation row as it is stored.
struct PlainInput {
  const device bfloat* x;

  template <int kCount>
  void load(int k, thread float* v) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 t = load4(x + k + i);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i + j] = t[j];
    }
  }
};

// RMSNorm folded in: x * weight, and the sum of squares on the side. The factor 1 / rms is the same for the whole row,
// so it multiplies the finished dot product.
struct NormedInput {
  const device float* x;
  const device float* weight;
  float sum_squares;

  template <int kCount>
  void load(int k, thread float* v) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 t = load4(x + k + i);
      const float4 w = load4(weight + k + i);
      sum_squares += dot(t, t);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i + j] = t[j] * w[j];
    }
  }
};

// Scales the activations for masked codes; returns their sum.
template <int kBits>
float prescale(thread float* x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < lane_values<kBits>(); ++i) {
    sum += x[i];
    if (kBits == 4) x[i] *= 1.0f / float(1u << (4 * (i % 8)));
    if (kBits == 8) x[i] *= 1.0f / float(1u << (8 * (i % 4)));
  }
  return sum;
}

template <int kBits>
float code_dot(const device uint* codes, const thread float* x) {
  float sum = 0;
  if (kBits == 16) {
    const device bfloat* values = (const device bfloat*)codes;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * float(values[i]);
    return sum;
  }
  constexpr int kPerWord = kBits == 16 ? 1 : 32 / kBits;
  constexpr uint kMask = (1u << (kBits & 15)) - 1u;
  const uint2 words = *(const device uint2*)codes;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < kPerWord; ++i) {
      sum += x[j * kPerWord + i] * float(words[j] & (kMask << (kBits * i & 31)));
    }
  }
  return sum;
}

// sums[m * kRows + r] += this lane's share of row (row0 + r) of matrices[m] times the input. Rows beyond n repeat the
// last one; the caller does not store them. All matrices have the shape and format of the first.
template <int kBits, int kRows, int kMatrices, typename Input>
void dot_rows(const thread Matrix* matrices, int row0, thread Input& input, ushort lane, thread float* sums) {
  constexpr int kValues = lane_values<kBits>();
  const MatrixShape shape = matrices[0].shape;
  const uint words = uint(shape.k) * uint(kBits) / 32u;
  const uint groups = uint(shape.k) >> shape.group_shift;
  for (int k = int(lane) * kValues; k < shape.k; k += kLanes * kValues) {
    float x[kValues];
    input.template load<kValues>(k, x);
    const float sum = prescale<kBits>(x);
    const uint word = uint(k) * uint(kBits) / 32u;
    const uint group = uint(k) >> shape.group_shift;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint row = uint(min(row0 + r, shape.n - 1));
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const float d = code_dot<kBits>(matrices[m].codes + row * words + word, x);
        if (kBits == 16) {
          sums[m * kRows + r] += d;
        } else {
          const uint g = row * groups + group;
          sums[m * kRows + r] += float(matrices[m].scales[g]) * d + float(matrices[m].biases[g]) * sum;
        }
      }
    }
  }
}

// The same with the format as a function constant, so that only one branch is compiled in.
template <int kRows, int kMatrices, typename Input>
void dot_rows_of(int bits, const thread Matrix* matrices, int row0, thread Input& input, ushort lane,
                 thread float* sums) {
  if (bits == 4) {
    dot_rows<4, kRows, kMatrices>(matrices, row0, input, lane, sums);
  } else if (bits == 8) {
    dot_rows<8, kRows, kMatrices>(matrices, row0, input, lane, sums);
  } else {
    dot_rows<16, kRows, kMatrices>(matrices, row0, input, lane, sums);
  }
}

// Eight consecutive weights of a row, for the kernels that expand a tile: k must be a multiple of 8.
inline void dequantise8(Matrix m, int bits, int row, int k, thread float* w) {
  const uint r = uint(row);
  if (bits == 16) {
    const device bfloat* values = (const device bfloat*)m.codes + r * uint(m.shape.k) + uint(k);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = float(values[i]);
    return;
  }
  const device uint* codes = m.codes + r * (uint(m.shape.k) * uint(bits) / 32u) + uint(k) * uint(bits) / 32u;
  const uint g = r * (uint(m.shape.k) >> m.shape.group_shift) + (uint(k) >> m.shape.group_shift);
  const float scale = float(m.scales[g]);
  const float bias = float(m.biases[g]);
  if (bits == 4) {
    const uint word = codes[0];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = scale * float((word >> (4 * i)) & 15u) + bias;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = scale * float((codes[i / 4] >> (8 * (i % 4))) & 255u) + bias;
  }
}
