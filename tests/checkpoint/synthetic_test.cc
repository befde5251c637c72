// Checkpoints with random weights: sizes, distribution, determinism, and what is left behind when writing fails.
#include "checkpoint/synthetic.h"

#include <unistd.h>

#include <cmath>
#include <fstream>

#include "checkpoint/quantise.h"
#include "model/load_model.h"
#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

uint64_t total_bytes(const SyntheticOptions& options) {
  uint64_t bytes = 0;
  for (const SyntheticTensor& tensor : synthetic_tensors(options)) bytes += tensor.spec.bytes();
  return bytes;
}

TEST(Synthetic, RealShapeHasTheRealSize) {
  SyntheticOptions options;
  options.shape = named_shape("qwen3.6-35b-a3b");
  EXPECT_NEAR(static_cast<double>(total_bytes(options)), 19.5e9, 0.05e9);
  EXPECT_THAT(synthetic_tensors(options), SizeIs(1757));
  EXPECT_EQ(named_shape("qwen3.6-35b-a3b", 8).attention_layers(), 2);
  EXPECT_EQ(named_shape("qwen3.6-35b-a3b", 44).attention_layers(), 11);
  EXPECT_THROW(named_shape("qwen"), UsageError);
}

// The same names, dtypes and shapes as the checkpoint in the repository has.
TEST(Synthetic, CallaTinyHasTheLayoutOfTheTrainedOne) {
  SyntheticOptions options;
  options.shape = named_shape("calla-tiny");
  const Checkpoint real = Checkpoint::open(std::filesystem::path(CALLA_SOURCE_DIR) / "models/calla-tiny");
  const std::vector<SyntheticTensor> made = synthetic_tensors(options);
  EXPECT_EQ(made.size(), real.tensors().size());
  for (const SyntheticTensor& tensor : made) {
    const Tensor* same = real.find(tensor.spec.name);
    ASSERT_NE(same, nullptr) << tensor.spec.name;
    EXPECT_EQ(same->dtype, tensor.spec.dtype) << tensor.spec.name;
    EXPECT_EQ(same->shape, tensor.spec.shape) << tensor.spec.name;
  }
}

TEST(Synthetic, LoadsAsItWasMade) {
  TempDirectory temp;
  SyntheticOptions options = mini_options();
  options.max_shard_bytes = total_bytes(options) / 3;
  uint64_t last = 0;
  make_checkpoint(options, temp.path() / "deep/model", [&](uint64_t done, uint64_t total) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, total);
    last = done;
  });
  EXPECT_EQ(last, total_bytes(options));
  const LoadedModel model = load_model(temp.path() / "deep/model");
  EXPECT_THAT(model.warnings, SizeIs(0));
  EXPECT_GT(model.checkpoint.files().size(), 2u);
  EXPECT_EQ(model.config.shape.layer_kinds, options.shape.layer_kinds);
  EXPECT_THAT(model.checkpoint.verify(), SizeIs(0));
  for (const Tensor& tensor : model.checkpoint.tensors()) EXPECT_TRUE(tensor.aligned()) << tensor.name;
  // Nothing but the model is left.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp.path() / "deep"), {}), 1);
  for (const auto& entry : std::filesystem::directory_iterator(temp.path() / "deep/model"))
    EXPECT_THAT(entry.path().filename().string(), testing::Not(HasSubstr("partial")));
}

// A killed process may have had any number, this one's too.
TEST(Synthetic, WhatKilledProcessesLeftUnderTheNameGoes) {
  TempDirectory temp;
  const std::string own = std::to_string(::getpid());
  for (const std::string& name :
       {std::string("model.partial-1"), std::string("model.partial-999999"), "model.partial-" + own}) {
    std::filesystem::create_directories(temp.path() / name);
    std::ofstream(temp.path() / name / "model-00001-of-00004.safetensors") << "old";
  }
  std::filesystem::create_directories(temp.path() / "model.partial-mine");
  make_checkpoint(mini_options(), temp.path() / "model");
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(temp.path()))
    left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, testing::UnorderedElementsAre("model", "model.partial-mine"));
  EXPECT_FALSE(std::filesystem::exists(temp.path() / "model/model-00001-of-00004.safetensors"));
}

// Any part of a tensor can be made on its own; seeds differ, equal seeds agree.
TEST(Synthetic, IsDeterministicPieceByPiece) {
  const std::vector<SyntheticTensor> tensors = synthetic_tensors(mini_options());
  SyntheticOptions other = mini_options();
  other.seed = 8;
  const std::vector<SyntheticTensor> others = synthetic_tensors(other);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t size = tensors[i].spec.bytes();
    std::vector<std::byte> whole(size);
    std::vector<std::byte> parts(size);
    std::vector<std::byte> different(size);
    fill_synthetic(tensors[i], 0, whole);
    for (size_t at = 0; at < size; at += 24)
      fill_synthetic(tensors[i], at, std::span(parts).subspan(at, std::min<size_t>(24, size - at)));
    fill_synthetic(others[i], 0, different);
    EXPECT_EQ(whole, parts) << tensors[i].spec.name;
    EXPECT_NE(whole, different) << tensors[i].spec.name;
  }
}

// Weights have mean 0 and the deviation that keeps activations level: gain / sqrt(inputs).
TEST(Synthetic, WeightsHaveTheIntendedDeviation) {
  SyntheticOptions options = mini_options(128);
  for (const int bits : {4, 8}) {
    options.quant = QuantSpec{bits, 64};
    const std::vector<SyntheticTensor> tensors = synthetic_tensors(options);
    const auto fill = [&](const std::string& name, auto& out) {
      for (const SyntheticTensor& tensor : tensors) {
        if (!tensor.spec.name.ends_with(name)) continue;
        out.resize(tensor.spec.bytes() / sizeof(out[0]));
        fill_synthetic(tensor, 0, std::as_writable_bytes(std::span(out)));
        return;
      }
      FAIL() << name;
    };
    QuantisedMatrix m;
    fill("layers.0.mlp.switch_mlp.up_proj.weight", m.codes);
    fill("layers.0.mlp.switch_mlp.up_proj.scales", m.scales);
    fill("layers.0.mlp.switch_mlp.up_proj.biases", m.biases);
    const std::vector<float> weights = dequantise(m, *options.quant);
    double sum = 0;
    double squares = 0;
    for (const float weight : weights) {
      sum += weight;
      squares += std::pow(weight, 2);
    }
    const auto count = static_cast<double>(weights.size());
    const double deviation = std::sqrt(squares / count);
    EXPECT_NEAR(deviation * std::sqrt(128.0), 1.0, 0.05) << bits;
    EXPECT_LT(std::abs(sum / count), 0.01 * deviation) << bits;
    size_t negative = 0;
    for (const bf16 scale : m.scales) negative += to_float(scale) < 0;
    EXPECT_NEAR(static_cast<double>(negative) / static_cast<double>(m.scales.size()), 0.5, 0.05);
  }
}

TEST(Synthetic, CopiesATokenizer) {
  TempDirectory temp;
  SyntheticOptions options = mini_options();
  options.tokenizer_from = std::filesystem::path(CALLA_SOURCE_DIR) / "models/calla-tiny";
  make_checkpoint(options, temp.path() / "model");
  EXPECT_EQ(read_file(temp.path() / "model/tokenizer.json"), read_file(options.tokenizer_from / "tokenizer.json"));
  options.tokenizer_from = temp.path();
  EXPECT_THAT(refusal([&] { make_checkpoint(options, temp.path() / "other"); }), HasSubstr("tokenizer.json: missing"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp.path()), {}), 1);  // nothing half made
}

TEST(Synthetic, RefusesToOverwrite) {
  TempDirectory temp;
  write_file(temp.path() / "precious", "x");
  for (const auto& taken : {temp.path(), temp.path() / "precious"}) {
    try {
      make_checkpoint(mini_options(), taken);
      ADD_FAILURE() << taken << " was overwritten";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("exists already"));
    }
  }
  EXPECT_THAT(refusal([&] { make_checkpoint(mini_options(), temp.path() / "precious/model"); }),
              HasSubstr("cannot write"));
  EXPECT_EQ(read_file(temp.path() / "precious"), "x");
  std::filesystem::create_directory(temp.path() / "empty");
  make_checkpoint(mini_options(), temp.path() / "empty");
  EXPECT_EQ(load_model(temp.path() / "empty").weights.layers.size(), 4u);
}

TEST(Synthetic, TwoAtOnceAreRefusedAtTheBeginning) {
  TempDirectory temp;
  int second_began = 0, refusals = 0;
  const auto second = [&](uint64_t, uint64_t) {
    if (refusals++ > 0) return;
    EXPECT_THAT(refusal([&] {
                  make_checkpoint(mini_options(), temp.path() / "model/", [&](uint64_t, uint64_t) { ++second_began; });
                }),
                HasSubstr("model: another process is writing it"));
  };
  make_checkpoint(mini_options(), temp.path() / "model", second);
  EXPECT_GT(refusals, 0);
  EXPECT_EQ(second_began, 0);
  EXPECT_EQ(load_model(temp.path() / "model").weights.layers.size(), 4u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(temp.path()), {}), 1);
}

TEST(Synthetic, RefusesWhenTheDiskIsTooSmall) {
  TempDirectory temp;
  SyntheticOptions options;
  options.shape = named_shape("qwen3.6-35b-a3b", 1000);
  options.shape.experts = 4096;  // petabytes
  options.shape.expert_width = 1 << 16;
  options.shape.hidden = 1 << 16;
  EXPECT_THAT(refusal([&] { make_checkpoint(options, temp.path() / "model"); }), HasSubstr("disk has only"));
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
}

}  // namespace
}  // namespace calla
