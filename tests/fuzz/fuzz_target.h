#pragma once
// Fuzz targets, one parser of outside data each. Two ways to run one:
//   - libFuzzer (clang, -DCALLA_FUZZ=ON): LLVMFuzzerTestOneInput is the entry;
//   - replay (any compiler, part of the tests): replay_main.cc runs it over its seeds and over random damage to them.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace calla {

// Valid inputs to start from. Defined by each target beside its entry.
std::vector<std::string> fuzz_seeds();

}  // namespace calla
