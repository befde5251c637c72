#include "checkpoint/config.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/is_there.h"
#include "checkpoint/config_reader.h"
#include "checkpoint/describe.h"
#include "checkpoint/json_file.h"
#include "checkpoint/tensor_names.h"

namespace calla {
namespace {

using nlohmann::json;

constexpr size_t kMaxConfigBytes = 4u << 20;
constexpr const char* kSupportedModel =
    "Calla runs Qwen3.6-35B-A3B and models of its architecture: model_type \"qwen3_5_moe\" "
    "(Qwen3_5MoeForConditionalGeneration or Qwen3_5MoeForCausalLM)";

// Sizes that no kernel depends on still have bounds, so that products of them fit and mistakes are found early.
constexpr int kMaxHidden = 1 << 16;
constexpr int kMaxLayers = 1024;
constexpr int kMaxVocab = 1 << 22;
constexpr int kMaxHeads = 512;
constexpr int kMaxExperts = 4096;
constexpr int kMaxContext = 1 << 24;
constexpr int kWidthMultiple = 64;  // hidden size and expert widths: whole quantisation groups

bool is_known_type(const std::string& type) { return type == "qwen3_5_moe" || type == "qwen3_5_moe_text"; }

void check_architecture(const FieldReader& top, ModelConfig& config) {
  config.model_type = top.text_or("model_type", "");
  if (top.has("architectures")) {
    const json& names = top.at("architectures");
    if (!names.is_array() || names.empty() || !names[0].is_string())
      top.fail_as_damaged("architectures", "expected a list of names, found " + FieldReader::show(names));
    config.architecture = names[0].get<std::string>();
  }
  const bool type_known = is_known_type(config.model_type);
  const bool architecture_known =
      config.architecture == "Qwen3_5MoeForConditionalGeneration" || config.architecture == "Qwen3_5MoeForCausalLM";
  if (!config.model_type.empty() && !type_known)
    top.fail("model_type", "\"" + describe_name(config.model_type) + "\" is not supported: " + kSupportedModel);
  if (!config.architecture.empty() && !architecture_known)
    top.fail("architectures", "\"" + describe_name(config.architecture) + "\" is not supported: " + kSupportedModel);
  if (!type_known && !architecture_known) top.fail("model_type", std::string("missing: ") + kSupportedModel);
}

// A known file may still hold another text model, whose sizes happen to fit.
void check_text_model(const FieldReader& text) {
  const std::string type = text.text_or("model_type", "qwen3_5_moe_text");
  if (!is_known_type(type))
    text.fail("model_type", "\"" + describe_name(type) +
                                "\" is not supported: the text model must be \"qwen3_5_moe_text\"; was this "
                                "config.json made for these weights?");
}

// What the architecture leaves open and Calla implements in one way only.
void check_variants(const FieldReader& top, const FieldReader& text) {
  text.require_boolean("attn_output_gate", true, true);
  text.require_boolean("attention_bias", false, false);
  text.require_boolean("norm_topk_prob", true, true);
  text.require_boolean("tie_word_embeddings", top.boolean_or("tie_word_embeddings", false), false);
  if (const std::string act = text.text_or("hidden_act", "silu"); act != "silu")
    text.fail("hidden_act", "\"" + describe_name(act) + "\" is not supported: Calla implements \"silu\"");
  if (text.has("mlp_only_layers") && !text.at("mlp_only_layers").empty())
    text.fail("mlp_only_layers", "layers without experts are not supported");
  if (text.integer_or("decoder_sparse_step", 1, 0, kMaxLayers) != 1)
    text.fail("decoder_sparse_step", "layers without experts are not supported: it must be 1");
}

std::vector<LayerKind> read_layer_kinds(const FieldReader& text) {
  const int layers = text.integer("num_hidden_layers", 1, kMaxLayers);
  std::vector<LayerKind> kinds;
  if (!text.has("layer_types")) {
    const int interval = text.integer_or("full_attention_interval", 4, 1, kMaxLayers);
    for (int i = 0; i < layers; ++i)
      kinds.push_back((i + 1) % interval == 0 ? LayerKind::kAttention : LayerKind::kGatedDeltaNet);
    return kinds;
  }
  const json& types = text.at("layer_types");
  if (!types.is_array()) text.fail_as_damaged("layer_types", "expected a list, found " + FieldReader::show(types));
  if (types.size() != static_cast<size_t>(layers))
    text.fail_as_damaged("layer_types", "has " + std::to_string(types.size()) + " entries, but num_hidden_layers is " +
                                            std::to_string(layers));
  for (const json& type : types) {
    if (type == "linear_attention") {
      kinds.push_back(LayerKind::kGatedDeltaNet);
    } else if (type == "full_attention") {
      kinds.push_back(LayerKind::kAttention);
    } else {
      text.fail("layer_types",
                FieldReader::show(type) + " is not supported: a layer is \"linear_attention\" or \"full_attention\"");
    }
  }
  return kinds;
}

void require_multiple(const FieldReader& text, const char* name, int value, int of) {
  if (value % of != 0)
    text.fail(name, std::to_string(value) + " is not supported: it must be a multiple of " + std::to_string(of));
}

void read_heads(const FieldReader& text, ModelShape& shape) {
  text.require_integer("head_dim", kHeadDim);
  shape.q_heads = text.integer("num_attention_heads", 1, kMaxHeads);
  shape.kv_heads = text.integer("num_key_value_heads", 1, kMaxHeads);
  if (shape.q_heads != kGqaFactor * shape.kv_heads)
    text.fail("num_attention_heads", std::to_string(shape.q_heads) + " query heads on " +
                                         std::to_string(shape.kv_heads) +
                                         " key/value heads are not supported: " + "Calla's kernels are made for " +
                                         std::to_string(kGqaFactor) + " query heads per key/value head");
  text.require_integer("linear_key_head_dim", kGdnHeadDim);
  text.require_integer("linear_value_head_dim", kGdnHeadDim);
  text.require_integer("linear_conv_kernel_dim", kConvWidth);
  shape.gdn_key_heads = text.integer("linear_num_key_heads", 1, kMaxHeads);
  shape.gdn_value_heads = text.integer("linear_num_value_heads", 1, kMaxHeads);
  if (shape.gdn_value_heads % shape.gdn_key_heads != 0)
    text.fail_as_damaged("linear_num_value_heads", std::to_string(shape.gdn_value_heads) +
                                                       " is not a multiple of the " +
                                                       std::to_string(shape.gdn_key_heads) + " key heads");
}

// rope_parameters of newer configs, or rope_theta and partial_rotary_factor beside the other sizes.
void read_rope(const FieldReader& text, ModelShape& shape) {
  const FieldReader rope = text.has("rope_parameters") ? text.object("rope_parameters") : text;
  const auto holder = [&](const char* name) -> const FieldReader& {
    return rope.has(name) || !text.has(name) ? rope : text;
  };
  const FieldReader& fraction = holder("partial_rotary_factor");
  shape.rope_theta = static_cast<float>(holder("rope_theta").number("rope_theta", 2, 1e12));
  const double dim = kHeadDim * fraction.number("partial_rotary_factor", 0, 1);
  shape.rotary_dim = static_cast<int>(std::lround(dim));
  if (shape.rotary_dim < 2 || shape.rotary_dim % 2 != 0 || std::abs(dim - shape.rotary_dim) > 1e-6)
    fraction.fail_as_damaged("partial_rotary_factor", "expected a share of " + std::to_string(kHeadDim) +
                                                          " dimensions that is an even number of them, found " +
                                                          FieldReader::show(fraction.at("partial_rotary_factor")));

  const auto require_default = [](const FieldReader& object, const char* name) {
    if (const std::string type = object.text_or(name, "default"); type != "default" && type != "mrope")
      object.fail(name, "\"" + describe_name(type) + "\" is not supported: Calla implements plain RoPE (\"default\")");
  };
  if (text.has("rope_parameters")) require_default(rope, "rope_type");
  if (text.has("rope_scaling")) {
    const FieldReader scaling = text.object("rope_scaling");
    require_default(scaling, "rope_type");
    require_default(scaling, "type");
  }
}

ModelShape read_shape(const FieldReader& text) {
  ModelShape shape;
  shape.hidden = text.integer("hidden_size", kWidthMultiple, kMaxHidden);
  require_multiple(text, "hidden_size", shape.hidden, kWidthMultiple);
  shape.layer_kinds = read_layer_kinds(text);
  shape.vocab = text.integer("vocab_size", 1, kMaxVocab);
  read_heads(text, shape);
  read_rope(text, shape);
  text.require_integer("num_experts_per_tok", kExpertsPerToken);
  shape.experts = text.integer("num_experts", kExpertsPerToken, kMaxExperts);
  shape.expert_width = text.integer("moe_intermediate_size", kWidthMultiple, kMaxHidden);
  require_multiple(text, "moe_intermediate_size", shape.expert_width, kWidthMultiple);
  shape.shared_expert_width = text.integer("shared_expert_intermediate_size", kWidthMultiple, kMaxHidden);
  require_multiple(text, "shared_expert_intermediate_size", shape.shared_expert_width, kWidthMultiple);
  shape.rms_eps = static_cast<float>(text.number("rms_norm_eps", 1e-12, 1e-2));
  shape.max_context = text.integer("max_position_embeddings", 1, kMaxContext);
  return shape;
}

QuantSpec read_quant_spec(const FieldReader& spec) {
  QuantSpec out;
  out.bits = spec.integer("bits", 1, 64);
  if (out.bits != 4 && out.bits != 8)
    spec.fail("bits", std::to_string(out.bits) + " is not supported: Calla reads 4- and 8-bit weights");
  out.group = spec.integer("group_size", 1, 1 << 16);
  if (out.group != 32 && out.group != 64 && out.group != 128)
    spec.fail("group_size", std::to_string(out.group) + " is not supported: Calla reads groups of 32, 64 or 128");
  if (const std::string mode = spec.text_or("mode", "affine"); mode != "affine")
    spec.fail("mode", "\"" + describe_name(mode) + "\" is not supported: Calla reads MLX's \"affine\" quantisation");
  return out;
}

QuantConfig read_quantisation(const FieldReader& top) {
  QuantConfig quant;
  const char* name = top.has("quantization") ? "quantization" : "quantization_config";
  if (!top.has(name)) return quant;
  const FieldReader section = top.object(name);
  if (section.has("quant_method"))
    section.fail("quant_method", FieldReader::show(section.at("quant_method")) +
                                     " is not supported: Calla reads MLX's affine quantisation in 4 or 8 bits");
  quant.defaults = read_quant_spec(section);
  for (const auto& [key, value] : top.at(name).items()) {
    if (key == "bits" || key == "group_size" || key == "mode") continue;
    std::optional<QuantSpec> spec;
    if (value.is_object()) {
      spec = read_quant_spec(section.object(key.c_str()));
    } else if (value.is_boolean()) {
      if (value.get<bool>()) spec = quant.defaults;
    } else {
      continue;  // settings of the quantiser that say nothing about a tensor
    }
    quant.overrides.insert_or_assign(std::string(canonical_name(key)), spec);
  }
  return quant;
}

// A token id or a list of them; duplicates dropped, order kept.
std::vector<TokenId> read_token_ids(const FieldReader& object, const char* name, int vocab) {
  std::vector<TokenId> ids;
  const json& value = object.at(name);
  const json list = value.is_array() ? value : json::array({value});
  std::set<TokenId> seen;
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab))
      object.fail_as_damaged(name,
                             "expected token ids below " + std::to_string(vocab) + ", found " + FieldReader::show(id));
    if (seen.insert(id.get<TokenId>()).second) ids.push_back(id.get<TokenId>());
  }
  return ids;
}

}  // namespace

ModelConfig parse_config(std::string_view text, const std::string& file_name) {
  const json document = parse_json(text, file_name);
  const FieldReader top(document, file_name, "");
  ModelConfig config;
  check_architecture(top, config);
  // The sizes stand in text_config, or at the top of a text-only model's file.
  const bool flat = !top.has("text_config") && (top.has("hidden_size") || top.has("num_hidden_layers"));
  const FieldReader sizes = flat ? top : top.object("text_config");
  check_text_model(sizes);
  check_variants(top, sizes);
  config.shape = read_shape(sizes);
  config.quant = read_quantisation(top);
  if (top.has("eos_token_id")) {
    config.eos = read_token_ids(top, "eos_token_id", config.shape.vocab);
  } else if (sizes.has("eos_token_id")) {
    config.eos = read_token_ids(sizes, "eos_token_id", config.shape.vocab);
  }
  return config;
}

void parse_generation_config(std::string_view text, const std::string& file_name, ModelConfig& config) {
  const json document = parse_json(text, file_name);
  const FieldReader top(document, file_name, "");
  if (top.has("eos_token_id")) config.eos = read_token_ids(top, "eos_token_id", config.shape.vocab);
  const auto number = [&](const char* name, double least, double most) -> std::optional<float> {
    const std::optional<double> value = top.optional_number(name, least, most);
    return value ? std::optional<float>(static_cast<float>(*value)) : std::nullopt;
  };
  GenerationDefaults& out = config.generation;
  if (top.has("do_sample")) out.do_sample = top.boolean_or("do_sample", true);
  if (top.has("top_k")) out.top_k = top.integer("top_k", 0, INT32_MAX);
  out.temperature = number("temperature", 0, 100);
  out.top_p = number("top_p", 1e-6, 1);
  out.min_p = number("min_p", 0, 0.999999);
  out.presence_penalty = number("presence_penalty", -2, 2);
  out.repetition_penalty = number("repetition_penalty", 1e-3, 1e3);
}

ModelConfig read_model_config(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "config.json";
  if (!std::filesystem::exists(path))
    throw CheckpointError(path.string() +
                          ": missing; a checkpoint is a directory with config.json, "
                          "model.safetensors and the tokenizer's files");
  ModelConfig config = parse_config(read_text_file(path, kMaxConfigBytes), path.string());
  const std::filesystem::path generation = directory / "generation_config.json";
  if (is_there(generation))
    parse_generation_config(read_text_file(generation, kMaxConfigBytes), generation.string(), config);
  return config;
}

}  // namespace calla
