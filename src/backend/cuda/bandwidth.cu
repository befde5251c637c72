#include <utility>
#include <vector>

#include "backend/cuda/bandwidth.h"
#include "base/median.h"

namespace calla::cuda {
namespace {

constexpr unsigned kThreads = 512;
constexpr int kLoads = 4;  // 16-byte loads in flight a thread

// Grid: any number of blocks of 512 threads. Reads `count` 16-byte words once, writes one word a block at most.
__global__ void __launch_bounds__(kThreads) sum_kernel(const uint4* words, size_t count, unsigned* out) {
  const size_t stride = static_cast<size_t>(gridDim.x) * kThreads;
  unsigned sum = 0;
  size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kLoads - 1) * stride < count; i += kLoads * stride) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) loaded[j] = words[i + static_cast<size_t>(j) * stride];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += loaded[j].x ^ loaded[j].y ^ loaded[j].z ^ loaded[j].w;
  }
  // Never true for memory that was cleared; keeps the loads.
  if (sum == 0x12345678u) out[blockIdx.x] = sum;
}

}  // namespace

double probe_read_bandwidth(const DeviceInfo& device, cudaStream_t stream) {
  size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total), "free memory");
  const size_t bytes = std::min(size_t{2} << 30, free / 2) / 4096 * 4096;
  const unsigned blocks = 4 * static_cast<unsigned>(device.multiprocessors);
  const DeviceBytes memory(bytes, "memory for the bandwidth probe");
  const DeviceArray<unsigned> out(blocks, "memory for the bandwidth probe");
  cuda_check(cudaMemsetAsync(memory.data(), 0, bytes, stream), "clear memory");
  Event begin(cudaEventDefault), end(cudaEventDefault);
  std::vector<double> rates;
  for (int pass = 0; pass < 6; ++pass) {
    begin.record(stream);
    sum_kernel<<<blocks, kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(memory.data()), bytes / 16, out.data());
    check_launch("sum_kernel");
    end.record(stream);
    end.synchronize();
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "elapsed time");
    if (pass > 0) rates.push_back(static_cast<double>(bytes) / (static_cast<double>(ms) * 1e-3));
  }
  return median(std::move(rates));
}

}  // namespace calla::cuda
