// Every kernel of the libraries is dispatched somewhere, and each dispatch binds exactly the buffers that its kernel takes,
// with parameter structs of the kernel's own size: softmetal's strict bindings, over the stages with each mechanism
// switched off in turn. And each kernel states the threads that it is launched with: without that a compiler that spends
// many registers on a thread makes a pipeline that takes fewer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "backend/metal/bandwidth.h"
#include "tests/backend/expect_conforms.h"
#include "tests/backend/metal_device.h"

namespace calla {
namespace {

std::set<std::string> kernels_of(const char* library_name) {
  const metal::AutoreleaseScope pool;
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  auto library = NS::TransferPtr(device->newLibrary(metal::ns_string(library_name), nullptr));
  std::set<std::string> names;
  if (!library) return names;
  NS::Array* all = library->functionNames();
  for (NS::UInteger i = 0; i < all->count(); ++i) names.insert(all->object<NS::String>(i)->utf8String());
  return names;
}

TEST(MetalBindings, EveryKernelIsDispatchedWithWhatItTakes) {
  std::set<std::string> dispatched;
  const auto collect = [&] {
    for (const auto& record : softmetal::take_dispatches()) {
      if (!dispatched.insert(record.kernel).second) continue;
      const bool half_tile = record.kernel.find("_qmm_16") != std::string::npos;  // one text for both tiles
      EXPECT_EQ(record.max_threads, record.threads.x * (half_tile ? 2 : 1)) << record.kernel;
    }
  };
  softmetal::record_dispatches(true);
  const RandomModel model(tiny_shape(4), 41);
  std::vector<std::vector<std::string>> ablations = {{}};
  for (const std::string& name : metal::ablation_names()) ablations.push_back({name});
  for (const char* chip : kMetalForms) {
    const MetalDevice device(chip);
    for (const auto& ablate : ablations) {
      SCOPED_TRACE(std::string(chip) + (ablate.empty() ? "" : " without " + ablate[0]));
      ConformanceOptions options;
      options.backend.ablate = ablate;
      options.batches = {{"decode at 600", {{600, 1}}}, {"prefill 33", {{0, 33}}}};
      expect_conforms(metal_factory(), model, options);
      collect();
    }
    // 16-row tiles, 32-row tiles of the experts, copies of states, the probe of the memory.
    ConformanceOptions options;
    options.batches = {{"prefill 9", {{0, 9}}}, {"prefill 70", {{0, 70}}}};
    options.stages = {"project_gdn", "experts_up", "experts_down"};
    expect_conforms(metal_factory(), model, options);
    metal::MetalBackend backend(model.shape(), model.weights(), BackendOptions{});
    backend.allocate_state({2, 2});
    backend.clear_recurrent(0);
    backend.copy_recurrent(0, 1);
    backend.copy_kv_page(0, 1, 5);
    backend.set_token_counts(0, {}, {});
    metal::probe_read_bandwidth();
    collect();
  }
  softmetal::record_dispatches(false);
  for (const char* library : {"calla_kernels.metallib", "calla_tensor_kernels.metallib"}) {
    const std::set<std::string> kernels = kernels_of(library);
    EXPECT_FALSE(kernels.empty()) << library;
    for (const std::string& kernel : kernels) EXPECT_THAT(dispatched, ::testing::Contains(kernel));
  }
}

}  // namespace
}  // namespace calla
