// MTL::Library, functions with their constants, and pipelines.
#include <cstring>

#include "findings.h"
#include "objects.h"

namespace softmetal {
namespace {

DeviceObject* as(const MTL::Device* d) { return static_cast<DeviceObject*>(const_cast<MTL::Device*>(d)); }
LibraryObject* as(const MTL::Library* l) { return static_cast<LibraryObject*>(const_cast<MTL::Library*>(l)); }
FunctionObject* as(const MTL::Function* f) { return static_cast<FunctionObject*>(const_cast<MTL::Function*>(f)); }
FunctionConstantValuesObject* as(const MTL::FunctionConstantValues* v) {
  return static_cast<FunctionConstantValuesObject*>(const_cast<MTL::FunctionConstantValues*>(v));
}
FunctionDescriptorObject* as(const MTL::FunctionDescriptor* d) {
  return static_cast<FunctionDescriptorObject*>(const_cast<MTL::FunctionDescriptor*>(d));
}
ComputePipelineDescriptorObject* as(const MTL::ComputePipelineDescriptor* d) {
  return static_cast<ComputePipelineDescriptorObject*>(const_cast<MTL::ComputePipelineDescriptor*>(d));
}
const ComputePipelineStateObject* as(const MTL::ComputePipelineState* p) {
  return static_cast<const ComputePipelineStateObject*>(p);
}

void set_error(NS::Error** error, const std::string& text) {
  if (error) *error = NS::Error::make("MTLLibraryErrorDomain", 3, text)->autorelease();
}

std::optional<ConstantValue> constant_value(const void* value, MTL::DataType type) {
  ConstantValue v;
  size_t bytes = 4;
  switch (type) {
    case MTL::DataTypeBool:
      v.type = ConstantType::kBool;
      bytes = 1;
      break;
    case MTL::DataTypeChar:
      v.type = ConstantType::kChar;
      bytes = 1;
      break;
    case MTL::DataTypeUChar:
      v.type = ConstantType::kUChar;
      bytes = 1;
      break;
    case MTL::DataTypeShort:
      v.type = ConstantType::kShort;
      bytes = 2;
      break;
    case MTL::DataTypeUShort:
      v.type = ConstantType::kUShort;
      bytes = 2;
      break;
    case MTL::DataTypeHalf:
      v.type = ConstantType::kHalf;
      bytes = 2;
      break;
    case MTL::DataTypeInt:
      v.type = ConstantType::kInt;
      break;
    case MTL::DataTypeUInt:
      v.type = ConstantType::kUInt;
      break;
    case MTL::DataTypeFloat:
      v.type = ConstantType::kFloat;
      break;
    case MTL::DataTypeLong:
      v.type = ConstantType::kLong;
      bytes = 8;
      break;
    case MTL::DataTypeULong:
      v.type = ConstantType::kULong;
      bytes = 8;
      break;
    default:
      report_finding({Fault::kBadCall,
                      "",
                      {},
                      "",
                      "",
                      "setConstantValue: data type " + std::to_string(type) + " is not a scalar that softmetal knows"});
      return std::nullopt;
  }
  std::memcpy(&v.bits, value, bytes);
  return v;
}

MTL::Library* open_library(DeviceObject* device, Files files, const std::string& label) {
  auto* library = new LibraryObject;
  library->device = device;
  library->files = std::move(files);
  library->label = label;
  return library;
}

MTL::Function* make_function(LibraryObject* library, const std::string& name, const ConstantValues* constants,
                             NS::Error** error) {
  PipelineInfo info;
  info.kernel = name;
  info.plain = find_kernel(library->files, name, false);
  info.instrumented = find_kernel(library->files, name, true);
  if (!info.plain && !info.instrumented) {
    set_error(error, "library " + library->label + " has no kernel \"" + name + "\"");
    return nullptr;
  }
  const KernelRef& ref = info.plain ? *info.plain : *info.instrumented;
  if (constants) info.constants = *constants;
  if (const std::string problem = check_constants(ref, info.constants); !problem.empty()) {
    set_error(error, problem);
    return nullptr;
  }
  info.static_threadgroup_bytes = threadgroup_layout(*ref.kernel).device_bytes;
  auto* function = new FunctionObject;
  function->device = library->device;
  function->name = name;
  function->info = std::move(info);
  return function;
}

MTL::ComputePipelineState* make_pipeline(DeviceObject* device, const MTL::Function* f, NS::UInteger max_threads,
                                         const std::string& label, NS::Error** error) {
  const Options& o = device->options;
  if (injected(Failure::kPipeline)) {
    set_error(error, "Compiler encountered an internal error (injected)");
    return nullptr;
  }
  PipelineInfo info = as(f)->info;
  const KernelInfo& kernel = *(info.plain ? info.plain : info.instrumented)->kernel;
  if (info.static_threadgroup_bytes > o.max_threadgroup_memory) {
    set_error(error, "kernel " + info.kernel + " declares " + std::to_string(info.static_threadgroup_bytes) +
                         " bytes of threadgroup memory; the device has " + std::to_string(o.max_threadgroup_memory));
    return nullptr;
  }
  info.max_threads = o.max_threads_per_threadgroup;
  for (const NS::UInteger limit : {static_cast<NS::UInteger>(kernel.max_total_threads), max_threads}) {
    if (limit > o.max_threads_per_threadgroup) {
      set_error(error, "kernel " + info.kernel + ": max total threads " + std::to_string(limit) +
                           " is above the device's " + std::to_string(o.max_threads_per_threadgroup));
      return nullptr;
    }
    if (limit) info.max_threads = std::min(info.max_threads, static_cast<uint32_t>(limit));
  }
  auto* pipeline = new ComputePipelineStateObject;
  pipeline->device = device;
  pipeline->label = label;
  pipeline->info = std::make_shared<const PipelineInfo>(std::move(info));
  return pipeline;
}

}  // namespace
}  // namespace softmetal

namespace MTL {
using namespace softmetal;

CompileOptions* CompileOptions::alloc() { return new CompileOptionsObject; }
CompileOptions* CompileOptions::init() { return this; }
void CompileOptions::setLanguageVersion(LanguageVersion version) {
  static_cast<CompileOptionsObject*>(this)->language = version;
}
void CompileOptions::setMathMode(MathMode) {}
void CompileOptions::setMathFloatingPointFunctions(MathFloatingPointFunctions) {}
void CompileOptions::setFastMathEnabled(bool) {}
void CompileOptions::setPreprocessorMacros(const NS::Dictionary*) {}

FunctionConstantValues* FunctionConstantValues::alloc() { return new FunctionConstantValuesObject; }
FunctionConstantValues* FunctionConstantValues::init() { return this; }
void FunctionConstantValues::setConstantValue(const void* value, DataType type, NS::UInteger index) {
  if (const auto v = constant_value(value, type)) as(this)->values.by_index[static_cast<int>(index)] = *v;
}
void FunctionConstantValues::setConstantValue(const void* value, DataType type, const NS::String* name) {
  if (const auto v = constant_value(value, type)) as(this)->values.by_name[name->utf8String()] = *v;
}
void FunctionConstantValues::reset() { as(this)->values = {}; }

FunctionDescriptor* FunctionDescriptor::alloc() { return new FunctionDescriptorObject; }
FunctionDescriptor* FunctionDescriptor::init() { return this; }
FunctionDescriptor* FunctionDescriptor::functionDescriptor() { return alloc()->init()->autorelease(); }
void FunctionDescriptor::setName(const NS::String* name) { as(this)->name = name->utf8String(); }
void FunctionDescriptor::setSpecializedName(const NS::String* name) { as(this)->specialized_name = name->utf8String(); }
void FunctionDescriptor::setConstantValues(const FunctionConstantValues* values) {
  as(this)->constants = values ? as(values)->values : ConstantValues{};
}

Library* Device::newLibrary(const NS::String* source, const CompileOptions* options, NS::Error** error) {
  Files files = files_in(source->utf8String());
  if (files.empty()) {
    set_error(error, "the source is not the text of any file that softmetal_library compiled into this program");
    return nullptr;
  }
  if (options && static_cast<const CompileOptionsObject*>(options)->language < LanguageVersion4_0 &&
      uses_tensors(files)) {
    set_error(error, "tensors need language version 4.0; the compile options ask for an older one");
    return nullptr;
  }
  return open_library(as(this), std::move(files), "source");
}
Library* Device::newLibrary(const NS::String* filepath, NS::Error** error) {
  std::string name = filepath->utf8String();
  name = name.substr(name.rfind('/') + 1);
  if (const size_t dot = name.find(".metallib"); dot != std::string::npos) name.resize(dot);
  Files files = files_of(name);
  if (files.empty()) {
    std::string known;
    for (const std::string& n : library_names()) known += (known.empty() ? "" : ", ") + n;
    set_error(error, "no library \"" + name + "\" in this program; there are: " + known);
    return nullptr;
  }
  return open_library(as(this), std::move(files), name);
}
Library* Device::newLibrary(const NS::URL* url, NS::Error** error) {
  auto path = NS::TransferPtr(NS::String::alloc()->init(url->fileSystemRepresentation(), NS::UTF8StringEncoding));
  return newLibrary(path.get(), error);
}
Library* Device::newDefaultLibrary() {
  Files files;
  for (const std::string& name : library_names()) files.merge(files_of(name));
  return files.empty() ? nullptr : open_library(as(this), std::move(files), "default");
}

Function* Library::newFunction(const NS::String* functionName) {
  return make_function(as(this), functionName->utf8String(), nullptr, nullptr);
}
Function* Library::newFunction(const NS::String* name, const FunctionConstantValues* constantValues,
                               NS::Error** error) {
  return make_function(as(this), name->utf8String(), constantValues ? &as(constantValues)->values : nullptr, error);
}
Function* Library::newFunction(const FunctionDescriptor* descriptor, NS::Error** error) {
  const auto* d = as(descriptor);
  Function* f = make_function(as(this), d->name, &d->constants, error);
  if (f && !d->specialized_name.empty()) as(f)->name = d->specialized_name;
  return f;
}
NS::Array* Library::functionNames() const {
  NS::Array* names = NS::Array::array();
  for (const std::string& name : kernel_names(as(this)->files)) names->add(string_of(name));
  return names;
}
NS::String* Library::label() const { return string_of(as(this)->label); }
void Library::setLabel(const NS::String* label) { as(this)->label = label->utf8String(); }
Device* Library::device() const { return as(this)->device; }

NS::String* Function::name() const { return string_of(as(this)->name); }
NS::String* Function::label() const { return string_of(as(this)->label); }
void Function::setLabel(const NS::String* label) { as(this)->label = label->utf8String(); }
FunctionType Function::functionType() const { return FunctionTypeKernel; }
Device* Function::device() const { return as(this)->device; }

ComputePipelineDescriptor* ComputePipelineDescriptor::alloc() { return new ComputePipelineDescriptorObject; }
ComputePipelineDescriptor* ComputePipelineDescriptor::init() { return this; }
void ComputePipelineDescriptor::setComputeFunction(const Function* f) {
  as(this)->function = NS::RetainPtr(const_cast<Function*>(f));
}
void ComputePipelineDescriptor::setLabel(const NS::String* label) { as(this)->label = label->utf8String(); }
void ComputePipelineDescriptor::setMaxTotalThreadsPerThreadgroup(NS::UInteger n) { as(this)->max_threads = n; }
void ComputePipelineDescriptor::setThreadGroupSizeIsMultipleOfThreadExecutionWidth(bool) {}

ComputePipelineState* Device::newComputePipelineState(const Function* computeFunction, NS::Error** error) {
  return make_pipeline(as(this), computeFunction, 0, as(computeFunction)->name, error);
}
ComputePipelineState* Device::newComputePipelineState(const ComputePipelineDescriptor* descriptor, PipelineOption,
                                                      const AutoreleasedComputePipelineReflection*, NS::Error** error) {
  const auto* d = as(descriptor);
  return make_pipeline(as(this), d->function.get(), d->max_threads, d->label, error);
}

NS::UInteger ComputePipelineState::maxTotalThreadsPerThreadgroup() const { return as(this)->info->max_threads; }
NS::UInteger ComputePipelineState::threadExecutionWidth() const { return kSimdWidth; }
NS::UInteger ComputePipelineState::staticThreadgroupMemoryLength() const {
  return as(this)->info->static_threadgroup_bytes;
}
NS::String* ComputePipelineState::label() const { return string_of(as(this)->label); }
Device* ComputePipelineState::device() const { return as(this)->device; }

}  // namespace MTL
