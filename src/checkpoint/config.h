#pragma once
// config.json and generation_config.json: what the checkpoint says about itself, checked.
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/shape.h"

namespace calla {

// Affine quantisation of one matrix: `bits` per code, one scale and one bias per `group` inputs.
struct QuantSpec {
  int bits = 4;
  int group = 64;
  bool operator==(const QuantSpec&) const = default;
};

struct QuantConfig {
  std::optional<QuantSpec> defaults;  // absent: the checkpoint says nothing of quantisation
  // By canonical module name ("layers.0.mlp.gate"); nullopt: this one is not quantised.
  std::map<std::string, std::optional<QuantSpec>, std::less<>> overrides;

  // For a canonical module name.
  std::optional<QuantSpec> find(std::string_view module) const {
    const auto found = overrides.find(module);
    return found == overrides.end() ? defaults : found->second;
  }
};

// Sampling defaults of generation_config.json; absent where the file says nothing.
struct GenerationDefaults {
  std::optional<bool> do_sample;
  std::optional<float> temperature;
  std::optional<int> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> presence_penalty;
  std::optional<float> repetition_penalty;
};

struct ModelConfig {
  std::string architecture;  // "Qwen3_5MoeForConditionalGeneration"
  std::string model_type;    // "qwen3_5_moe"
  ModelShape shape;
  QuantConfig quant;
  std::vector<TokenId> eos;  // tokens that end an answer: generation_config.json's, else config.json's; may be empty
  GenerationDefaults generation;
};

// Reads config.json and, if there is one, generation_config.json of a checkpoint directory. Throws CheckpointError
// that names file and field when something is missing, out of range, or not what the kernels are made for.
ModelConfig read_model_config(const std::filesystem::path& directory);

// The same from text; `file_name` is for messages.
ModelConfig parse_config(std::string_view text, const std::string& file_name);
// Adds sampling defaults, and end tokens in place of the config's.
void parse_generation_config(std::string_view text, const std::string& file_name, ModelConfig& config);

}  // namespace calla
