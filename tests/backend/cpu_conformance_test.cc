// Every stage of the cpu backend against the reference, for each instruction set that this machine has.
#include "tests/backend/expect_conforms.h"

namespace calla {
namespace {

std::vector<std::string> instruction_sets() { return {"", "avx512"}; }

BackendOptions options_without(const std::string& ablate, int threads = 2) {
  BackendOptions options;
  options.threads = threads;
  if (!ablate.empty()) options.ablate = {ablate};
  return options;
}

std::vector<BatchCase> few_batches() {
  return {{"decode of 3", {{0, 1}, {77, 1}, {192, 1}}},
          {"prefill 33 at 130", {{130, 33}}},
          {"ragged", {{3, 5}, {64, 1}, {60, 17}}}};
}

// 16-bit activations: about 1e-5 of the largest input of a group. Keys and values are rounded to fp16: 2e-4.
TEST(CpuConformance, DefaultPrecision) {
  const RandomModel model(tiny_shape(4), 7);
  for (const std::string& ablate : instruction_sets()) {
    SCOPED_TRACE("without " + ablate);
    ConformanceOptions options;
    options.backend = options_without(ablate);
    options.tolerance = 3e-4;
    expect_conforms(create_cpu_backend, model, options);
  }
}

TEST(CpuConformance, FullPrecision) {
  const RandomModel model(tiny_shape(4), 9);
  for (const std::string& ablate : instruction_sets()) {
    SCOPED_TRACE("without " + ablate);
    ConformanceOptions options;
    options.backend = options_without(ablate);
    options.backend.full_precision = true;
    options.tolerance = 1e-5;
    options.batches = few_batches();
    expect_conforms(create_cpu_backend, model, options);
  }
}

TEST(CpuConformance, OtherFormats) {
  for (const auto& [bits, group] : {std::pair{4, 32}, {4, 128}, {8, 32}, {8, 64}, {8, 128}}) {
    ModelShape shape = tiny_shape(4);
    shape.expert_width = shape.shared_expert_width = 128;
    shape.vocab = 500;
    const RandomModel model(shape, 10, bits, group);
    for (const std::string& ablate : instruction_sets())
      for (bool full : {false, true}) {
        SCOPED_TRACE(std::to_string(bits) + " bits, group " + std::to_string(group) + ", without " + ablate);
        ConformanceOptions options;
        options.backend = options_without(ablate, 1);
        options.backend.full_precision = full;
        options.tolerance = full ? 1e-5 : 2e-4;
        options.stages = {"embed", "project_gdn", "project_residual", "route", "experts_up", "experts_down", "head"};
        options.batches = {{"decode at 5", {{5, 1}}}, {"prefill 18", {{0, 18}}}};
        expect_conforms(create_cpu_backend, model, options);
      }
  }
}

// Widths that are no multiple of the tiles.
TEST(CpuConformance, OddShapes) {
  ModelShape shape = tiny_shape(4);
  shape.hidden = 192;
  shape.vocab = 1003;
  shape.q_heads = 16;
  shape.kv_heads = 2;
  shape.gdn_key_heads = 1;
  shape.gdn_value_heads = 3;
  shape.experts = 19;
  shape.expert_width = 192;
  shape.shared_expert_width = 64;
  const RandomModel model(shape, 11);
  for (const std::string& ablate : instruction_sets()) {
    SCOPED_TRACE("without " + ablate);
    ConformanceOptions options;
    options.backend = options_without(ablate);
    options.tolerance = 3e-4;
    options.batches = few_batches();
    expect_conforms(create_cpu_backend, model, options);
  }
}

}  // namespace
}  // namespace calla
