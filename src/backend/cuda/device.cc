#include "backend/cuda/device.h"

#include <cstring>

namespace calla::cuda {

void cuda_check(cudaError_t status, const char* what, const std::source_location& at) {
  if (status == cudaSuccess) return;
  std::string message = std::string("CUDA: ") + what + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation)
    message += "; the device has too little free memory: try a smaller context, fewer sequences or smaller chunks";
  if (status == cudaErrorNoKernelImageForDevice)
    message += "; this build has no code for this GPU: configure with CMAKE_CUDA_ARCHITECTURES naming it";
  const char* file = std::strrchr(at.file_name(), '/');
  message += std::string(" (") + (file != nullptr ? file + 1 : at.file_name()) + ":" + std::to_string(at.line()) + ")";
  throw DeviceError(message);
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return std::string("no usable NVIDIA GPU or driver (") + cudaGetErrorString(status) + "); check nvidia-smi";
  }
  if (count == 0) return "no NVIDIA GPU found; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major < 8)
    return "the first GPU is older than compute capability 8.0 (Ampere), which the CUDA backend needs";
  return "";
}

DeviceInfo open_device() {
  const std::string reason = why_no_device();
  if (!reason.empty()) throw DeviceError("CUDA backend: " + reason);
  cuda_check(cudaSetDevice(0), "cudaSetDevice");
  cudaDeviceProp properties{};
  cuda_check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory = properties.totalGlobalMem;
  info.shared_per_block = static_cast<int>(properties.sharedMemPerBlockOptin);
  return info;
}

DeviceBytes::DeviceBytes(size_t bytes, const char* what) : size_(bytes) {
  if (bytes > 0) cuda_check(cudaMalloc(&data_, bytes), what);
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) cudaFree(data_);
}

Graph::Graph(cudaGraph_t captured) {
  const cudaError_t status = cudaGraphInstantiate(&exec_, captured, 0);
  cudaGraphDestroy(captured);
  cuda_check(status, "cudaGraphInstantiate");
}

Graph::~Graph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
}

}  // namespace calla::cuda
