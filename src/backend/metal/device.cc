#include "backend/metal/device.h"

#include <cctype>

#include "backend/metal/kernel_sources.h"
#include "base/check.h"
#include "base/error.h"

namespace calla::metal {
namespace {

std::string text_of(const NS::String* string) { return string ? string->utf8String() : ""; }

std::string text_of(NS::Error* error) { return error ? text_of(error->localizedDescription()) : "no reason given"; }

NS::SharedPtr<MTL::Device> open_device() {
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (device) return device;
  // Sessions without a display have no default device but may list one.
  auto all = NS::TransferPtr(MTL::CopyAllDevices());
  if (all && all->count() > 0) device = NS::RetainPtr(all->object<MTL::Device>(0));
  return device;
}

// "applegpu_g17s" -> 17.
int generation_of(const std::string& architecture) {
  size_t end = architecture.size();
  while (end > 0 && !std::isdigit(static_cast<unsigned char>(architecture[end - 1]))) --end;
  size_t begin = end;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(architecture[begin - 1]))) --begin;
  return end - begin == 2 ? std::stoi(architecture.substr(begin, 2)) : 0;
}

DeviceTraits traits_of(MTL::Device* device) {
  DeviceTraits traits;
  traits.name = text_of(device->name());
  if (MTL::Architecture* architecture = device->architecture()) traits.architecture = text_of(architecture->name());
  traits.generation = generation_of(traits.architecture);
  const bool phone = !traits.architecture.empty() && traits.architecture.back() == 'p';
  traits.tensor_ops = device->supportsFamily(MTL::GPUFamilyMetal4) && traits.generation >= (phone ? 18 : 17);
  traits.max_buffer_bytes = device->maxBufferLength();
  traits.working_set_bytes = device->recommendedMaxWorkingSetSize();
  return traits;
}

// The library `name`: as CMake built it if it did, otherwise compiled from its text now (macOS keeps the result).
NS::SharedPtr<MTL::Library> load_library(MTL::Device* device, const std::string& name, const char* source,
                                         MTL::LanguageVersion version, std::string& reason) {
  NS::Error* error = nullptr;
#ifdef CALLA_METALLIB_FOLDER
  const std::string path = CALLA_METALLIB_FOLDER "/" + name + ".metallib";
  if (auto library = NS::TransferPtr(device->newLibrary(ns_string(path.c_str()), &error))) return library;
#endif
  auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(version);
  options->setFastMathEnabled(false);  // kernels ask for fast:: functions where they want them (setMathMode: macOS 15)
  auto library = NS::TransferPtr(device->newLibrary(ns_string(source), options.get(), &error));
  if (!library) reason = name + ": " + text_of(error);
  return library;
}

}  // namespace

bool metal_device_present() {
  const AutoreleaseScope pool;
  return static_cast<bool>(open_device());
}

Device::Device() {
  const AutoreleaseScope pool;
  device_ = open_device();
  if (!device_) throw DeviceError("Metal: this machine lists no GPU; a virtual machine or a sandbox may hide it");
  if (!device_->supportsFamily(MTL::GPUFamilyApple7))
    throw DeviceError("Metal: " + text_of(device_->name()) + " is not an Apple silicon GPU (M1 or later is needed)");
  traits_ = traits_of(device_.get());
  queue_ = NS::TransferPtr(device_->newCommandQueue(256));  // a long prefill is many short command buffers
  if (!queue_) throw DeviceError("Metal: " + traits_.name + " gave no command queue");
  std::string reason;
  auto library = load_library(device_.get(), "calla_kernels", kernel_source(), MTL::LanguageVersion3_1, reason);
  if (!library) throw DeviceError("Metal: the kernels do not compile on this system: " + reason);
  libraries_.push_back(std::move(library));
}

bool Device::load_tensor_library(std::string& reason) {
  const AutoreleaseScope pool;
  auto library =
      load_library(device_.get(), "calla_tensor_kernels", tensor_kernel_source(), MTL::LanguageVersion4_0, reason);
  if (!library) return false;
  libraries_.push_back(std::move(library));
  return true;
}

BufferSpan Device::keep(NS::SharedPtr<MTL::Buffer> buffer, size_t bytes, const char* label) {
  if (!buffer)
    throw DeviceError("Metal: no buffer of " + std::to_string(bytes >> 20) + " MB for " + label +
                      "; close other programs or use a shorter context");
  buffer->setLabel(ns_string(label));
  allocated_bytes_ += bytes;
  buffers_.push_back(buffer);
  return {buffer.get(), 0, bytes};
}

BufferSpan Device::allocate(size_t bytes, const char* label) {
  const AutoreleaseScope pool;
  const size_t rounded = (std::max<size_t>(bytes, 16) + 15) / 16 * 16;
  return keep(NS::TransferPtr(device_->newBuffer(
                  rounded, MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked)),
              rounded, label);
}

MTL::Buffer* Device::wrap(const void* pages, size_t bytes, const char* label) {
  const AutoreleaseScope pool;
  return keep(NS::TransferPtr(device_->newBuffer(
                  pages, bytes, MTL::ResourceStorageModeShared | MTL::ResourceHazardTrackingModeUntracked, nullptr)),
              bytes, label)
      .buffer;
}

const Kernel& Device::kernel(const std::string& name, std::initializer_list<FunctionConstant> constants) {
  std::string key = name;
  for (const FunctionConstant& c : constants) key += "," + std::to_string(c.index) + "=" + std::to_string(c.value);
  std::unique_ptr<Kernel>& kernel = kernels_[key];
  if (kernel) return *kernel;

  const AutoreleaseScope pool;
  auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (const FunctionConstant& c : constants) {
    const bool truth = c.value != 0;
    if (c.type == FunctionConstant::Type::kBool) {
      values->setConstantValue(&truth, MTL::DataTypeBool, c.index);
    } else {
      values->setConstantValue(&c.value, MTL::DataTypeInt, c.index);
    }
  }
  NS::Error* error = nullptr;
  for (const auto& library : libraries_) {
    auto function = NS::TransferPtr(library->newFunction(ns_string(name.c_str()), values.get(), &error));
    if (!function) continue;
    auto pipeline = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
    if (!pipeline) throw DeviceError("Metal: no pipeline for kernel " + key + ": " + text_of(error));
    if (pipeline->threadExecutionWidth() != 32)
      throw DeviceError("Metal: kernel " + key + " got a SIMD width other than 32");
    const size_t max_threads = pipeline->maxTotalThreadsPerThreadgroup();
    kernel = std::make_unique<Kernel>(Kernel{key, std::move(pipeline), max_threads});
    return *kernel;
  }
  throw DeviceError("Metal: kernel " + key + " is missing from the library: " + text_of(error));
}

}  // namespace calla::metal
