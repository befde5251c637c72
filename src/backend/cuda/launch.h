#pragma once
// Kernel launches: one way to set the attributes, so that the launch wrappers stay short.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backend/cuda/device.h"

namespace calla::cuda {

// Where and how the kernels of a step are launched.
struct Launch {
  cudaStream_t stream = nullptr;
  bool dependent = false;  // programmatic dependent launch: start before the kernel in front has ended
  DeviceInfo device;
};

// Lets a kernel have more shared memory than the 48 KB that it may have unasked.
template <class... Params>
void allow_shared(void (*kernel)(Params...), size_t shared_bytes) {
  if (shared_bytes <= 48 * 1024) return;
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "shared memory of a kernel");
}

// True if the card can run all `blocks` of a kernel at once, without which one whose blocks wait for each other would
// not end.
template <class... Params>
bool runs_at_once(const DeviceInfo& device, void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes) {
  if (device.shared_per_block < static_cast<int>(shared_bytes)) return false;
  allow_shared(kernel, shared_bytes);
  int each = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes), "blocks of a kernel");
  return each * device.multiprocessors >= blocks;
}

// Launches with programmatic dependent launch if `launch.dependent`; the kernel then calls grid_dependency_wait()
// before it touches what earlier kernels read or write. `cluster` > 1: blocks of a cluster along x.
template <class... Params, class... Args>
void launch_kernel(const Launch& launch, void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
                   unsigned cluster, Args... args) {
  allow_shared(kernel, shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  cudaLaunchAttribute attributes[2]{};
  if (launch.dependent && launch.device.is_hopper()) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = cluster;
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs].val.clusterDim.z = 1;
    ++config.numAttrs;
  }
  config.attrs = attributes;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

}  // namespace calla::cuda
