// embed_rows: a block a row. linear_plain, experts_*_plain: a warp an output, four rows (one pair) at a time; moves the
// weights once per four rows. norm_rows: a block a row. choose_rows: a warp a row.
#include "backend/cuda/gemv.cuh"
#include "backend/cuda/plain.h"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRowsAtOnce = 4;

// Weights [n][8 u, 8 u + 8).
__device__ __forceinline__ void weights8(const RawView& w, size_t n, int u, float (&v)[8]) {
  if (w.values != nullptr) {
    const uint4 raw = *reinterpret_cast<const uint4*>(w.values + n * w.k + u * 8);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = low_bf16(words[i]), v[2 * i + 1] = high_bf16(words[i]);
    return;
  }
  const size_t group = n * (w.k / w.group) + u * 8 / w.group;
  const float scale = __uint_as_float(static_cast<uint32_t>(w.scales[group]) << 16);
  const float bias = __uint_as_float(static_cast<uint32_t>(w.biases[group]) << 16);
  if (w.bits == 4) {
    const uint32_t word = w.codes[n * (w.k / 8) + u];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fmaf(scale, static_cast<float>((word >> (4 * i)) & 15), bias);
  } else {
    const uint32_t* words = w.codes + n * (w.k / 4) + 2 * u;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = fmaf(scale, static_cast<float>((words[i / 4] >> (8 * (i % 4))) & 255), bias);
  }
}

__device__ __forceinline__ float dot8(const float (&w)[8], const __half* x) {
  float v[8], sum = 0;
  load_row8(x, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(w[i], v[i], sum);
  return sum;
}

// w[n] . x over a warp.
__device__ float row_dot(const RawView& w, int n, const __half* x) {
  float sum = 0;
  for (int u = static_cast<int>(threadIdx.x % 32); u * 8 < w.k; u += 32) {
    float v[8];
    weights8(w, static_cast<size_t>(n), u, v);
    sum += dot8(v, x + u * 8);
  }
  return sum_lanes(sum);
}

__global__ void embed_kernel(RawView w, StepView step, const TokenId* last_picked, float* residual) {
  grid_dependency_wait();
  launch_dependents();
  const int row = static_cast<int>(blockIdx.x);
  TokenId token = step.tokens[row];
  if (token < 0) token = last_picked[step.sequences[find_sequence(step, row)].slot];
  for (int u = static_cast<int>(threadIdx.x); u * 8 < w.k; u += kThreads) {
    float v[8];
    weights8(w, static_cast<size_t>(token), u, v);
    auto* to = reinterpret_cast<float4*>(residual + static_cast<size_t>(row) * w.k + u * 8);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

__global__ void norm_kernel(const float* residual, const StepHead* heads, const float* weight, float eps, int width,
                            __half* normed) {
  launch_dependents();  // the projection behind has weights to load first
  grid_dependency_wait();
  __shared__ float scratch[kWarps];
  const size_t from = heads != nullptr ? heads[blockIdx.x].row : static_cast<int>(blockIdx.x);
  const float* x = residual + from * width;
  float sum = 0;
  for (int u = static_cast<int>(threadIdx.x); u * 8 < width; u += kThreads) {
    float v[8];
    load_row8(x + u * 8, v);
    sum += sum_of_squares(v);
  }
  const float scale = rsqrtf(sum_block<kWarps>(sum, scratch) / static_cast<float>(width) + eps);
  for (int u = static_cast<int>(threadIdx.x); u * 8 < width; u += kThreads) {
    float v[8];
    load_row8(x + u * 8, v);
    scale_by(v, scale, weight + u * 8);
    *reinterpret_cast<uint4*>(normed + blockIdx.x * static_cast<size_t>(width) + u * 8) =
        make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]), pack_half2(v[6], v[7]));
  }
}

__global__ void linear_kernel(RawView w, const __half* x, size_t x_stride, int rows, float* out, size_t out_stride,
                              bool add) {
  const int n = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(blockIdx.y) * kRowsAtOnce;
  if (n >= w.n) return;
  float sum[kRowsAtOnce] = {};
  for (int u = lane; u * 8 < w.k; u += 32) {
    float v[8];
    weights8(w, static_cast<size_t>(n), u, v);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (first + i < rows) sum[i] += dot8(v, x + static_cast<size_t>(first + i) * x_stride + u * 8);
  }
#pragma unroll
  for (int i = 0; i < kRowsAtOnce; ++i) {
    const float total = sum_lanes(sum[i]);
    if (lane == 0 && first + i < rows) {
      float* y = out + static_cast<size_t>(first + i) * out_stride + n;
      *y = add ? *y + total : total;
    }
  }
}

struct ExpertPair {
  RawView gate, up, down;
};

__global__ void experts_up_kernel(ExpertPair routed, ExpertPair shared, Activations a, int hidden) {
  const int slot = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int unit = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  const bool is_shared = slot == kExpertsPerToken;
  const int id = is_shared ? 0 : a.expert_ids[row * kExpertsPerToken + slot];
  const ExpertPair& pair = is_shared ? shared : routed;
  const RawView gate = pair.gate.entry(id), up = pair.up.entry(id);
  if (unit >= gate.n) return;
  const __half* x = a.moe_input + static_cast<size_t>(row) * hidden;
  const float g = row_dot(gate, unit, x), u = row_dot(up, unit, x);
  const size_t width = static_cast<size_t>(kExpertsPerToken) * routed.gate.n + shared.gate.n;
  if (threadIdx.x % 32 == 0)
    a.hidden[row * width + static_cast<size_t>(slot) * routed.gate.n + unit] =
        __float2half_rn(silu(g) * u * kHiddenScale);
}

__global__ void experts_down_kernel(ExpertPair routed, ExpertPair shared, Activations a, int hidden) {
  const int n = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32), row = static_cast<int>(blockIdx.y);
  if (n >= hidden) return;
  const size_t width = static_cast<size_t>(kExpertsPerToken) * routed.gate.n + shared.gate.n;
  float total = 0;
  for (int slot = 0; slot <= kExpertsPerToken; ++slot) {
    const bool is_shared = slot == kExpertsPerToken;
    const int at = row * kExpertsPerToken + slot;
    const RawView down = is_shared ? shared.down : routed.down.entry(a.expert_ids[at]);
    const float weight = is_shared ? a.shared_gate[row] : a.expert_weights[at];
    total += weight * row_dot(down, n, a.hidden + row * width + static_cast<size_t>(slot) * routed.gate.n);
  }
  if (threadIdx.x % 32 == 0) a.residual[static_cast<size_t>(row) * hidden + n] += total / kHiddenScale;
}

// Eight rounds of a warp-wide maximum; for more experts than choose_experts holds in registers.
__device__ ChosenExpert choose_from_many(const float* logits, int experts) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  ChosenExpert mine{0, 0};
  int taken[kExpertsPerToken];
  float largest = 0, sum = 0;
  for (int round = 0; round < kExpertsPerToken; ++round) {
    uint64_t best = 0;  // value, then the lowest id
    for (int id = lane; id < experts; id += 32) {
      bool free = true;
      for (int i = 0; i < round; ++i) free &= taken[i] != id;
      const uint64_t key = static_cast<uint64_t>(ordered_bits(logits[id])) << 32 | (0xffffffffu - id);
      if (free && key > best) best = key;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      const uint64_t other = __shfl_xor_sync(0xffffffffu, best, offset);
      best = other > best ? other : best;
    }
    const int id = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    taken[round] = id;
    if (round == 0) largest = logits[id];
    const float p = __expf(logits[id] - largest);
    sum += p;
    if (lane == round) mine = {id, p};
  }
  mine.weight /= sum;
  return mine;
}

__global__ void choose_kernel(Activations a, int rows, int experts, int router_width, int shared_column) {
  grid_dependency_wait();
  launch_dependents();
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (row >= rows) return;
  const float* logits = a.router_logits + static_cast<size_t>(row) * router_width;
  const ChosenExpert mine =
      experts <= kMaxFusedExperts ? choose_experts(logits, experts) : choose_from_many(logits, experts);
  if (lane < kExpertsPerToken) {
    a.expert_ids[row * kExpertsPerToken + lane] = mine.id;
    a.expert_weights[row * kExpertsPerToken + lane] = mine.weight;
  }
  if (lane == 0) a.shared_gate[row] = sigmoid(logits[shared_column]);
}

dim3 blocks(int n, int per_block, int y = 1, int z = 1) {
  return dim3(static_cast<unsigned>((n + per_block - 1) / per_block), static_cast<unsigned>(y),
              static_cast<unsigned>(z));
}

}  // namespace

void embed_rows(const Launch& launch, const RawView& embedding, const StepView& step, const TokenId* last_picked,
                float* residual) {
  launch_kernel(launch, embed_kernel, blocks(step.rows, 1), kThreads, 0, 1, embedding, step, last_picked, residual);
}

void norm_rows(const Launch& launch, const float* residual, const StepHead* heads, const float* weight, float eps,
               int rows, int width, __half* normed) {
  launch_kernel(launch, norm_kernel, blocks(rows, 1), kThreads, 0, 1, residual, heads, weight, eps, width, normed);
}

void linear_plain(const Launch& launch, const RawView& w, const __half* x, size_t x_stride, int rows, float* out,
                  size_t out_stride, bool add) {
  linear_kernel<<<blocks(w.n, kWarps, (rows + kRowsAtOnce - 1) / kRowsAtOnce), kThreads, 0, launch.stream>>>(
      w, x, x_stride, rows, out, out_stride, add);
  check_launch("linear_plain");
}

void experts_up_plain(const Launch& launch, const Experts& experts, const Experts& shared, const Activations& a,
                      int rows, int hidden) {
  const ExpertPair routed{experts.raw_gate, experts.raw_up, experts.raw_down};
  const ExpertPair one{shared.raw_gate, shared.raw_up, shared.raw_down};
  const int units = experts.width > shared.width ? experts.width : shared.width;
  experts_up_kernel<<<blocks(units, kWarps, kExpertsPerToken + 1, rows), kThreads, 0, launch.stream>>>(routed, one, a,
                                                                                                       hidden);
  check_launch("experts_up_plain");
}

void experts_down_plain(const Launch& launch, const Experts& experts, const Experts& shared, const Activations& a,
                        int rows, int hidden) {
  const ExpertPair routed{experts.raw_gate, experts.raw_up, experts.raw_down};
  const ExpertPair one{shared.raw_gate, shared.raw_up, shared.raw_down};
  experts_down_kernel<<<blocks(hidden, kWarps, rows), kThreads, 0, launch.stream>>>(routed, one, a, hidden);
  check_launch("experts_down_plain");
}

void choose_rows(const Launch& launch, const Activations& a, int rows, int experts, int router_width,
                 int shared_column) {
  launch_kernel(launch, choose_kernel, blocks(rows, kWarps), kThreads, 0, 1, a, rows, experts, router_width,
                shared_column);
}

}  // namespace calla::cuda
