#pragma once
// Stage conformance: runs each stage of a backend on random inputs beside the reference and compares every
// slot and state that the stage writes. Used by the tests of every backend and by `calla selftest` on the
// user's machine.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "selftest/random_model.h"

namespace calla {

// Makes the backend under test for a model. The options' replay_steps is off.
using BackendFactory =
    std::function<std::unique_ptr<Backend>(const ModelShape&, const ModelWeights&, const BackendOptions&)>;

// One way to fill a batch: the position and the number of rows of each sequence.
struct BatchCase {
  std::string name;
  struct Rows {
    int position;
    int rows;
  };
  std::vector<Rows> sequences;
};

// Decode and prefill, one and several sequences, sizes around the tiles' edges.
std::vector<BatchCase> default_batch_cases();

struct StageResult {
  std::string stage;  // "mix_gdn"
  std::string what;   // the slot or state compared
  std::string batch;  // BatchCase::name
  double error = 0;   // ||out - reference|| / ||reference||; for `pick`, the share of differing tokens
  double tolerance = 0;
  bool ok = false;
};

struct ConformanceOptions {
  double tolerance = 1e-2;  // bf16 operands; 1e-5 for full precision
  BackendOptions backend;
  std::vector<BatchCase> batches = default_batch_cases();
  std::vector<std::string> stages;  // empty: all
  uint64_t seed = 1;
  BackendFactory reference;  // what to compare with; empty: the reference backend
};

// Runs the cases for layer 0..n of `model` that differ in kind (the first of each). Never throws for a wrong
// result; throws what the backend throws.
std::vector<StageResult> run_conformance(const BackendFactory& factory, const RandomModel& model,
                                         const ConformanceOptions& options);

}  // namespace calla
