// The JSON files of a checkpoint with random weights, and the shapes that have names.
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/synthetic.h"

namespace calla {
namespace {

using nlohmann::ordered_json;

constexpr int kAttentionInterval = 4;  // every fourth layer is full attention

ModelShape qwen36_35b_a3b() {
  ModelShape shape;
  shape.hidden = 2048;
  shape.layer_kinds.resize(40);
  shape.vocab = 248320;
  shape.q_heads = 16;
  shape.kv_heads = 2;
  shape.rotary_dim = 64;
  shape.rope_theta = 1e7f;
  shape.gdn_key_heads = 16;
  shape.gdn_value_heads = 32;
  shape.experts = 256;
  shape.expert_width = 512;
  shape.shared_expert_width = 512;
  shape.max_context = 262144;
  return shape;
}

ModelShape calla_tiny() {
  ModelShape shape;
  shape.hidden = 256;
  shape.layer_kinds.resize(8);
  shape.vocab = 4096;
  shape.q_heads = 8;
  shape.kv_heads = 1;
  shape.rotary_dim = 64;
  shape.rope_theta = 1e7f;
  shape.gdn_key_heads = 2;
  shape.gdn_value_heads = 4;
  shape.experts = 32;
  shape.expert_width = 64;
  shape.shared_expert_width = 64;
  shape.max_context = 32768;
  return shape;
}

struct NamedShape {
  const char* name;
  ModelShape (*make)();
};
constexpr NamedShape kShapes[] = {{"qwen3.6-35b-a3b", qwen36_35b_a3b}, {"calla-tiny", calla_tiny}};

// <|im_end|> and <|endoftext|> of the two vocabularies; none for others.
std::vector<TokenId> end_tokens(int vocab) {
  if (vocab == qwen36_35b_a3b().vocab) return {248046, 248044};
  if (vocab == calla_tiny().vocab) return {4089, 4087};
  return {};
}

ordered_json quantisation(const SyntheticOptions& options) {
  ordered_json out = {{"group_size", options.quant->group}, {"bits", options.quant->bits}, {"mode", "affine"}};
  for (int i = 0; i < options.shape.layers(); ++i) {
    const std::string mlp = "language_model.model.layers." + std::to_string(i) + ".mlp.";
    for (const char* name : {"gate", "shared_expert_gate"})
      out[mlp + name] = {{"group_size", options.router_quant.group}, {"bits", options.router_quant.bits}};
  }
  return out;
}

ordered_json text_config(const ModelShape& shape) {
  ordered_json layer_types = ordered_json::array();
  for (const LayerKind kind : shape.layer_kinds)
    layer_types.push_back(kind == LayerKind::kAttention ? "full_attention" : "linear_attention");
  const double fraction = static_cast<double>(shape.rotary_dim) / kHeadDim;
  return {
      {"attention_bias", false},
      {"attn_output_gate", true},
      {"dtype", "bfloat16"},
      {"full_attention_interval", kAttentionInterval},
      {"head_dim", kHeadDim},
      {"hidden_act", "silu"},
      {"hidden_size", shape.hidden},
      {"layer_types", layer_types},
      {"linear_conv_kernel_dim", kConvWidth},
      {"linear_key_head_dim", kGdnHeadDim},
      {"linear_num_key_heads", shape.gdn_key_heads},
      {"linear_num_value_heads", shape.gdn_value_heads},
      {"linear_value_head_dim", kGdnHeadDim},
      {"max_position_embeddings", shape.max_context},
      {"model_type", "qwen3_5_moe_text"},
      {"moe_intermediate_size", shape.expert_width},
      {"num_attention_heads", shape.q_heads},
      {"num_experts", shape.experts},
      {"num_experts_per_tok", kExpertsPerToken},
      {"num_hidden_layers", shape.layers()},
      {"num_key_value_heads", shape.kv_heads},
      {"rms_norm_eps", 1e-6},
      {"rope_parameters",
       {{"partial_rotary_factor", fraction}, {"rope_theta", shape.rope_theta}, {"rope_type", "default"}}},
      {"shared_expert_intermediate_size", shape.shared_expert_width},
      {"tie_word_embeddings", false},
      {"vocab_size", shape.vocab},
  };
}

}  // namespace

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const NamedShape& shape : kShapes) names.emplace_back(shape.name);
  return names;
}

ModelShape named_shape(std::string_view name, int layers) {
  for (const NamedShape& named : kShapes) {
    if (named.name != name) continue;
    ModelShape shape = named.make();
    if (layers > 0) shape.layer_kinds.resize(static_cast<size_t>(layers));
    for (size_t i = 0; i < shape.layer_kinds.size(); ++i)
      shape.layer_kinds[i] = (i + 1) % kAttentionInterval == 0 ? LayerKind::kAttention : LayerKind::kGatedDeltaNet;
    return shape;
  }
  std::string known;
  for (const std::string& each : shape_names()) known += (known.empty() ? "" : ", ") + each;
  throw UsageError("no shape is named \"" + std::string(name) + "\"; there are: " + known);
}

std::string synthetic_config(const SyntheticOptions& options) {
  ordered_json config = {{"architectures", {"Qwen3_5MoeForConditionalGeneration"}}, {"model_type", "qwen3_5_moe"}};
  if (const std::vector<TokenId> eos = end_tokens(options.shape.vocab); !eos.empty()) config["eos_token_id"] = eos;
  if (options.quant) {
    config["quantization"] = quantisation(options);
    config["quantization_config"] = config["quantization"];
  }
  config["text_config"] = text_config(options.shape);
  config["tie_word_embeddings"] = false;
  return config.dump(4) + "\n";
}

std::string synthetic_generation_config(const SyntheticOptions& options) {
  ordered_json config = {{"do_sample", true}, {"temperature", 0.6}, {"top_k", 20}, {"top_p", 0.95}};
  if (const std::vector<TokenId> eos = end_tokens(options.shape.vocab); !eos.empty()) config["eos_token_id"] = eos;
  return config.dump(4) + "\n";
}

}  // namespace calla
