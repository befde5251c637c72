#pragma once
// BenchSubject: what a benchmark measures: a checkpoint's weights, or random ones of a named shape.
#include <memory>
#include <optional>
#include <string>

#include "backend/create.h"
#include "cli/options.h"
#include "model/load_model.h"
#include "selftest/random_model.h"

namespace calla {

class BenchSubject {
 public:
  // `synthetic`: the name of a shape (see shape_names()) with `layers` layers (0: all), or empty for the checkpoint that
  // `options` name. Random weights are made on the device where the backend can, else in this machine's memory. Throws
  // CheckpointError or UsageError, also if the weights do not fit in memory.
  BenchSubject(const ModelOptions& options, const std::string& synthetic, int layers);

  const std::string& name() const { return name_; }
  const ModelShape& shape() const { return shape_; }
  const ModelWeights& weights() const;
  // A backend of its own, as `options` say. The subject must outlive it.
  std::unique_ptr<Backend> make_backend(const BackendOptions& options) const;

 private:
  std::string name_;
  const BackendInfo backend_;
  std::optional<LoadedModel> loaded_;
  std::optional<RandomModel> random_;
  ModelWeights outline_;
  ModelShape shape_;
};

}  // namespace calla
