// A checkpoint directory: shards, index, and the damage that downloads and conversions do.
#include "checkpoint/checkpoint.h"

#include <sys/stat.h>

#include <chrono>
#include <cmath>

#include "model/load_model.h"
#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

// A valid checkpoint in two shards, freshly made for each test.
class TwoShards : public testing::Test {
 protected:
  TwoShards() : path_(temp_.path() / "model") {
    SyntheticOptions options = mini_options();
    uint64_t bytes = 0;
    for (const SyntheticTensor& tensor : synthetic_tensors(options)) bytes += tensor.spec.bytes();
    options.max_shard_bytes = bytes / 2 + bytes / 8;
    make_checkpoint(options, path_);
  }

  // Loads, and fails the test if that takes a second or does not throw.
  std::string load_refused() const {
    const auto start = std::chrono::steady_clock::now();
    const std::string message = refusal([&] { load_model(path_); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1));
    return message;
  }

  void edit(const char* file, const std::function<void(std::string&)>& change) const {
    std::string bytes = read_file(path_ / file);
    change(bytes);
    write_file(path_ / file, bytes);
  }
  static void replace(std::string& text, const std::string& from, const std::string& to) {
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
  }
  // Replaces text in a shard's header, keeping the header's length: `to` is padded or must be as long.
  void edit_header(const char* file, const std::string& from, std::string to) const {
    to.resize(std::max(to.size(), from.size()), ' ');
    ASSERT_EQ(to.size(), from.size());
    edit(file, [&](std::string& bytes) { replace(bytes, from, to); });
  }

  TempDirectory temp_;
  std::filesystem::path path_;
};

TEST_F(TwoShards, Loads) {
  const LoadedModel model = load_model(path_);
  EXPECT_THAT(model.warnings, SizeIs(0));
  EXPECT_THAT(model.checkpoint.files(), testing::ElementsAre(kFirst, kSecond));
  EXPECT_EQ(model.weights.layers.size(), 4u);
  EXPECT_EQ(model.checkpoint.find("no such tensor"), nullptr);
}

// A LoadedModel may move: the views stay valid.
TEST_F(TwoShards, ViewsSurviveAMove) {
  LoadedModel model = load_model(path_);
  const uint32_t* codes = model.weights.lm_head.codes;
  const uint32_t first = *codes;
  const LoadedModel moved = std::move(model);
  EXPECT_EQ(moved.weights.lm_head.codes, codes);
  EXPECT_EQ(*codes, first);
}

TEST_F(TwoShards, LastByteOfAShardMissing) {
  edit(kSecond, [](std::string& bytes) { bytes.pop_back(); });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kSecond), HasSubstr("tensor"), HasSubstr("bytes of data")));
}

TEST_F(TwoShards, AByteTooMany) {
  edit(kSecond, [](std::string& bytes) { bytes.push_back('x'); });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kSecond), HasSubstr("bytes of data")));
}

TEST_F(TwoShards, HeaderLengths) {
  const std::string original = read_file(path_ / kSecond);
  for (const uint64_t length : {uint64_t{0}, original.size() + 1, uint64_t{1} << 63, ~uint64_t{0}}) {
    edit(kSecond, [&](std::string& bytes) {
      bytes = original;
      std::memcpy(bytes.data(), &length, 8);
    });
    EXPECT_THAT(load_refused(), AllOf(HasSubstr(kSecond), HasSubstr("header length is " + std::to_string(length))));
  }
}

TEST_F(TwoShards, HeaderNotJson) {
  edit(kFirst, [](std::string& bytes) { bytes[20] = '\1'; });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kFirst), HasSubstr("not valid JSON")));
}

TEST_F(TwoShards, EmptyShard) {
  write_file(path_ / kFirst, "");
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kFirst), HasSubstr("empty")));
}

TEST_F(TwoShards, ShardMissing) {
  std::filesystem::remove(path_ / kSecond);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kIndex), HasSubstr(kSecond), HasSubstr("missing")));
}

TEST_F(TwoShards, ShardIsADirectoryOrAPipe) {
  std::filesystem::remove(path_ / kSecond);
  std::filesystem::create_directory(path_ / kSecond);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kSecond), HasSubstr("not a regular file; put the file itself there")));
  std::filesystem::remove(path_ / kSecond);
  ASSERT_EQ(::mkfifo((path_ / kSecond).c_str(), 0600), 0);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kSecond), HasSubstr("not a regular file; put the file itself there")));
}

TEST_F(TwoShards, IndexNamesATensorAbsentFromItsShard) {
  edit(kIndex, [](std::string& text) { replace(text, "layers.0.mlp.gate.biases", "layers.0.mlp.gate.absent"); });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kIndex), HasSubstr("layers.0.mlp.gate.absent"), HasSubstr(kFirst)));
}

TEST_F(TwoShards, IndexNamesTheOtherShard) {
  edit(kIndex, [](std::string& text) {
    replace(text, "\"language_model.lm_head.scales\": \"" + std::string(kSecond),
            "\"language_model.lm_head.scales\": \"" + std::string(kFirst));
  });
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("language_model.lm_head.scales"), HasSubstr(kFirst)));
}

TEST_F(TwoShards, IndexPointsOutside) {
  for (const char* name : {"../x", "/etc/passwd", "..", "", "a\\\\b", "a\\u0000b"}) {
    write_file(path_ / kIndex, std::string(R"({"weight_map":{"t":")") + name + "\"}}");
    EXPECT_THAT(load_refused(), HasSubstr("not the name of a file in this directory")) << name;
  }
}

TEST_F(TwoShards, IndexOfAnotherForm) {
  for (const char* text : {"[]", "{}", R"({"weight_map":{}})", R"({"weight_map":[]})", "3"}) {
    write_file(path_ / kIndex, text);
    EXPECT_THAT(load_refused(), AllOf(HasSubstr(kIndex), HasSubstr("weight_map"))) << text;
  }
  write_file(path_ / kIndex, R"({"weight_map":{"a":1}})");
  EXPECT_THAT(load_refused(), HasSubstr("a is not mapped to a file name"));
  write_file(path_ / kIndex, R"({"weight_map":{"a":"x","a":"y"}})");
  EXPECT_THAT(load_refused(), HasSubstr("the key a occurs twice"));
  write_file(path_ / kIndex, "{\"weight_map\":");
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kIndex), HasSubstr("not valid JSON")));
  write_file(path_ / kIndex, "{\"\xff\":1}");
  EXPECT_THAT(load_refused(), HasSubstr("UTF-8"));
}

TEST_F(TwoShards, TensorsOverlap) {
  // The second tensor of the file moves onto the first one's last bytes, and the third follows it.
  const Checkpoint checkpoint = Checkpoint::open(path_);
  const Tensor* second = checkpoint.find("language_model.model.embed_tokens.scales");
  ASSERT_NE(second, nullptr);
  const std::string header = read_file(path_ / kFirst).substr(0, 4096);
  const size_t at = header.find("embed_tokens.scales");
  const size_t offsets = header.find("\"data_offsets\":[", at) + 16;
  const std::string range = header.substr(offsets, header.find(']', offsets) - offsets);
  const std::string begin = range.substr(0, range.find(','));
  const std::string end = range.substr(range.find(',') + 1);
  const std::string moved = std::to_string(std::stoul(begin) - 2) + "," + std::to_string(std::stoul(end) - 2);
  edit_header(kFirst, range, moved);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kFirst), HasSubstr("embed_tokens.scales"), HasSubstr("overlap")));
}

TEST_F(TwoShards, ShapeAndRangeDiffer) {
  edit_header(kFirst, R"("shape":[32,8])", R"("shape":[32,9])");  // embed_tokens.weight
  EXPECT_THAT(load_refused(), AllOf(HasSubstr(kFirst), HasSubstr("embed_tokens.weight"), HasSubstr("1152 bytes"),
                                    HasSubstr("has 1024")));
}

TEST_F(TwoShards, TensorInTwoShards) {
  TensorMap second;
  const Checkpoint checkpoint = Checkpoint::open(path_);
  for (const Tensor& tensor : checkpoint.tensors())
    if (tensor.file == 1 || tensor.name == "language_model.model.embed_tokens.scales")
      second[tensor.name] = {tensor.dtype, tensor.shape, {tensor.data.begin(), tensor.data.end()}};
  write_tensors(path_ / kSecond, second);
  EXPECT_THAT(load_refused(), AllOf(HasSubstr("language_model.model.embed_tokens.scales"), HasSubstr(kFirst),
                                    HasSubstr("again in"), HasSubstr(kSecond)));
}

TEST_F(TwoShards, TensorThatTheIndexLeavesOut) {
  edit(kIndex, [](std::string& text) {
    replace(text, "        \"language_model.lm_head.scales\": \"" + std::string(kSecond) + "\",\n", "");
  });
  const LoadedModel model = load_model(path_);
  ASSERT_THAT(model.warnings, SizeIs(1));
  EXPECT_THAT(model.warnings[0], HasSubstr("language_model.lm_head.scales"));
}

TEST_F(TwoShards, UnknownExtraTensorGivesOneWarning) {
  TensorMap tensors = read_tensors(path_);
  tensors["language_model.model.layers.0.mlp.surprise"] = bf16_tensor({3}, [](size_t) { return 1.0f; });
  tensors["another"] = bf16_tensor({3}, [](size_t) { return 1.0f; });
  std::filesystem::remove(path_ / kIndex);
  write_tensors(path_ / "model.safetensors", tensors);
  const LoadedModel model = load_model(path_);
  ASSERT_THAT(model.warnings, SizeIs(1));
  EXPECT_THAT(model.warnings[0], AllOf(HasSubstr("2 tensor(s)"), HasSubstr("mlp.surprise"), HasSubstr("another")));
  EXPECT_EQ(model.warnings[0].find('\n'), std::string::npos);
}

TEST_F(TwoShards, VerifyFindsNumbersThatAreNotFinite) {
  TensorMap tensors = read_tensors(path_);
  const auto poke = [&](const std::string& name, size_t element, float value) {
    const bf16 bits = to_bf16(value);
    std::memcpy(&tensors.at(name).bytes[2 * element], &bits, 2);
  };
  const std::string scales = "language_model.model.layers.1.mlp.switch_mlp.up_proj.scales";
  const std::string biases = "language_model.lm_head.biases";
  poke(scales, 17, std::nanf(""));
  poke(scales, 18, -INFINITY);
  poke(biases, 31, INFINITY);
  std::filesystem::remove(path_ / kIndex);
  write_tensors(path_ / "model.safetensors", tensors);

  load_model(path_);  // loading does not read the weights
  uint64_t last = 0;
  uint64_t total = 0;
  const std::vector<NonFinite> found = Checkpoint::open(path_).verify([&](uint64_t done, uint64_t all) {
    EXPECT_GT(done, last);
    last = done;
    total = all;
  });
  EXPECT_EQ(last, total);
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_EQ(found[0].tensor, biases);
  EXPECT_EQ(found[0].first_element, 31u);
  EXPECT_EQ(found[0].value, INFINITY);
  EXPECT_EQ(found[1].tensor, scales);
  EXPECT_EQ(found[1].first_element, 17u);
  EXPECT_TRUE(std::isnan(found[1].value));
  EXPECT_EQ(found[1].count, 2u);
}

TEST_F(TwoShards, VerifyFindsNothingInAGoodCheckpoint) { EXPECT_THAT(Checkpoint::open(path_).verify(), SizeIs(0)); }

TEST(Verify, ReadsAllFloatTypesWhereverTheyLie) {
  TempDirectory temp;
  const auto bits = [](auto word) { return std::string(reinterpret_cast<const char*>(&word), sizeof(word)); };
  // The header has an odd length, so nothing is aligned.
  std::string header = R"({"f16":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},)"
                       R"("f32":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},)"
                       R"("u32":{"dtype":"U32","shape":[1],"data_offsets":[16,20]}})";
  if (header.size() % 2 == 0) header += ' ';
  const std::string data = bits(uint16_t{0x3c00}) + bits(uint16_t{0x7bff}) + bits(uint16_t{0x7c00}) +
                           bits(uint16_t{0x0001}) + bits(1.5f) + bits(-INFINITY) + bits(uint32_t{0x7fc00000});
  write_file(temp.path() / "model.safetensors", safetensors_bytes(header, data));
  const Checkpoint checkpoint = Checkpoint::open(temp.path());
  const Tensor* f16 = checkpoint.find("f16");
  ASSERT_NE(f16, nullptr);
  EXPECT_FALSE(f16->aligned());
  EXPECT_EQ(f16->float_at(0), 1.0f);
  EXPECT_EQ(f16->float_at(1), 65504.0f);
  EXPECT_EQ(f16->float_at(2), INFINITY);
  EXPECT_EQ(f16->float_at(3), 0x1p-24f);
  const std::vector<NonFinite> found = checkpoint.verify();
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_EQ(found[0].tensor, "f16");
  EXPECT_EQ(found[0].first_element, 2u);
  EXPECT_EQ(found[1].tensor, "f32");
  EXPECT_EQ(found[1].value, -INFINITY);
}

TEST(CheckpointOpen, SaysWhatADirectoryLacks) {
  TempDirectory temp;
  const auto open = [&] { return refusal([&] { Checkpoint::open(temp.path()); }); };
  EXPECT_THAT(refusal([&] { Checkpoint::open(temp.path() / "absent"); }), HasSubstr("not a directory"));
  EXPECT_THAT(open(), AllOf(HasSubstr("neither model.safetensors nor"), HasSubstr(temp.path().string())));
  write_file(temp.path() / "model.safetensors", "");
  EXPECT_THAT(open(), HasSubstr("empty"));
  EXPECT_THAT(refusal([&] { load_model(temp.path()); }), HasSubstr("config.json: missing"));
}

}  // namespace
}  // namespace calla
