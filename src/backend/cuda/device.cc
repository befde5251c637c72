#include "backend/cuda/device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace calla::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string size_text(size_t bytes) {
  char text[32];
  if (bytes < size_t{1000} * 1000 * 1000)
    std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) * 1e-6);
  else
    std::snprintf(text, sizeof text, "%.1f GB", static_cast<double>(bytes) * 1e-9);
  return text;
}

// What to do about an error, behind the runtime's own words for it; "" if there is nothing to say.
const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:  // of the runtime's own; DeviceBytes and PinnedArray have messages of theirs
      return "; the card has too little left: try a smaller --context, or end other programs on it (nvidia-smi lists "
             "them)";
    case cudaErrorNoKernelImageForDevice:
      return "; this build has no code for this GPU: name its architecture in CALLA_CUDA_FLAGS when configuring";
    case cudaErrorUnsupportedPtxVersion:
      return "; the NVIDIA driver is older than the CUDA toolkit of this build, whose code for this GPU it would have "
             "to compile: update the driver";
    case cudaErrorDevicesUnavailable:
      return "; another process may have the card for itself (compute mode in nvidia-smi -q)";
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
      return "; this process can no longer use the card: start it again, and please report it with the output of "
             "`calla selftest`";
    default:
      return "";
  }
}

std::string no_room(size_t bytes, const char* what) {
  std::string message = std::string("CUDA: ") + what + ": " + size_text(bytes) + " needed";
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess)
    message += ", " + size_text(free) + " of the card's " + size_text(total) + " free";
  (void)cudaGetLastError();
  return message +
         "; try a smaller --context, fewer --max-sequences or a smaller --cache-gb, end other programs on the card "
         "(nvidia-smi lists them), or run with -b cpu; docs/cuda.md has what each command needs in all";
}

}  // namespace

void cuda_check(cudaError_t status, const char* what, const std::source_location& at) {
  if (status == cudaSuccess) return;
  // The runtime also remembers it for the next check of a launch, which may be another backend's.
  (void)cudaGetLastError();
  const char* file = std::strrchr(at.file_name(), '/');
  throw DeviceError(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status) + advice(status) + " (" +
                    (file != nullptr ? file + 1 : at.file_name()) + ":" + std::to_string(at.line()) + ")");
}

std::string why_no_device() {
  int count = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  const std::string built = version_text(CUDART_VERSION);
  if (status == cudaErrorInsufficientDriver && (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0))
    return "no NVIDIA driver is found; install one for CUDA " + built +
           " or later and check with nvidia-smi (in a container: docker run --gpus all)";
  if (status == cudaErrorInsufficientDriver)
    return "the NVIDIA driver is for CUDA up to " + version_text(driver) + ", but this build is for " + built +
           "; update the driver";
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"))
      return "no NVIDIA GPU is found with CUDA_VISIBLE_DEVICES=\"" + std::string(visible) +
             "\"; unset it, or name one that nvidia-smi lists";
    return "no NVIDIA GPU is found; check nvidia-smi";
  }
  if (status != cudaSuccess)
    return std::string("the NVIDIA GPU cannot be used: ") + cudaGetErrorString(status) + "; check nvidia-smi";
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major < 8) {
    (void)cudaGetLastError();
    return "the first GPU is older than compute capability 8.0 (Ampere), which the CUDA backend needs; "
           "CUDA_VISIBLE_DEVICES chooses another";
  }
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

void require_free_memory(size_t bytes, const char* what) {
  size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total), "free memory of the card");
  if (free < bytes) throw DeviceError(no_room(bytes, what));
}

void page_lock_check(cudaError_t status, size_t bytes, const char* what) {
  if (status != cudaErrorMemoryAllocation && status != cudaErrorOperatingSystem) return cuda_check(status, what);
  (void)cudaGetLastError();
  throw DeviceError(std::string("CUDA: ") + what + ": " + size_text(bytes) +
                    " of this machine's memory needed, page-locked, and the system refuses; end other programs, or "
                    "allow more (a container's memory limit, ulimit -l)");
}

void* allocate_pinned(size_t bytes, const char* what) {
  void* data = nullptr;
  page_lock_check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped), bytes, what);
  return data;
}

DeviceBytes::DeviceBytes(size_t bytes, const char* what) : size_(bytes) {
  if (bytes == 0) return;
  const cudaError_t status = cudaMalloc(&data_, bytes);
  if (status == cudaErrorMemoryAllocation) throw DeviceError(no_room(bytes, what));
  cuda_check(status, what);
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
