#pragma once
// The Metal device as the backend sees it: what it can do, buffers, pipelines.
#include <Metal/Metal.hpp>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace calla::metal {

// Part of a buffer.
struct BufferSpan {
  MTL::Buffer* buffer = nullptr;
  size_t offset = 0;
  size_t bytes = 0;

  BufferSpan part(size_t begin, size_t count) const { return {buffer, offset + begin, count}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(buffer->contents()) + offset);
  }
};

// A function constant's value (kernels/common.h has the list).
struct FunctionConstant {
  enum class Type { kInt, kBool };
  int index;
  Type type;
  int value;
};
inline FunctionConstant int_constant(int index, int value) { return {index, FunctionConstant::Type::kInt, value}; }
inline FunctionConstant bool_constant(int index, bool value) { return {index, FunctionConstant::Type::kBool, value}; }

struct Kernel {
  std::string name;
  NS::SharedPtr<MTL::ComputePipelineState> pipeline;
  size_t max_threads = 0;  // a threadgroup of this pipeline
};

struct DeviceTraits {
  std::string name;          // "Apple M4 Max"
  std::string architecture;  // "applegpu_g16s"; empty where the system does not tell
  int generation = 0;        // 13 for M1 ... 17 for M5; 0 if unknown
  bool tensor_ops = false;   // matrix units that Metal 4 tensor operations reach, with the lane layout we know
  size_t max_buffer_bytes = 0;
  size_t working_set_bytes = 0;  // what the GPU may hold at once
};

class Device {
 public:
  // Throws DeviceError if there is no device that can run the kernels.
  Device();

  const DeviceTraits& traits() const { return traits_; }
  MTL::Device* metal() const { return device_.get(); }
  MTL::CommandQueue* queue() const { return queue_.get(); }

  // Shared, untracked, contents undefined. The buffer belongs to the device and lives as long as it does.
  BufferSpan allocate(size_t bytes, const char* label);
  // A no-copy view of memory that outlives the device: page-aligned, whole pages.
  MTL::Buffer* wrap(const void* pages, size_t bytes, const char* label);
  // Bytes of all buffers so far, the wrapped ones included.
  size_t allocated_bytes() const { return allocated_bytes_; }
  const std::vector<NS::SharedPtr<MTL::Buffer>>& buffers() const { return buffers_; }

  // The pipeline of a kernel with these constants: compiled on the first call. Not for the encoding path.
  const Kernel& kernel(const std::string& name, std::initializer_list<FunctionConstant> constants = {});
  // True if the tensor-op kernels could be compiled here; the reason why not otherwise.
  bool load_tensor_library(std::string& reason);

 private:
  BufferSpan keep(NS::SharedPtr<MTL::Buffer> buffer, size_t bytes, const char* label);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  std::vector<NS::SharedPtr<MTL::Library>> libraries_;  // searched in this order
  DeviceTraits traits_;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers_;
  size_t allocated_bytes_ = 0;
  std::map<std::string, std::unique_ptr<Kernel>> kernels_;
};

// True if this machine has a Metal device at all.
bool metal_device_present();

// What computes instead of a GPU, for people; empty where there is one (metal_cpp.cc, software_device.cc).
std::string software_device_note();

// An autorelease pool for the current scope: every entry into Metal needs one, or its temporaries pile up.
class AutoreleaseScope {
 public:
  AutoreleaseScope() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~AutoreleaseScope() { pool_->release(); }
  AutoreleaseScope(const AutoreleaseScope&) = delete;
  AutoreleaseScope& operator=(const AutoreleaseScope&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

inline NS::String* ns_string(const char* text) { return NS::String::string(text, NS::UTF8StringEncoding); }

}  // namespace calla::metal
