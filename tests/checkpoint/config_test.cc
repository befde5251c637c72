// config.json and generation_config.json: forms that occur, and everything that is refused.
#include "checkpoint/config.h"

#include <nlohmann/json.hpp>

#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

// The config of a made checkpoint, as JSON to change.
json base_config() { return json::parse(synthetic_config(mini_options())); }
ModelConfig parse(const json& config) { return parse_config(config.dump(), "config.json"); }
std::string refused(const json& config) {
  return refusal([&] { parse(config); });
}
// The base config with one field of text_config changed.
json with(const char* field, const json& value) {
  json config = base_config();
  config["text_config"][field] = value;
  return config;
}

TEST(Config, ReadsTheShapeOfTheRealModel) {
  SyntheticOptions options;
  options.shape = named_shape("qwen3.6-35b-a3b");
  const ModelConfig config = parse_config(synthetic_config(options), "config.json");
  EXPECT_EQ(config.shape.hidden, 2048);
  EXPECT_EQ(config.shape.layers(), 40);
  EXPECT_EQ(config.shape.gdn_layers(), 30);
  EXPECT_EQ(config.shape.layer_kinds[3], LayerKind::kAttention);
  EXPECT_EQ(config.shape.vocab, 248320);
  EXPECT_EQ(config.shape.gdn_conv_width(), 8192);
  EXPECT_EQ(config.shape.q_width(), 4096);
  EXPECT_EQ(config.shape.max_context, 262144);
  EXPECT_EQ(config.shape.rotary_dim, 64);
  EXPECT_EQ(config.eos, (std::vector<TokenId>{248046, 248044}));
  EXPECT_EQ(config.quant.find("layers.39.mlp.gate"), (QuantSpec{8, 64}));
  EXPECT_EQ(config.quant.find("layers.39.mlp.switch_mlp.up_proj"), (QuantSpec{4, 64}));
}

TEST(Config, AcceptsTextOnlyAndOlderForms) {
  // Sizes at the top level.
  json flat = base_config()["text_config"];
  flat["quantization"] = base_config()["quantization"];
  EXPECT_EQ(parse(flat).shape.layers(), 4);
  // The older place of the RoPE settings, and layers by interval.
  flat.erase("rope_parameters");
  flat["rope_theta"] = 10000000;
  flat["partial_rotary_factor"] = 0.25;
  flat.erase("layer_types");
  const ModelConfig config = parse(flat);
  EXPECT_EQ(config.shape.rope_theta, 1e7f);
  EXPECT_EQ(config.shape.rotary_dim, 64);
  EXPECT_EQ(config.shape.attention_layers(), 1);
  EXPECT_EQ(config.shape.layer_kinds[3], LayerKind::kAttention);
  // The factor beside the parameters.
  json split = base_config();
  split["text_config"]["rope_parameters"].erase("partial_rotary_factor");
  split["text_config"]["partial_rotary_factor"] = 0.25;
  EXPECT_EQ(parse(split).shape.rotary_dim, 64);
}

TEST(Config, RefusesOtherArchitectures) {
  json config = base_config();
  config["model_type"] = "llama";
  EXPECT_THAT(refused(config), AllOf(HasSubstr("model_type"), HasSubstr("\"llama\""), HasSubstr("qwen3_5_moe")));
  config = base_config();
  config["architectures"] = {"Qwen3NextForCausalLM"};
  EXPECT_THAT(refused(config), AllOf(HasSubstr("Qwen3NextForCausalLM"), HasSubstr("Qwen3_5MoeForCausalLM")));
  config.erase("architectures");
  config.erase("model_type");
  EXPECT_THAT(refused(config), AllOf(HasSubstr("model_type: missing"), HasSubstr("Calla runs")));
  config["architectures"] = json::array();
  EXPECT_THAT(refused(config), HasSubstr("architectures: expected a list"));
}

TEST(Config, RefusesAnotherTextModelInAKnownFile) {
  EXPECT_THAT(refused(with("model_type", "qwen3_next")),
              AllOf(HasSubstr("config.json: text_config.model_type: \"qwen3_next\" is not supported"),
                    HasSubstr("qwen3_5_moe_text")));
  EXPECT_THAT(refused(with("model_type", "")), HasSubstr("text_config.model_type: \"\" is not supported"));
  EXPECT_THAT(refused(with("model_type", 7)), HasSubstr("text_config.model_type"));
  json config = base_config();
  config["text_config"].erase("model_type");  // some conversions leave it out
  EXPECT_EQ(parse(config).shape.layers(), 4);
}

TEST(Config, RefusesWhatKernelsAreNotMadeFor) {
  for (const auto& [field, supported] : {std::pair("head_dim", "256"),
                                         {"linear_key_head_dim", "128"},
                                         {"linear_value_head_dim", "128"},
                                         {"linear_conv_kernel_dim", "4"},
                                         {"num_experts_per_tok", "8"}})
    EXPECT_THAT(refused(with(field, 3)),
                AllOf(HasSubstr(std::string("text_config.") + field), HasSubstr("3 is not supported"),
                      HasSubstr(std::string("made for ") + supported)));
  EXPECT_THAT(refused(with("num_attention_heads", 4)), HasSubstr("8 query heads per key/value head"));
  EXPECT_THAT(refused(with("hidden_size", 96)), HasSubstr("multiple of 64"));
  EXPECT_THAT(refused(with("moe_intermediate_size", 100)), HasSubstr("multiple of 64"));
  EXPECT_THAT(refused(with("linear_num_key_heads", 3)), HasSubstr("not a multiple of the 3 key heads"));
  EXPECT_THAT(refused(with("hidden_act", "gelu")), HasSubstr("\"silu\""));
  EXPECT_THAT(refused(with("attn_output_gate", false)), HasSubstr("attn_output_gate"));
  EXPECT_THAT(refused(with("tie_word_embeddings", true)), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(refused(with("attention_bias", true)), HasSubstr("attention_bias"));
  EXPECT_THAT(refused(with("norm_topk_prob", false)), HasSubstr("norm_topk_prob"));
  EXPECT_THAT(refused(with("mlp_only_layers", json::array({1}))), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(refused(with("layer_types", json::array({"a", "b", "c", "d"}))), HasSubstr("\"linear_attention\""));
  EXPECT_THAT(refused(with("layer_types", json::array({"linear_attention"}))), HasSubstr("num_hidden_layers is 4"));
  json config = base_config();
  config["text_config"]["rope_parameters"]["rope_type"] = "yarn";
  EXPECT_THAT(refused(config), AllOf(HasSubstr("rope_type"), HasSubstr("\"yarn\"")));
  EXPECT_THAT(refused(with("rope_scaling", {{"type", "yarn"}})), HasSubstr("\"yarn\""));
}

TEST(Config, RefusesValuesOutOfRange) {
  for (const char* field :
       {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads",
        "linear_num_key_heads", "linear_num_value_heads", "num_experts", "moe_intermediate_size",
        "shared_expert_intermediate_size", "max_position_embeddings", "head_dim"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json("64"), json(nullptr), json(1u << 31), json(1ull << 63),
                              json::array({64}), json(true)})
      EXPECT_THAT(refused(with(field, value)),
                  AllOf(HasSubstr(std::string("config.json: text_config.") + field),
                        AnyOf(HasSubstr("; get the file again"), HasSubstr("made for 256"))))
          << value;
  }
  for (const json& value : {json(0), json(-1e-6), json(1), json("1e-6"), json(nullptr)})
    EXPECT_THAT(refused(with("rms_norm_eps", value)), HasSubstr("rms_norm_eps"));
  json config = base_config();
  json& rope = config["text_config"]["rope_parameters"];
  rope["rope_theta"] = 0;
  EXPECT_THAT(refused(config), HasSubstr("text_config.rope_parameters.rope_theta"));
  rope["rope_theta"] = 1e7;
  for (const json& value : {json(0), json(1.5), json(0.1), json(-0.25), json(1.0 / 256), json("x")}) {
    rope["partial_rotary_factor"] = value;
    EXPECT_THAT(refused(config), AllOf(HasSubstr("text_config.rope_parameters.partial_rotary_factor: expected"),
                                       HasSubstr("found"), HasSubstr("; get the file again")))
        << value;
  }
  rope.erase("partial_rotary_factor");
  EXPECT_THAT(refused(config), HasSubstr("text_config.rope_parameters.partial_rotary_factor: missing; get"));
  config.erase("text_config");
  EXPECT_THAT(refused(config), HasSubstr("config.json: text_config: missing; get"));
  config["text_config"] = 5;
  EXPECT_THAT(refused(config), HasSubstr("text_config: expected an object, found 5"));
}

TEST(Config, RefusesOtherQuantisations) {
  const auto quant = [](const json& section) {
    json config = base_config();
    config.erase("quantization_config");
    config["quantization"] = section;
    return config;
  };
  EXPECT_THAT(refused(quant({{"bits", 3}, {"group_size", 64}})),
              AllOf(HasSubstr("quantization.bits"), HasSubstr("4- and 8-bit")));
  EXPECT_THAT(refused(quant({{"bits", 4}, {"group_size", 16}})), HasSubstr("32, 64 or 128"));
  EXPECT_THAT(refused(quant({{"bits", 4}, {"group_size", 32}, {"mode", "mxfp4"}})), HasSubstr("\"affine\""));
  EXPECT_THAT(refused(quant({{"bits", 4}})), HasSubstr("quantization.group_size: missing"));
  EXPECT_THAT(refused(quant({{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 64}})), HasSubstr("\"gptq\""));
  EXPECT_THAT(refused(quant(7)), HasSubstr("quantization: expected an object"));
  EXPECT_THAT(
      refused(quant({{"bits", 4}, {"group_size", 64}, {"model.layers.0.mlp.gate", {{"bits", 6}, {"group_size", 64}}}})),
      HasSubstr("model.layers.0.mlp.gate.bits"));
  // The older name alone is read too; without any, nothing is quantised.
  json config = base_config();
  config.erase("quantization");
  EXPECT_EQ(parse(config).quant.defaults, (QuantSpec{4, 64}));
  config.erase("quantization_config");
  EXPECT_FALSE(parse(config).quant.find("lm_head").has_value());
}

TEST(Config, RefusesWhatIsNotJson) {
  const auto text = [](const std::string& bytes) { return refusal([&] { parse_config(bytes, "config.json"); }); };
  EXPECT_THAT(text("{"), AllOf(HasSubstr("config.json: not valid JSON at byte"), HasSubstr("unexpected end")));
  EXPECT_THAT(text("[]"), HasSubstr("the file: expected an object, found a list"));
  EXPECT_THAT(text("{\"a\":\"\xff\"}"), HasSubstr("UTF-8"));
  EXPECT_THAT(text(R"({"model_type":"qwen3_5_moe","model_type":"llama"})"),
              HasSubstr("the key model_type occurs twice"));
  EXPECT_THAT(text(std::string(100000, '[')), HasSubstr("64 levels"));
  EXPECT_THAT(text(""), HasSubstr("not valid JSON"));
  // What Python writes for a number that is none; the field is named, and what to do.
  EXPECT_THAT(text(R"({"text_config":{"head_dim":256,"rms_norm_eps":NaN}})"),
              AllOf(HasSubstr("config.json: text_config.rms_norm_eps: not valid JSON at byte 47"),
                    HasSubstr("; get the file again")));
  EXPECT_THAT(text(R"({"text_config":{"head_dim":256},"eos_token_id":[1,)"),
              HasSubstr("config.json: eos_token_id: not valid JSON at byte 51"));
  EXPECT_THAT(text("{\"a\":1e400}"),
              AllOf(HasSubstr("a: "), HasSubstr("not valid JSON"), testing::Not(HasSubstr("exception"))));
  EXPECT_THAT(text(std::string("{}\0", 3)), HasSubstr("a zero byte"));
}

TEST(Config, EndTokens) {
  json config = base_config();
  config["eos_token_id"] = {3, 1, 3};
  EXPECT_THAT(parse(config).eos, ElementsAre(3, 1));
  config["eos_token_id"] = 5;
  EXPECT_THAT(parse(config).eos, ElementsAre(5));
  config.erase("eos_token_id");
  config["text_config"]["eos_token_id"] = 7;
  EXPECT_THAT(parse(config).eos, ElementsAre(7));
  for (const json& bad : {json(32), json(-1), json("x"), json::array({1, nullptr})}) {
    config["eos_token_id"] = bad;
    EXPECT_THAT(refused(config), HasSubstr("eos_token_id: expected token ids below 32"));
  }
}

TEST(Config, GenerationDefaults) {
  const auto parsed = [](const json& generation) {
    ModelConfig config = parse(base_config());
    parse_generation_config(generation.dump(), "generation_config.json", config);
    return config;
  };
  const ModelConfig config = parsed({{"temperature", 0.7},
                                     {"top_k", 20},
                                     {"top_p", 0.8},
                                     {"min_p", 0.0},
                                     {"presence_penalty", 1.5},
                                     {"repetition_penalty", 1.0},
                                     {"do_sample", false},
                                     {"eos_token_id", {2}}});
  EXPECT_EQ(config.generation.temperature, 0.7f);
  EXPECT_EQ(config.generation.presence_penalty, 1.5f);
  EXPECT_EQ(config.generation.do_sample, false);
  EXPECT_THAT(config.eos, ElementsAre(2));
  EXPECT_FALSE(parsed(json::object()).generation.temperature.has_value());
  for (const json& bad :
       {json{{"temperature", -1}}, json{{"temperature", "hot"}}, json{{"top_p", 0}}, json{{"top_p", 1.1}},
        json{{"top_k", -1}}, json{{"top_k", 1.5}}, json{{"min_p", 1}}, json{{"presence_penalty", 3}},
        json{{"repetition_penalty", 0}}, json{{"eos_token_id", 99}}, json::array()})
    EXPECT_THAT(refusal([&] { parsed(bad); }), HasSubstr("generation_config.json: ")) << bad;
}

TEST(Config, FilesOnDisk) {
  TempDirectory temp;
  EXPECT_THAT(refusal([&] { read_model_config(temp.path()); }), HasSubstr("config.json: missing"));
  write_file(temp.path() / "config.json", base_config().dump());
  EXPECT_FALSE(read_model_config(temp.path()).generation.top_k.has_value());
  write_file(temp.path() / "generation_config.json", R"({"top_k":5})");
  EXPECT_EQ(read_model_config(temp.path()).generation.top_k, 5);
  write_file(temp.path() / "config.json", std::string((4u << 20) + 1, ' '));
  EXPECT_THAT(refusal([&] { read_model_config(temp.path()); }), HasSubstr("4.2 MB"));
}

}  // namespace
}  // namespace calla
