// One safetensors file: what is accepted, and every way a header can be wrong.
#include "checkpoint/safetensors.h"

#include <chrono>

#include "tests/checkpoint/checkpoint_files.h"

namespace calla {
namespace {

using testing::AllOf;
using testing::HasSubstr;

SafetensorsHeader parse(const std::string& bytes) { return parse_safetensors(std::as_bytes(std::span(bytes)), "f"); }
std::string refused(const std::string& bytes) {
  return refusal([&] { parse(bytes); });
}

TEST(Safetensors, ReadsTensorsInTheOrderOfTheirBytes) {
  const std::string header =
      R"({"__metadata__":{"format":"mlx"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},)"
      R"("a":{"data_offsets":[0,4],"shape":[2],"dtype":"BF16"},"empty":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})";
  const SafetensorsHeader parsed = parse(safetensors_bytes(header, std::string(12, 'x')));
  ASSERT_EQ(parsed.tensors.size(), 3u);
  EXPECT_EQ(parsed.tensors[0].name, "a");
  EXPECT_EQ(parsed.tensors[0].dtype, Dtype::kBF16);
  EXPECT_EQ(parsed.tensors[0].begin, 8 + header.size());
  EXPECT_EQ(parsed.tensors[0].end, 12 + header.size());
  EXPECT_EQ(parsed.tensors[1].name, "empty");
  EXPECT_EQ(parsed.tensors[2].shape, (std::vector<uint64_t>{2, 1}));
  ASSERT_EQ(parsed.metadata.size(), 1u);
  EXPECT_EQ(parsed.metadata[0], std::pair(std::string("format"), std::string("mlx")));
}

TEST(Safetensors, AcceptsWhatWritersDo) {
  EXPECT_TRUE(parse(safetensors_bytes("{}")).tensors.empty());
  EXPECT_TRUE(parse(safetensors_bytes("{}      ")).tensors.empty());                  // padded header
  EXPECT_TRUE(parse(safetensors_bytes(R"({"__metadata__":null})")).tensors.empty());  // MLX without metadata
  EXPECT_EQ(parse(safetensors_bytes(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", "abcd")).tensors.size(),
            1u);
}

TEST(Safetensors, RefusesHeaderLengths) {
  EXPECT_THAT(refused(""), HasSubstr("0 bytes"));
  EXPECT_THAT(refused("1234567"), HasSubstr("7 bytes"));
  EXPECT_THAT(refused(safetensors_bytes(0, "{}")), HasSubstr("header length is 0"));
  EXPECT_THAT(refused(safetensors_bytes(3, "{}")), AllOf(HasSubstr("header length is 3"), HasSubstr("only 10")));
  EXPECT_THAT(refused(safetensors_bytes(uint64_t{1} << 63, "{}")), HasSubstr("9223372036854775808"));
  EXPECT_THAT(refused(safetensors_bytes(~uint64_t{0}, "{}")), HasSubstr("18446744073709551615"));
  EXPECT_THAT(refused(safetensors_bytes(kMaxHeaderBytes, "{}")), HasSubstr("only 10"));
}

TEST(Safetensors, RefusesHeadersThatAreNotJson) {
  EXPECT_THAT(refused(safetensors_bytes("GGUF")), HasSubstr("begin with {"));
  EXPECT_THAT(refused(safetensors_bytes("[]")), HasSubstr("begin with {"));
  EXPECT_THAT(refused(safetensors_bytes(" {}")), HasSubstr("begin with {"));
  EXPECT_THAT(refused(safetensors_bytes("{")), AllOf(HasSubstr("not valid JSON"), HasSubstr("byte")));
  EXPECT_THAT(refused(safetensors_bytes("{} x")), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused(safetensors_bytes("{}{}")), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused(safetensors_bytes("{\"a\":1e400}")), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused(safetensors_bytes(std::string("{}\0", 3))), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused(safetensors_bytes("{\"a\xff\":1}")), AllOf(HasSubstr("not valid JSON"), HasSubstr("UTF-8")));
  EXPECT_THAT(refused(safetensors_bytes("{\"\xc0\xaf\":1}")), HasSubstr("UTF-8"));
}

TEST(Safetensors, RefusesHeadersOfAnotherForm) {
  for (const char* header : {R"({"a":1})",
                             R"({"a":null})",
                             R"({"a":[]})",
                             R"({"a":"x"})",
                             R"({"a":true})",
                             R"({"a":{}})",
                             R"({"a":{"dtype":"U8"}})",
                             R"({"a":{"dtype":"U8","shape":[1]}})",
                             R"({"a":{"shape":[1],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","data_offsets":[0,1]}})",
                             R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":["1"],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})",
                             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[]}})",
                             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})",
                             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":{}}})",
                             R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                             R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":{}}})",
                             R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})"})
    EXPECT_THAT(refused(safetensors_bytes(header, "x")), AllOf(HasSubstr("f: "), HasSubstr("tensor a"))) << header;
  for (const char* header : {R"({"__metadata__":1})", R"({"__metadata__":{"a":1}})", R"({"__metadata__":{"a":{}}})",
                             R"({"__metadata__":[]})"})
    EXPECT_THAT(refused(safetensors_bytes(header)), HasSubstr("f: the header has")) << header;
}

TEST(Safetensors, RefusesDuplicateNames) {
  EXPECT_THAT(refused(safetensors_bytes(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                        R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                                        "xy")),
              HasSubstr("tensor a occurs twice"));
}

TEST(Safetensors, RefusesRangesThatDoNotFit) {
  const auto with = [](const std::string& shape, const std::string& offsets, const std::string& dtype = "F32") {
    return safetensors_bytes(
        R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", "12345678");
  };
  EXPECT_THAT(refused(with("[2]", "[0,8]", "F31")), HasSubstr("unknown dtype F31"));
  EXPECT_THAT(refused(with("[2]", "[8,0]")), HasSubstr("ends before it begins"));
  EXPECT_THAT(refused(with("[4]", "[0,16]")), AllOf(HasSubstr("tensor a"), HasSubstr("only 8 bytes of data")));
  EXPECT_THAT(refused(with("[2]", "[18446744073709551608,18446744073709551615]")), HasSubstr("only 8 bytes"));
  EXPECT_THAT(refused(with("[3]", "[0,8]")),
              AllOf(HasSubstr("F32 [3]"), HasSubstr("takes 12 bytes"), HasSubstr("has 8")));
  EXPECT_THAT(refused(with("[4294967296,4294967296]", "[0,8]")), HasSubstr("impossible shape"));
  EXPECT_THAT(refused(with("[18446744073709551615,2]", "[0,8]", "U8")), HasSubstr("impossible shape"));
  // The product wraps around to 8 bytes.
  EXPECT_THAT(refused(with("[4611686018427387906]", "[0,8]")), HasSubstr("impossible shape"));
  EXPECT_THAT(refused(with("[1]", "[0,4]")), HasSubstr("end after 4 bytes of data"));
  EXPECT_THAT(refused(with("[1]", "[4,8]")), HasSubstr("4 bytes that belong to no tensor"));
  EXPECT_THAT(refused(with("[99999999999999999999]", "[0,8]")), HasSubstr("not an integer"));
}

TEST(Safetensors, RefusesOverlapsAndHoles) {
  const auto two = [](const std::string& a, const std::string& b) {
    return safetensors_bytes(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                                 R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                             "12345678");
  };
  EXPECT_EQ(parse(two("[4,8]", "[0,4]")).tensors.size(), 2u);
  EXPECT_THAT(refused(two("[0,4]", "[3,7]")), HasSubstr("a and b overlap"));
  EXPECT_THAT(refused(two("[0,4]", "[0,4]")), HasSubstr("overlap"));
}

// Messages stay short and printable whatever the names are.
TEST(Safetensors, QuotesNamesSafely) {
  const std::string name = "\\u0000\\n" + std::string(5000, 'a');
  const std::string message = refused(safetensors_bytes("{\"" + name + "\":{}}"));
  EXPECT_LT(message.size(), 300u);
  EXPECT_EQ(message.find('\0'), std::string::npos);
  EXPECT_THAT(message, HasSubstr("\\x00\\naaa"));
}

// The parser never recurses and keeps nothing of what it refuses.
TEST(Safetensors, RefusesHostileHeadersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const size_t size = 8u << 20;
  EXPECT_THAT(refused(safetensors_bytes("{" + std::string(size, '['))), HasSubstr("not valid JSON"));
  EXPECT_THAT(refused(safetensors_bytes("{\"a\":" + std::string(size, '['))), HasSubstr("an array"));
  std::string nested = "{";
  for (size_t i = 0; i < size / 5; ++i) nested += "\"a\":{";
  EXPECT_THAT(refused(safetensors_bytes(nested)), HasSubstr("unknown"));
  EXPECT_THAT(refused(safetensors_bytes("{\"" + std::string(size, 'a'))), HasSubstr("not valid JSON"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));  // under sanitizers too
}

}  // namespace
}  // namespace calla
