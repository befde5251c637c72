// The report: its sums, and that it says what was asked for.
#include "checkpoint/inspect.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

const std::filesystem::path kTiny = std::filesystem::path(CALLA_SOURCE_DIR) / "models/calla-tiny";

InspectReport inspect_tiny(const InspectOptions& options = {}) {
  return inspect(Checkpoint::open(kTiny), read_model_config(kTiny), options);
}

TEST(Inspect, CountsCallaTiny) {
  const InspectReport report = inspect_tiny();
  EXPECT_EQ(report.parameters, 21'737'520u);  // as its maker counted
  EXPECT_EQ(report.tensor_count, 357u);
  uint64_t bytes = 0;
  for (const PartBytes& part : report.parts) {
    bytes += part.bytes;
    EXPECT_NE(part.part, "other");
    EXPECT_LE(part.per_token, part.bytes);
  }
  EXPECT_EQ(bytes, Checkpoint::open(kTiny).bytes());
  EXPECT_EQ(report.plan.weights, bytes);
  EXPECT_EQ(report.plan.context, kDefaultContext);
  EXPECT_EQ(report.plan.kv_cache, static_cast<uint64_t>(kDefaultContext) * 2 * 256 * 2 * 2);
  EXPECT_EQ(report.plan.recurrent_state, 6u * (4 * 128 * 128 * 4 + 3 * 1024 * 2));
  EXPECT_GT(report.machine.total, 0u);
}

// The sizes of the real model that the documentation states: 34.7 G parameters, 2.95 G active, 1.67 GB a token, 20,480
// bytes of KV cache a token. Without 19.5 GB on the disk: a file of that length, of which only the header is written.
TEST(Inspect, CountsTheRealShape) {
  TempDirectory temp;
  SyntheticOptions options;
  options.shape = named_shape("qwen3.6-35b-a3b");
  std::vector<TensorSpec> specs;
  for (const SyntheticTensor& tensor : synthetic_tensors(options)) specs.push_back(tensor.spec);
  {
    SafetensorsWriter writer(temp.path() / "model.safetensors", specs);
    const std::byte last{0};
    writer.write(specs.size() - 1, specs.back().bytes() - 1, std::span(&last, 1));
    writer.finish();
  }
  write_file(temp.path() / "config.json", synthetic_config(options));
  InspectOptions asked;
  asked.context = 4096;
  asked.sequences = 3;
  const InspectReport report = inspect(Checkpoint::open(temp.path()), read_model_config(temp.path()), asked);
  EXPECT_NEAR(static_cast<double>(report.parameters), 34.66e9, 0.01e9);
  EXPECT_NEAR(static_cast<double>(report.active_parameters), 2.95e9, 0.01e9);
  uint64_t per_token = 0;
  for (const PartBytes& part : report.parts) per_token += part.per_token;
  EXPECT_NEAR(static_cast<double>(per_token), 1.67e9, 0.01e9);
  EXPECT_EQ(report.plan.kv_cache, 3u * 4096 * 20'480);
  EXPECT_EQ(report.plan.recurrent_state, 3u * 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2));
  EXPECT_THAT(inspect_text(report), AllOf(HasSubstr("34.66 G, 2.95 G active a token"), HasSubstr("19.5 GB")));
}

TEST(Inspect, TextAndJsonAgree) {
  InspectOptions options;
  options.tensors = true;
  InspectReport report = inspect_tiny(options);
  const std::string text = inspect_text(report);
  EXPECT_THAT(text, AllOf(HasSubstr("Qwen3_5MoeForConditionalGeneration"), HasSubstr("affine, 4 bits, groups of 64"),
                          HasSubstr("routed experts"), HasSubstr("language_model.lm_head.scales  BF16 [4096, 4]"),
                          Not(HasSubstr("Verified")), Not(HasSubstr("warning"))));
  EXPECT_EQ(text.back(), '\n');
  const nlohmann::ordered_json json = inspect_json(report);
  EXPECT_EQ(json["parameters"], report.parameters);
  EXPECT_EQ(json["memory"]["total"], report.plan.total());
  EXPECT_THAT(json["tensors"], SizeIs(357));
  EXPECT_FALSE(json.contains("damaged"));
  report.tensors.clear();
  EXPECT_THAT(inspect_text(report), Not(HasSubstr("Tensors")));
}

TEST(Inspect, ReportsDamage) {
  InspectReport report = inspect_tiny();
  report.verified.emplace();
  EXPECT_THAT(inspect_text(report), HasSubstr("every scale, bias and norm is a finite number"));
  EXPECT_THAT(inspect_json(report)["damaged"], SizeIs(0));
  report.verified->push_back({"layers.0.x.scales", 17, std::nanf(""), 2});
  EXPECT_THAT(inspect_text(report), HasSubstr("layers.0.x.scales: element 17 is nan (2 not finite)"));
  EXPECT_EQ(inspect_json(report)["damaged"][0]["element"], 17);
}

TEST(Inspect, SaysWhetherItFits) {
  InspectReport report = inspect_tiny();
  const auto verdict = [&](uint64_t total, uint64_t available) {
    report.machine = {total, available};
    return inspect_json(report)["memory"]["verdict"].get<std::string>();
  };
  const uint64_t need = report.plan.total();
  EXPECT_EQ(verdict(need, need), "fits");
  EXPECT_EQ(verdict(need, need - 1), "tight");
  EXPECT_EQ(verdict(need - 1, need - 1), "too large");
  EXPECT_EQ(verdict(0, 0), "unknown");
}

TEST(Inspect, CountsUnusedParts) {
  TempDirectory temp;
  make_checkpoint(mini_options(), temp.path() / "model");
  TensorMap tensors = read_tensors(temp.path() / "model");
  tensors["vision_tower.x"] = bf16_tensor({100}, [](size_t) { return 0.0f; });
  tensors["odd"] = bf16_tensor({8}, [](size_t) { return 0.0f; });
  write_tensors(temp.path() / "model/model.safetensors", tensors);
  std::filesystem::remove(temp.path() / "model/model.safetensors.index.json");
  const InspectReport report =
      inspect(Checkpoint::open(temp.path() / "model"), read_model_config(temp.path() / "model"), {});
  uint64_t unused = 0;
  uint64_t other = 0;
  for (const PartBytes& part : report.parts) {
    if (part.part.starts_with("unused")) unused = part.bytes;
    if (part.part == "other") other = part.bytes;
  }
  EXPECT_EQ(unused, 200u);
  EXPECT_EQ(other, 16u);
  EXPECT_THAT(report.warnings, SizeIs(0));
  // One byte more of header: every tensor of more than one byte an element lies at an odd address.
  std::string bytes = read_file(temp.path() / "model/model.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  bytes.insert(8 + length++, 1, ' ');
  std::memcpy(bytes.data(), &length, 8);
  write_file(temp.path() / "model/model.safetensors", bytes);
  const InspectReport odd =
      inspect(Checkpoint::open(temp.path() / "model"), read_model_config(temp.path() / "model"), {});
  ASSERT_THAT(odd.warnings, SizeIs(1));
  EXPECT_THAT(odd.warnings[0], HasSubstr(std::to_string(tensors.size() - 2) + " tensors lie at odd addresses"));
  // Four bytes, and then eight: what a Mac's GPU cannot use in place, and what all can. Padding mends what is warned of.
  const auto shifted = [&](size_t by) {
    std::string file = bytes;
    uint64_t header = length - 1;  // as it was, a multiple of 64 with its length
    file.erase(8 + header, 1);
    file.insert(8 + header, by, ' ');
    header += by;
    std::memcpy(file.data(), &header, 8);
    write_file(temp.path() / "model/model.safetensors", file);
    return inspect(Checkpoint::open(temp.path() / "model"), read_model_config(temp.path() / "model"), {}).warnings;
  };
  ASSERT_THAT(shifted(4), SizeIs(1));
  EXPECT_THAT(shifted(4)[0], AllOf(HasSubstr("on a Mac's GPU"), HasSubstr("calla align")));
  EXPECT_THAT(pad_headers(temp.path() / "model"), SizeIs(1));
  EXPECT_THAT(pad_headers(temp.path() / "model"), SizeIs(0));
  EXPECT_THAT(shifted(8), SizeIs(0));
  EXPECT_THAT(pad_headers(temp.path() / "model"), SizeIs(0));
  EXPECT_EQ(report.plan.weights + 216, Checkpoint::open(temp.path() / "model").bytes());
}

}  // namespace
}  // namespace calla
