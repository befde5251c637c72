// Names to fields: what each tensor must be, other quantisations, converted and original norms, other layouts.
#include "model/bind_weights.h"

#include <cmath>

#include "checkpoint/quantise.h"
#include "model/load_model.h"
#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

constexpr const char* kLayer0 = "language_model.model.layers.0.";

// A small checkpoint as a map of tensors, to be changed and loaded.
class BindWeights : public testing::Test {
 protected:
  void make(const SyntheticOptions& options) {
    std::filesystem::remove_all(path());
    make_checkpoint(options, path());
    tensors_ = read_tensors(path());
    std::filesystem::remove(path() / "model.safetensors.index.json");
  }
  BindWeights() { make(mini_options()); }

  std::filesystem::path path() const { return temp_.path() / "model"; }
  LoadedModel load(const std::vector<std::pair<std::string, std::string>>& metadata = {{"format", "mlx"}}) const {
    write_tensors(path() / "model.safetensors", tensors_, metadata);
    return load_model(path());
  }
  std::string load_refused() const {
    return refusal([&] { load(); });
  }
  void edit_config(const std::string& from, const std::string& to) const {
    std::string text = read_file(path() / "config.json");
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    write_file(path() / "config.json", text.replace(at, from.size(), to));
  }
  TensorData& at(const std::string& name) { return tensors_.at(name); }

  // Every tensor under a new name.
  void rename_all(const std::function<std::string(std::string)>& rename) {
    TensorMap renamed;
    for (auto& [name, tensor] : tensors_) renamed[rename(name)] = std::move(tensor);
    tensors_ = std::move(renamed);
  }

  TempDirectory temp_;
  TensorMap tensors_;
};

TEST_F(BindWeights, ListsEverythingThatDoesNotFit) {
  tensors_.erase("language_model.model.norm.weight");
  tensors_.erase(std::string(kLayer0) + "mlp.gate.scales");
  at(std::string(kLayer0) + "linear_attn.A_log") = bf16_tensor({3}, [](size_t) { return 0.0f; });
  at("language_model.model.layers.3.self_attn.q_norm.weight").dtype = Dtype::kI16;
  EXPECT_THAT(
      load_refused(),
      AllOf(HasSubstr("norm.weight: is missing"), HasSubstr("layers.0.mlp.gate: is quantised but has no .scales"),
            HasSubstr("layers.0.linear_attn.A_log: expected BF16, F16 or F32 [2], found BF16 [3]"),
            HasSubstr("q_norm.weight: expected BF16, F16 or F32 [256], found I16 [256] (model.safetensors)")));
}

TEST_F(BindWeights, NamesWrongDtypesAndShapes) {
  at("language_model.lm_head.scales").dtype = Dtype::kF16;
  at("language_model.lm_head.biases").shape = {1, 32};
  at(std::string(kLayer0) + "mlp.switch_mlp.down_proj.weight").shape = {64, 8, 8};
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("lm_head.scales: expected BF16 [32, 1], found F16 [32, 1]"),
                                    HasSubstr("lm_head.biases: expected BF16 [32, 1], found BF16 [1, 32]"),
                                    HasSubstr("down_proj.weight: expected U32 [8, 64, 8], found U32 [64, 8, 8]")));
}

TEST_F(BindWeights, CutsLongLists) {
  for (auto it = tensors_.begin(); it != tensors_.end();)
    it = it->first.find("mlp") != std::string::npos ? tensors_.erase(it) : std::next(it);
  EXPECT_THAT(
      load_refused(),
      HasSubstr("... and 12 more\nAre config.json and the weights of one model?"));  // 4 layers of 8 matrices, 20 named
}

TEST_F(BindWeights, RefusesAConfigOfAnotherModel) {
  edit_config("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 3");
  edit_config("\"linear_attention\",\n            \"full_attention\"", "\"linear_attention\"");
  EXPECT_THAT(load_refused(), HasSubstr("belongs to layer 3, but config.json has only 3 layers"));
}

TEST_F(BindWeights, RefusesBitsThatContradictTheConfig) {
  edit_config("\"bits\": 4", "\"bits\": 8");
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("embed_tokens: has the widths of 4-bit weights in groups of 64"),
                                    HasSubstr("config.json says 8 bits in groups of 64")));
}

TEST_F(BindWeights, RefusesGroupsThatContradictTheConfig) {
  edit_config("\"group_size\": 64", "\"group_size\": 32");
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("groups of 64"), HasSubstr("config.json says 4 bits in groups of 32")));
}

TEST_F(BindWeights, RefusesQuantisedTensorsWithoutAQuantisation) {
  edit_config("\"quantization\": {", "\"other\": {");
  edit_config("\"quantization_config\": {", "\"another\": {");
  EXPECT_THAT(load_refused(), HasSubstr("config.json does not say how"));
}

TEST_F(BindWeights, RefusesVectorsThatAreNotFinite) {
  at(std::string(kLayer0) + "linear_attn.conv1d.weight").bytes[2 * 5 + 1] = std::byte{0x7f};
  at(std::string(kLayer0) + "linear_attn.conv1d.weight").bytes[2 * 5] = std::byte{0xc0};
  EXPECT_THAT(load_refused(), HasSubstr("conv1d.weight: element 5 is not a finite number"));
}

TEST_F(BindWeights, SkipsVisionAndMultiTokenPrediction) {
  const auto odd = bf16_tensor({3, 5}, [](size_t) { return NAN; });
  for (const char* name :
       {"vision_tower.blocks.0.attn.qkv.weight", "model.visual.patch_embed.proj.weight", "mtp.norm.weight",
        "language_model.mtp.layers.0.input_layernorm.weight", "model.mtp.fc.weight"})
    tensors_[name] = odd;
  EXPECT_THAT(load().warnings, SizeIs(0));
}

TEST_F(BindWeights, AcceptsTheOtherSpellings) {
  const uint32_t first_code = *load().weights.layers[2].moe.expert_up_proj.codes;
  // Text only: model.layers..., lm_head.
  rename_all([](std::string name) { return name.substr(std::string("language_model.").size()); });
  EXPECT_EQ(*load().weights.layers[2].moe.expert_up_proj.codes, first_code);
  // Original, multimodal: model.language_model.layers..., lm_head. The overrides' names need not follow.
  rename_all([](const std::string& name) {
    return name.starts_with("model.") ? "model.language_model." + name.substr(6) : name;
  });
  const LoadedModel model = load();
  EXPECT_EQ(*model.weights.layers[2].moe.expert_up_proj.codes, first_code);
  EXPECT_EQ(model.weights.layers[2].moe.router.bits, 8);
  EXPECT_THAT(model.warnings, SizeIs(0));
}

TEST_F(BindWeights, RefusesTwoSpellingsOfOneTensor) {
  tensors_["model.norm.weight"] = at("language_model.model.norm.weight");
  EXPECT_THAT(load_refused(), HasSubstr("means the same as"));
}

struct Quantisation {
  std::optional<QuantSpec> quant;
  QuantSpec router;
};

// Other formats come out with the right sizes, and with the weights that the generator put in.
TEST_F(BindWeights, OtherQuantisations) {
  for (const auto& [quant, router] : {Quantisation{QuantSpec{4, 32}, {8, 32}}, Quantisation{QuantSpec{4, 128}, {8, 64}},
                                      Quantisation{QuantSpec{8, 64}, {8, 64}}, Quantisation{QuantSpec{8, 32}, {4, 128}},
                                      Quantisation{std::nullopt, {8, 64}}}) {
    SyntheticOptions options = mini_options(128);
    options.quant = quant;
    options.router_quant = router;
    make(options);
    const LoadedModel model = load();
    EXPECT_THAT(model.warnings, SizeIs(0));
    const MoeWeights& moe = model.weights.layers[1].moe;
    const WeightMatrix& up = moe.expert_up_proj;
    EXPECT_EQ(up.stack, 8);
    EXPECT_EQ(up.n, 128);
    EXPECT_EQ(up.k, 128);
    if (!quant) {
      EXPECT_EQ(up.format, WeightFormat::kBf16);
      EXPECT_EQ(up.bytes(), 8u * 128 * 128 * 2);
      EXPECT_NE(up.values, nullptr);
      EXPECT_EQ(moe.router.format, WeightFormat::kBf16);
      continue;
    }
    EXPECT_EQ(up.format, WeightFormat::kAffine);
    EXPECT_EQ(up.bits, quant->bits);
    EXPECT_EQ(up.group, quant->group);
    EXPECT_EQ(moe.router.bits, router.bits);
    EXPECT_EQ(moe.router.group, router.group);
    EXPECT_EQ(up.bytes(), at("language_model.model.layers.1.mlp.switch_mlp.up_proj.weight").bytes.size() +
                              2 * at("language_model.model.layers.1.mlp.switch_mlp.up_proj.scales").bytes.size());
    // The last row of the last expert, by the rules of WeightMatrix.
    const WeightMatrix last = up.expert(7);
    QuantisedMatrix row;
    row.codes.assign(last.codes + 127 * last.words_per_row(), last.codes + 128 * last.words_per_row());
    row.scales.assign(last.scales + 127 * last.groups_per_row(), last.scales + 128 * last.groups_per_row());
    row.biases.assign(last.biases + 127 * last.groups_per_row(), last.biases + 128 * last.groups_per_row());
    const TensorData& scales = at("language_model.model.layers.1.mlp.switch_mlp.up_proj.scales");
    EXPECT_EQ(std::memcmp(row.scales.data(), scales.bytes.data() + scales.bytes.size() - 2 * row.scales.size(),
                          2 * row.scales.size()),
              0);
    EXPECT_THAT(dequantise(row, *quant), SizeIs(128));
  }
}

TEST_F(BindWeights, OverridesOfSingleMatrices) {
  // One projection in 8 bits, one left in bf16 (the config may say false, or nothing).
  const std::string wide = std::string(kLayer0) + "linear_attn.out_proj";
  const std::string plain = std::string(kLayer0) + "linear_attn.in_proj_z";
  at(wide + ".weight") = {Dtype::kU32, {64, 256 * 8 / 32}, std::vector<std::byte>(64 * 256)};
  at(plain + ".weight") = bf16_tensor({256, 64}, [](size_t i) { return static_cast<float>(i % 7); });
  tensors_.erase(plain + ".scales");
  tensors_.erase(plain + ".biases");
  const std::string more =
      "\"mode\": \"affine\", \"" + wide + "\": {\"bits\": 8, \"group_size\": 64}, \"" + plain + "\": false";
  edit_config("\"mode\": \"affine\"", more);
  const LoadedModel model = load();
  const GdnWeights& gdn = *model.weights.layers[0].gdn;
  EXPECT_EQ(gdn.out.bits, 8);
  EXPECT_EQ(gdn.in_z.format, WeightFormat::kBf16);
  EXPECT_EQ(to_float(gdn.in_z.values[8]), 1.0f);
  EXPECT_EQ(model.weights.layers[1].gdn->out.bits, 4);
}

// --- converted and original norms ------------------------------------------------------------------------------------

bool is_zero_centred(const std::string& name) {
  for (const char* end : {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
                          "q_norm.weight", "k_norm.weight"})
    if (name.ends_with(end)) return true;
  return false;
}

class Norms : public BindWeights {
 protected:
  // The conversion backwards: [C, 4, 1] -> [C, 1, 4], gammas minus 1, multi-token prediction back in.
  void make_raw() {
    raw_convolutions();
    shift_gammas(-1);
    add_mtp();
  }
  void raw_convolutions() {
    for (auto& [name, tensor] : tensors_)
      if (name.ends_with("conv1d.weight")) tensor.shape = {tensor.shape[0], 1, 4};
  }
  void shift_gammas(float by) {
    for (auto& [name, tensor] : tensors_) {
      if (!is_zero_centred(name)) continue;
      const TensorData old = tensor;
      tensor = bf16_tensor(old.shape, [&](size_t i) {
        bf16 value;
        std::memcpy(&value, &old.bytes[2 * i], 2);
        return to_float(value) + by;
      });
    }
  }
  void add_mtp() {
    tensors_["mtp.norm.weight"] = bf16_tensor({64}, [](size_t) { return 0.1f; });
    tensors_["mtp.layers.0.input_layernorm.weight"] = bf16_tensor({64}, [](size_t) { return 0.1f; });
  }

  static std::vector<FloatVector> gammas(const LoadedModel& model) {
    std::vector<FloatVector> out = {model.weights.final_norm};
    for (const LayerWeights& layer : model.weights.layers) {
      out.push_back(layer.input_norm);
      out.push_back(layer.post_norm);
      if (layer.attention) out.push_back(layer.attention->q_norm);
      if (layer.attention) out.push_back(layer.attention->k_norm);
      if (layer.gdn) out.push_back(layer.gdn->norm);
      if (layer.gdn) out.push_back(layer.gdn->conv);
    }
    return out;
  }
};

TEST_F(Norms, ConvertedAndRawGiveTheSameGammas) {
  const std::vector<FloatVector> converted = gammas(load());
  EXPECT_GE(converted[1][0], 0.8f);
  add_mtp();
  EXPECT_EQ(gammas(load()), converted);
  EXPECT_EQ(gammas(load({{"format", "pt"}, {"source", "original"}})), converted);
  make_raw();
  EXPECT_EQ(gammas(load()), converted);
  EXPECT_THAT(load().warnings, SizeIs(0));
}

TEST_F(Norms, RefusesRawConvolutionsWithGammasAroundOne) {
  raw_convolutions();
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("conv1d.weight"), HasSubstr("lie around 1")));
}

TEST_F(Norms, RefusesConvertedConvolutionsWithGammasAroundZero) {
  shift_gammas(-1);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("conv1d.weight"), HasSubstr("lie around 0")));
}

TEST_F(Norms, RefusesMixedConvolutions) {
  TensorData& conv = at(std::string(kLayer0) + "linear_attn.conv1d.weight");
  conv.shape = {conv.shape[0], 1, 4};
  EXPECT_THAT(load_refused(), HasSubstr("mixes converted and original"));
}

// Trained gammas wander: neither near 0 nor near 1 means nothing.
TEST_F(Norms, LetsTheConvolutionsDecideWhenGammasSayNothing) {
  for (auto& [name, tensor] : tensors_)
    if (is_zero_centred(name)) tensor = bf16_tensor(tensor.shape, [](size_t) { return 0.5f; });
  EXPECT_EQ(load().weights.final_norm[0], 0.5f);
  raw_convolutions();
  EXPECT_EQ(load().weights.final_norm[0], 1.5f);
}

// --- other layouts ---------------------------------------------------------------------------------------------------

// The original checkpoint: bf16, its own names, gate and up rows of the experts stacked.
TEST_F(Norms, OriginalCheckpointWithStackedExperts) {
  SyntheticOptions options = mini_options();
  options.quant.reset();
  make(options);
  const LoadedModel converted = load();
  make_raw();
  for (int layer = 0; layer < 4; ++layer) {
    const std::string mlp = "language_model.model.layers." + std::to_string(layer) + ".mlp.";
    const TensorData gate = at(mlp + "switch_mlp.gate_proj.weight");
    const TensorData up = at(mlp + "switch_mlp.up_proj.weight");
    TensorData stacked{Dtype::kBF16, {8, 128, 64}, {}};
    const auto block = static_cast<std::ptrdiff_t>(gate.bytes.size() / 8);
    for (std::ptrdiff_t e = 0; e < 8; ++e) {
      for (const TensorData* half : {&gate, &up})
        stacked.bytes.insert(stacked.bytes.end(), half->bytes.begin() + e * block,
                             half->bytes.begin() + (e + 1) * block);
    }
    tensors_[mlp + "experts.gate_up_proj"] = stacked;
    tensors_[mlp + "experts.down_proj"] = at(mlp + "switch_mlp.down_proj.weight");
    for (const char* name : {"gate_proj", "up_proj", "down_proj"})
      tensors_.erase(mlp + "switch_mlp." + name + ".weight");
  }
  rename_all([](const std::string& name) {
    if (name.starts_with("language_model.lm_head")) return name.substr(15);
    return name.starts_with("language_model.model.") ? "model.language_model." + name.substr(21) : name;
  });
  const LoadedModel raw = load();
  EXPECT_THAT(raw.warnings, SizeIs(0));  // too small to be worth a line
  EXPECT_EQ(raw.copied_bytes, 4u * 8 * 128 * 64 * 2);
  EXPECT_EQ(gammas(raw), gammas(converted));
  for (size_t layer = 0; layer < 4; ++layer) {
    const MoeWeights& a = raw.weights.layers[layer].moe;
    const MoeWeights& b = converted.weights.layers[layer].moe;
    for (const auto& [x, y] :
         {std::pair(&a.expert_gate_proj, &b.expert_gate_proj), std::pair(&a.expert_up_proj, &b.expert_up_proj),
          std::pair(&a.expert_down_proj, &b.expert_down_proj)}) {
      ASSERT_EQ(x->bytes(), y->bytes());
      EXPECT_EQ(std::memcmp(x->values, y->values, x->bytes()), 0);
    }
  }
}

TEST_F(BindWeights, StackedExpertsOfAnotherForm) {
  const std::string mlp = std::string(kLayer0) + "mlp.";
  tensors_[mlp + "experts.gate_up_proj"] = bf16_tensor({8, 64, 64}, [](size_t) { return 0.0f; });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("gate_up_proj"), HasSubstr("expected BF16 [8, 128, 64]")));
  // Both layouts at once: the converted one counts, the other has no place.
  tensors_[mlp + "experts.gate_up_proj"] = bf16_tensor({8, 128, 64}, [](size_t) { return 0.0f; });
  tensors_[mlp + "experts.down_proj"] = bf16_tensor({8, 64, 64}, [](size_t) { return 0.0f; });
  EXPECT_THAT(load().warnings, testing::ElementsAre(HasSubstr("2 tensor(s) have no place")));
}

// A header of odd length puts every tensor at an odd address, as MLX may write it.
TEST_F(BindWeights, CopiesTensorsAtOddAddresses) {
  LoadedModel aligned = load();
  std::string bytes = read_file(path() / "model.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  bytes.insert(8 + length, 1, ' ');
  ++length;
  std::memcpy(bytes.data(), &length, 8);
  std::filesystem::remove(path() / "model.safetensors");  // the first model keeps its mapping
  write_file(path() / "model.safetensors", bytes);

  const LoadedModel odd = load_model(path());
  EXPECT_THAT(odd.warnings, SizeIs(0));  // too small to be worth a line
  uint64_t matrices = 0;
  for (const auto& [name, tensor] : tensors_)
    if (tensor.dtype == Dtype::kU32 || name.ends_with("scales") || name.ends_with("biases"))
      matrices += tensor.bytes.size();
  EXPECT_GE(odd.copied_bytes, matrices);
  EXPECT_EQ(aligned.copied_bytes, 0u);
  const auto same = [](const WeightMatrix& a, const WeightMatrix& b) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.codes) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.scales) % 64, 0u);
    const size_t rows = static_cast<size_t>(a.stack) * a.n;
    return std::memcmp(a.codes, b.codes, rows * a.words_per_row() * 4) == 0 &&
           std::memcmp(a.scales, b.scales, rows * a.groups_per_row() * 2) == 0 &&
           std::memcmp(a.biases, b.biases, rows * a.groups_per_row() * 2) == 0;
  };
  EXPECT_TRUE(same(odd.weights.embedding, aligned.weights.embedding));
  EXPECT_TRUE(same(odd.weights.layers[3].attention->q, aligned.weights.layers[3].attention->q));
  EXPECT_TRUE(same(odd.weights.layers[1].moe.expert_down_proj, aligned.weights.layers[1].moe.expert_down_proj));
  EXPECT_EQ(odd.weights.layers[1].gdn->conv, aligned.weights.layers[1].gdn->conv);

  // Padding the header once makes the copies unnecessary; a second time there is nothing to do.
  uint64_t done = 0;
  EXPECT_THAT(pad_headers(path(),
                          [&](uint64_t at, uint64_t total) {
                            EXPECT_LE(at, total);
                            done = at;
                          }),
              testing::ElementsAre("model.safetensors"));
  EXPECT_GT(done, 0u);
  const LoadedModel padded = load_model(path());
  EXPECT_EQ(padded.copied_bytes, 0u);
  EXPECT_EQ(std::memcmp(padded.weights.lm_head.codes, aligned.weights.lm_head.codes, 32 * 8 * 4), 0);
  EXPECT_THAT(pad_headers(path()), SizeIs(0));
}

}  // namespace
}  // namespace calla
