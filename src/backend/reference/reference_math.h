#pragma once
// The arithmetic of docs/model.md, one function a formula, in plain loops. Sums run in double so that the reference
// has no rounding of its own to speak of; inputs and outputs are float.
#include <span>
#include <vector>

#include "backend/weights.h"

namespace calla::reference {

// Row n of a plain matrix (stack == 1), de-quantised into `out` [k].
void weight_row(const WeightMatrix& matrix, int n, std::span<float> out);

// y[m][n] = sum_k w[n][k] x[m][k] for `rows` rows. x [rows][k], y [rows][n].
void matmul(const WeightMatrix& matrix, std::span<const float> x, std::span<float> y, int rows);

// x / sqrt(mean(x^2) + eps) * weight.
void rmsnorm(std::span<const float> x, std::span<const float> weight, float eps, std::span<float> out);

// x / sqrt(sum(x^2) + 1e-6) * scale.
void l2norm(std::span<float> x, float scale);

float sigmoid(float x);
float silu(float x);
float softplus(float x);

// One token of one value head. state [128 key][128 value] is updated:
// S <- decay S; d = beta (v - S^T k); S <- S + k d^T; out = S^T q.
void gated_delta_step(std::span<float> state, std::span<const float> q, std::span<const float> k,
                      std::span<const float> v, float decay, float beta, std::span<float> out);

// Rotates pairs (i, i + rotary_dim / 2) of the first rotary_dim elements by position * theta^(-2i / rotary_dim).
void rope(std::span<float> x, int position, int rotary_dim, float theta);

// Softmax over `x` in place.
void softmax(std::span<float> x);

// The ids of the `count` largest values, largest first, ties to the lowest id.
std::vector<int> top_k(std::span<const float> values, int count);

}  // namespace calla::reference
