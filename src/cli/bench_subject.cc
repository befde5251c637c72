#include "cli/bench_subject.h"

#include "backend/weights_outline.h"
#include "base/error.h"
#include "checkpoint/machine_memory.h"
#include "cli/terminal.h"

namespace calla {
namespace {

constexpr uint64_t kSeed = 1;

double bytes_of(const ModelWeights& weights) {
  double bytes = 0;
  for_each_matrix(weights, [&](const WeightMatrix& matrix) { bytes += static_cast<double>(matrix.bytes()); });
  return bytes;
}

}  // namespace

BenchSubject::BenchSubject(const ModelOptions& options, const std::string& synthetic, int layers)
    : backend_(choose_backend(options.backend)) {
  if (synthetic.empty()) {
    const std::filesystem::path directory = find_model(options.model);
    loaded_.emplace(load_model(directory));
    name_ = std::filesystem::weakly_canonical(directory).filename().string();
    shape_ = loaded_->config.shape;
    return;
  }
  shape_ = named_shape(synthetic, layers);
  name_ = synthetic + " (random weights, " + std::to_string(shape_.layers()) + " layers)";
  outline_ = outline_weights(shape_, kSeed);
  if (backend_.fills_outlines) return;
  const double needed = bytes_of(outline_), available = static_cast<double>(machine_memory().available);
  if (available > 0 && needed > available)
    throw UsageError("--synthetic " + synthetic + ": " + std::to_string(shape_.layers()) + " layers of weights take " +
                     human_bytes(needed) + ", but only " + human_bytes(available) +
                     " are free; fewer --layers fit, or `calla make-checkpoint` and --model, which maps a file");
  random_.emplace(shape_, kSeed);
}

const ModelWeights& BenchSubject::weights() const {
  if (loaded_) return loaded_->weights;
  return random_ ? random_->weights() : outline_;
}

std::unique_ptr<Backend> BenchSubject::make_backend(const BackendOptions& options) const {
  return create_backend(backend_.name, shape_, weights(), options);
}

}  // namespace calla
