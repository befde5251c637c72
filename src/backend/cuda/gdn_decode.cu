// gdn_step: one token of the Gated DeltaNet for every value head: conv + SiLU, l2 norm of q and k, decay and beta, state
// update and read-out, RMSNorm, gate.
//   Launch    grid (value_heads x 4, rows), block 256; a block holds 32 of a head's 128 state columns in registers
//             (16 a thread), loaded before it waits for the projection. The blocks of a key head are one cluster: they
//             exchange the RMSNorm's sum of squares through shared memory, and none overwrites the convolution's tail
//             before all have read it.
//   Moves     the state once in and once out: 2 x 64 KiB a head; 4.2 MB a layer at the real shape.
//   Numerics  fp32. S is read once: S_new^T q = g S^T q + (k . q) d, so both dot products share one pass.
#include "backend/cuda/gdn.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = kStateColumns;         // one a lane
constexpr int kParts = kGdnHeadDim / kColumns;  // blocks a value head
constexpr int kKeys = kGdnHeadDim / kWarps;     // 16: key rows a warp
constexpr int kMaxCluster = 8;
// Shared memory asked for with one row only to keep blocks apart: what a multiprocessor has left beside a block of the
// projection in front, so that each takes one block of this kernel early and its state loads are spread out.
constexpr size_t kSpreadBytes = 95000;

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes to the same variable of another block of the cluster.
__device__ __forceinline__ void store_remote(float* variable, unsigned block, float value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(variable)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

__global__ void __launch_bounds__(kThreads, 3) gdn_step(GdnParams p) {
  __shared__ float qk[2 * kGdnHeadDim];
  __shared__ float squares[kWarps];
  __shared__ float memory_part[kWarps][kColumns], out_part[kWarps][kColumns], dot_part[kWarps];
  __shared__ float values[kColumns];
  __shared__ float head_squares[kParts];

  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
  const int heads_per_key = p.value_heads / p.key_heads;
  const int head = static_cast<int>(blockIdx.x) / kParts, part = static_cast<int>(blockIdx.x) % kParts;
  const int key_head = head / heads_per_key, row = static_cast<int>(blockIdx.y);
  const int rank = static_cast<int>(blockIdx.x) % (heads_per_key * kParts);
  const int key_width = p.key_heads * kGdnHeadDim, channels = p.channels();

  launch_dependents();
  cluster_arrive();  // this block runs: its shared memory may be written to
  float* memory = p.state + static_cast<size_t>(p.step.sequences[row].slot) * p.slot_floats;
  float* state = memory + state_place(head, 0, part * kColumns + lane);
  float* tail = memory + p.state_floats();
  float s[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) s[i] = __ldcs(state + (warp * kKeys + i) * kColumns);

  // Every thread convolves one channel of q or k; the first warp also one of v.
  const int channel = (tid < kGdnHeadDim ? 0 : key_width - kGdnHeadDim) + key_head * kGdnHeadDim + tid;
  const int value_channel = 2 * key_width + head * kGdnHeadDim + part * kColumns + lane;
  float old[3], value_old[3] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) old[i] = tail[i * channels + channel];
  const float4 taps = *reinterpret_cast<const float4*>(p.conv + channel * 4);
  float4 value_taps{};
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < 3; ++i) value_old[i] = tail[i * channels + value_channel];
    value_taps = *reinterpret_cast<const float4*>(p.conv + value_channel * 4);
  }
  const float rate = p.decay_rate[head], dt_bias = p.dt_bias[head], norm = p.norm[part * kColumns + lane];
  grid_dependency_wait();

  const float* projected = p.projected + row * p.stride;
  const float input = __ldcg(projected + channel);
  const float value_input = warp == 0 ? __ldcg(projected + value_channel) : 0.0f;
  const float a = __ldcg(projected + p.a_column + head) + dt_bias;
  const float b = __ldcg(projected + p.b_column + head);
  const float z = __ldcg(projected + p.z_column + head * kGdnHeadDim + part * kColumns + lane);
  const float c = silu(taps.x * old[0] + taps.y * old[1] + taps.z * old[2] + taps.w * input);
  qk[tid] = c;
  const float square = sum_lanes(c * c);
  if (lane == 0) squares[warp] = square;
  if (warp == 0)
    values[lane] = silu(value_taps.x * value_old[0] + value_taps.y * value_old[1] + value_taps.z * value_old[2] +
                        value_taps.w * value_input);
  const float softplus = a > 20 ? a : log1pf(expf(a));
  const float decay = expf(-rate * softplus), beta = sigmoid(b);
  __syncthreads();

  const float q_scale =
      rsqrtf(squares[0] + squares[1] + squares[2] + squares[3] + 1e-6f) * 0.08838834764831845f;  // 1 / sqrt(128)
  const float k_scale = rsqrtf(squares[4] + squares[5] + squares[6] + squares[7] + 1e-6f);
  float memory_sum = 0, out_sum = 0, dot = 0, k[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const float q = qk[warp * kKeys + i];
    k[i] = qk[kGdnHeadDim + warp * kKeys + i] * k_scale;
    memory_sum = fmaf(s[i], k[i], memory_sum);
    out_sum = fmaf(s[i], q, out_sum);
    dot = fmaf(k[i], q, dot);
  }
  memory_part[warp][lane] = memory_sum;
  out_part[warp][lane] = out_sum;
  if (lane == 0) dot_part[warp] = dot;
  __syncthreads();
  memory_sum = out_sum = dot = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    memory_sum += memory_part[i][lane];
    out_sum += out_part[i][lane];
    dot += dot_part[i];
  }
  const float delta = beta * (values[lane] - decay * memory_sum);

  const float out = (decay * out_sum + dot * delta) * q_scale;
  cluster_wait();  // all blocks of the cluster run
  if (warp == 0) {
    const float total = sum_lanes(out * out);
    if (lane < kParts) store_remote(&head_squares[part], static_cast<unsigned>(rank / kParts * kParts + lane), total);
  }
  cluster_arrive();
  cluster_wait();
  // After the barrier, which would otherwise wait for these stores to reach memory.
#pragma unroll
  for (int i = 0; i < kKeys; ++i) __stcs(state + (warp * kKeys + i) * kColumns, fmaf(k[i], delta, decay * s[i]));
  if (warp == 0) {
    const float total = head_squares[0] + head_squares[1] + head_squares[2] + head_squares[3];
    const float y = out * rsqrtf(total / kGdnHeadDim + p.eps) * norm * silu(z);
    p.mixed[row * p.mixed_stride + head * kGdnHeadDim + part * kColumns + lane] = __float2half_rn(y);
    tail[value_channel] = value_old[1];
    tail[channels + value_channel] = value_old[2];
    tail[2 * channels + value_channel] = value_input;
  }
  if (rank == 0) {
    tail[channel] = old[1];
    tail[channels + channel] = old[2];
    tail[2 * channels + channel] = input;
  }
}

}  // namespace

bool gdn_decode_fits(const DeviceInfo& device, int key_heads, int value_heads) {
  return device.is_hopper() && value_heads / key_heads * kParts <= kMaxCluster;
}

void gdn_decode(const Launch& launch, const GdnParams& p) {
  check(p.step.rows == p.step.sequence_count, "a decode step has one row a sequence");
  launch_kernel(launch, gdn_step,
                dim3(static_cast<unsigned>(p.value_heads * kParts), static_cast<unsigned>(p.step.rows)), kThreads,
                p.step.rows == 1 ? kSpreadBytes : 0, static_cast<unsigned>(p.value_heads / p.key_heads * kParts), p);
}

}  // namespace calla::cuda
