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

// Launches with programmatic dependent launch if `launch.dependent`; the kernel then calls grid_dependency_wait()
// before it touches what earlier kernels read or write. `cluster` > 1: blocks of a cluster along x.
template <class... Params, class... Args>
void launch_kernel(const Launch& launch, void (*kernel)(Params...), dim3 grid, unsigned threads, size_t shared_bytes,
                   unsigned cluster, Args... args) {
  if (shared_bytes > 48 * 1024)
    cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               "shared memory of a kernel");
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
