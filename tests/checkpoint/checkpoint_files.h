#pragma once
// Small checkpoints to damage: directories that clean up after themselves, files built byte by byte, tensors in a map.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/synthetic.h"
#include "checkpoint/writer.h"

namespace calla {

class TempDirectory {
 public:
  TempDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "calla-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A safetensors file: any header length, any header, any data.
inline std::string safetensors_bytes(uint64_t header_length, const std::string& header, const std::string& data = "") {
  std::string out(8, '\0');
  std::memcpy(out.data(), &header_length, 8);
  return out + header + data;
}
inline std::string safetensors_bytes(const std::string& header, const std::string& data = "") {
  return safetensors_bytes(header.size(), header, data);
}

struct TensorData {
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;
  std::vector<std::byte> bytes;
};
using TensorMap = std::map<std::string, TensorData>;

inline TensorMap read_tensors(const std::filesystem::path& directory) {
  TensorMap out;
  const Checkpoint checkpoint = Checkpoint::open(directory);
  for (const Tensor& tensor : checkpoint.tensors())
    out[tensor.name] = {tensor.dtype, tensor.shape, {tensor.data.begin(), tensor.data.end()}};
  return out;
}

inline void write_tensors(const std::filesystem::path& path, const TensorMap& tensors,
                          const std::vector<std::pair<std::string, std::string>>& metadata = {{"format", "mlx"}}) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.dtype, tensor.shape});
  SafetensorsWriter writer(path, specs, metadata);
  size_t index = 0;
  for (const auto& [name, tensor] : tensors) writer.write(index++, 0, tensor.bytes);
  writer.finish();
}

inline TensorData bf16_tensor(std::vector<uint64_t> shape, const std::function<float(size_t)>& value) {
  TensorData out{Dtype::kBF16, std::move(shape), {}};
  size_t elements = 1;
  for (const uint64_t size : out.shape) elements *= size;
  out.bytes.resize(2 * elements);
  for (size_t i = 0; i < elements; ++i) {
    const bf16 element = to_bf16(value(i));
    std::memcpy(&out.bytes[2 * i], &element, 2);
  }
  return out;
}

// A model of four layers (three gated delta net, one attention) that takes well under a megabyte.
inline ModelShape mini_shape(int width = 64) {
  ModelShape shape = named_shape("calla-tiny", 4);
  shape.hidden = width;
  shape.vocab = 32;
  shape.gdn_key_heads = 1;
  shape.gdn_value_heads = 2;
  shape.experts = 8;
  shape.expert_width = width;
  shape.shared_expert_width = width;
  return shape;
}

inline SyntheticOptions mini_options(int width = 64) {
  SyntheticOptions options;
  options.shape = mini_shape(width);
  options.seed = 7;
  return options;
}

// What `action` throws; the test fails if it throws nothing, or something that is not a CheckpointError.
inline std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const CheckpointError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a CheckpointError: " << error.what();
    return "";
  }
  ADD_FAILURE() << "was accepted";
  return "";
}

}  // namespace calla
