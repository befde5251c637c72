// The safetensors header: any bytes are either refused with a CheckpointError, or every tensor lies inside the file and
// has the size that its shape asks for.
#include <cstring>
#include <span>

#include "base/check.h"
#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace calla;
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  try {
    const SafetensorsHeader header = parse_safetensors(file, "fuzz");
    uint64_t at = header.data_begin;
    for (const TensorEntry& tensor : header.tensors) {
      uint64_t bytes = dtype_bytes(tensor.dtype);
      for (const uint64_t dimension : tensor.shape) bytes *= dimension;
      check(tensor.begin == at && tensor.end >= tensor.begin && tensor.end <= size, "a tensor is out of place");
      check(bytes == tensor.end - tensor.begin, "a tensor has another size than its shape");
      at = tensor.end;
    }
    check(at == size, "the tensors do not cover the file");
  } catch (const CheckpointError&) {
  }
  return 0;
}

std::vector<std::string> calla::fuzz_seeds() {
  const auto file = [](const std::string& header, const std::string& data) {
    const uint64_t length = header.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &length, 8);
    return out + header + data;
  };
  return {
      file("{}", ""),
      file(R"({"__metadata__":{"format":"mlx"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"),
      file(R"({"w":{"dtype":"U32","shape":[1,2],"data_offsets":[4,12]},"s":{"dtype":"BF16","shape":[2,1],)"
           R"("data_offsets":[0,4]},"e":{"dtype":"U8","shape":[0],"data_offsets":[12,12]}}   )",
           "123456789012"),
  };
}
