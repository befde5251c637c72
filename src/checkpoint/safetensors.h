#pragma once
// The safetensors format: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes. The header
// maps each tensor name to {"dtype", "shape", "data_offsets": [begin, end]}, offsets counted from the end of the
// header; "__metadata__" maps strings to strings. The tensors cover the data without holes or overlaps.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace calla {

enum class Dtype : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
  kC64,
};

std::string_view dtype_name(Dtype dtype);  // as the file spells it: "BF16"
size_t dtype_bytes(Dtype dtype);

// A longer header is refused. A checkpoint with two thousand tensors has a header of 250 kB.
inline constexpr uint64_t kMaxHeaderBytes = 16u << 20;

struct TensorEntry {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // of its bytes, counted from the start of the file
  uint64_t end = 0;
};

struct SafetensorsHeader {
  uint64_t data_begin = 0;           // where the data starts in the file; any number, also an odd one
  std::vector<TensorEntry> tensors;  // in the order of their bytes
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Parses and checks the header against the whole file. Throws CheckpointError, naming `file_name`, on anything that
// breaks the format: afterwards every tensor's range lies inside the file, has the size that its dtype and shape ask
// for, and overlaps no other. Alignment is not part of the format: writers exist that do not pad the header.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, const std::string& file_name);

}  // namespace calla
