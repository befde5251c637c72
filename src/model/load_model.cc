#include "model/load_model.h"

#include <utility>

#include "model/bind_weights.h"

namespace calla {

LoadedModel load_model(const std::filesystem::path& directory) {
  ModelConfig config = read_model_config(directory);
  Checkpoint checkpoint = Checkpoint::open(directory);
  BoundWeights bound = bind_weights(checkpoint, config.shape, config.quant);
  return {std::move(checkpoint), std::move(config), std::move(bound.weights), std::move(bound.warnings),
          bound.copied_bytes};
}

}  // namespace calla
