#pragma once
// The CUDA runtime with owners and exceptions: every return code is looked at, every resource has one owner.
#include <cuda_runtime.h>

#include <cstddef>
#include <source_location>
#include <span>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/error.h"

namespace calla::cuda {

// Throws DeviceError with the call's place, the runtime's text and, for out of memory, what to try.
void cuda_check(cudaError_t status, const char* what, const std::source_location& at = std::source_location::current());
// The error of the last kernel launch, if any.
inline void check_launch(const char* kernel, const std::source_location& at = std::source_location::current()) {
  cuda_check(cudaGetLastError(), kernel, at);
}

// What kernels and launch geometry need to know of the card.
struct DeviceInfo {
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  size_t memory = 0;
  int shared_per_block = 0;  // largest dynamic shared memory of one block
  // The one GPU that this build has code of its own for; others run the code of compute capability 8.0, which lacks
  // dependent launch, clusters, bulk copies and wgmma.
  bool is_hopper() const { return major == 9; }
};

// Selects device 0 and reads its facts. Throws DeviceError if there is none or it is older than sm_80.
DeviceInfo open_device();
// Empty if a usable device is there, else why not.
std::string why_no_device();

// Throws DeviceError, which says what is needed and what is free, if the card has less than `bytes` left: before many
// allocations, the last of which would name a small part only.
void require_free_memory(size_t bytes, const char* what);

// Page-locked host memory, visible to the device; for PinnedArray. Throws DeviceError.
void* allocate_pinned(size_t bytes, const char* what);
// Throws DeviceError if `status` says that the system does not let `bytes` of its memory be page-locked, or another error.
void page_lock_check(cudaError_t status, size_t bytes, const char* what);

// Parts of one allocation begin where cudaMalloc would let one begin.
inline constexpr size_t kDeviceAlignment = 256;
constexpr size_t align(size_t bytes, size_t to = kDeviceAlignment) { return (bytes + to - 1) / to * to; }

// Device memory. `what` names the purpose in an out-of-memory message.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(size_t bytes, const char* what);
  DeviceBytes(DeviceBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceBytes();
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// `count` elements of device memory.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(size_t count, const char* what) : bytes_(count * sizeof(T), what), count_(count) {}
  T* data() const { return reinterpret_cast<T*>(bytes_.data()); }
  size_t size() const { return count_; }
  size_t size_bytes() const { return bytes_.size(); }
  explicit operator bool() const { return static_cast<bool>(bytes_); }

 private:
  DeviceBytes bytes_;
  size_t count_ = 0;
};

// Page-locked host memory, visible to the device under the same address.
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  PinnedArray(size_t count, const char* what)
      : data_(static_cast<T*>(allocate_pinned(count * sizeof(T), what))), count_(count) {}
  PinnedArray(PinnedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~PinnedArray() {
    if (data_ != nullptr) cudaFreeHost(data_);
  }
  T* data() const { return data_; }
  size_t size() const { return count_; }
  std::span<T> span() const { return {data_, count_}; }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

class Stream {
 public:
  Stream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void synchronize() const { cuda_check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    cuda_check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate");
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void synchronize() const { cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  // What `stream` is given from now on waits for what was recorded; at once if nothing ever was.
  void wait_in(cudaStream_t stream) const { cuda_check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

// An executable graph made from what a stream has captured.
class Graph {
 public:
  Graph() = default;
  explicit Graph(cudaGraph_t captured);  // takes `captured` over
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  ~Graph();
  void launch(cudaStream_t stream) const { cuda_check(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }
  explicit operator bool() const { return exec_ != nullptr; }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace calla::cuda
