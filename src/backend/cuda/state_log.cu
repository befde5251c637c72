// apply_logs: states and their logs.
//   Launch    grid (parts, layers), block 256: a thread has four columns of every 32nd key.
//   Moves     a part's 16 KiB in and out if its log has something, else 4 bytes.
#include "backend/cuda/device.h"
#include "backend/cuda/state_log.h"

namespace calla::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) apply_kernel(float* states, size_t layer_floats, StateLog* logs) {
  StateLog& log = logs[blockIdx.y * gridDim.x + blockIdx.x];
  const int count = log.entries[0].count;
  if (count == 0) return;
  constexpr int kQuads = kStateColumns / 4;
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  auto* state = reinterpret_cast<float4*>(states + blockIdx.y * layer_floats + blockIdx.x * kStatePartFloats);
  for (int key = static_cast<int>(threadIdx.x) / kQuads; key < kGdnHeadDim; key += kThreads / kQuads) {
    float4 v = state[key * kQuads + quad];
    for (int i = 0; i < count; ++i) {
      const StateLogEntry& e = log.entries[i];
      const float4 change = reinterpret_cast<const float4*>(e.change)[quad];
      v = make_float4(fmaf(e.decay, v.x, e.key[key] * change.x), fmaf(e.decay, v.y, e.key[key] * change.y),
                      fmaf(e.decay, v.z, e.key[key] * change.z), fmaf(e.decay, v.w, e.key[key] * change.w));
    }
    state[key * kQuads + quad] = v;
  }
  __syncthreads();
  if (threadIdx.x == 0) log.entries[0].count = 0;
}

}  // namespace

void apply_logs(float* states, size_t layer_floats, StateLog* logs, int layers, int parts, cudaStream_t stream) {
  apply_kernel<<<dim3(static_cast<unsigned>(parts), static_cast<unsigned>(layers)), kThreads, 0, stream>>>(
      states, layer_floats, logs);
  check_launch("apply_logs");
}

}  // namespace calla::cuda
