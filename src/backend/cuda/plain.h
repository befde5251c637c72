#pragma once
// Plain kernels: any weight format (bf16, 4 or 8 bits, groups of 32, 64 or 128), any number of rows, any GPU. Simple and
// slow; the packed kernels take over wherever they can.
#include "backend/cuda/launch.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

// residual = embedding rows of the step's tokens (or of the last picked tokens, [recurrent slot]).
void embed_rows(const Launch& launch, const RawView& embedding, const StepView& step, const TokenId* last_picked,
                float* residual);

// normed = RMSNorm(residual) * weight, fp16. With `heads`, row i is heads[i].row.
void norm_rows(const Launch& launch, const float* residual, const StepHead* heads, const float* weight, float eps,
               int rows, int width, __half* normed);

// out[row][n] = or += w x.
void linear_plain(const Launch& launch, const RawView& w, const __half* x, size_t x_stride, int rows, float* out,
                  size_t out_stride, bool add);

// The experts of every row, one pair at a time, from expert_ids and expert_weights.
void experts_up_plain(const Launch& launch, const Experts& experts, const Experts& shared, const Activations& a,
                      int rows, int hidden);
void experts_down_plain(const Launch& launch, const Experts& experts, const Experts& shared, const Activations& a,
                        int rows, int hidden);

// router_logits -> expert_ids, expert_weights, shared_gate.
void choose_rows(const Launch& launch, const Activations& a, int rows, int experts, int router_width,
                 int shared_column);

}  // namespace calla::cuda
