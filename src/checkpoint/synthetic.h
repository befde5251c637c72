#pragma once
// Checkpoints with random weights: real sizes and the real file layout, for measuring speed and for tests. The weights
// are scaled so that activations keep sane magnitudes through all layers; what the model says means nothing.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config.h"
#include "checkpoint/writer.h"
#include "model/shape.h"

namespace calla {

// The shapes by name: "qwen3.6-35b-a3b", "calla-tiny".
std::vector<std::string> shape_names();
// `layers` 0: as many as the model has; otherwise the pattern of every fourth layer attention is cut or continued.
// Throws UsageError for an unknown name.
ModelShape named_shape(std::string_view name, int layers = 0);

struct SyntheticOptions {
  ModelShape shape;
  std::optional<QuantSpec> quant = QuantSpec{4, 64};  // of most matrices; nullopt: all in bf16
  QuantSpec router_quant = {8, 64};                   // of the router and the shared expert's gate
  uint64_t seed = 0;
  std::filesystem::path tokenizer_from;  // a directory to copy the tokenizer's files from; may be empty
  uint64_t max_shard_bytes = uint64_t{5} << 30;
};

// What a random tensor is made of; decides the distribution of its elements.
enum class SyntheticKind : uint8_t {
  kCodes,   // uniform codes
  kScales,  // of either sign, within 25 % of one size
  kBiases,  // minus the middle code times the scale: the weights' mean is 0
  kPlain,   // bf16 weights, uniform around 0
  kGamma,   // norm weights around 1
  kALog,    // log of uniform [1, 16]: the decay rates of a freshly initialised model
  kDtBias,  // inverse softplus of a log-uniform step in [0.001, 0.1]
};

struct SyntheticTensor {
  TensorSpec spec;
  SyntheticKind kind = SyntheticKind::kCodes;
  uint64_t key = 0;     // seeds the elements; a matrix' scales and biases share it
  float deviation = 0;  // of the weights (kScales, kBiases, kPlain)
  int bits = 4;         // of the codes that scales and biases belong to
};

// The tensors of the checkpoint, in the order of the file: embedding, layers, norm, head.
std::vector<SyntheticTensor> synthetic_tensors(const SyntheticOptions& options);

// Writes bytes [offset, offset + out.size()) of a tensor, both multiples of 8 or up to the tensor's end. Any part can
// be made on its own and comes out the same.
void fill_synthetic(const SyntheticTensor& tensor, uint64_t offset, std::span<std::byte> out);

// config.json and generation_config.json, as an MLX conversion writes them.
std::string synthetic_config(const SyntheticOptions& options);
std::string synthetic_generation_config(const SyntheticOptions& options);

// Writes the whole directory; `directory` must not exist yet, or be empty, and appears when all is done. Throws
// CheckpointError, for instance when the disk has not enough room or another process is making it. Cost: about as long as the disk takes.
void make_checkpoint(const SyntheticOptions& options, const std::filesystem::path& directory,
                     const WriteProgress& progress = {});

}  // namespace calla
