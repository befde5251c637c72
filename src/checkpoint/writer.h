#pragma once
// Writing safetensors files and checkpoint directories in the MLX layout. Nothing appears under its final name before
// it is complete.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"

namespace calla {

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;

  uint64_t bytes() const {
    uint64_t product = dtype_bytes(dtype);
    for (const uint64_t size : shape) product *= size;
    return product;
  }
};

// A file that is being written: as PATH.partial, locked, until finish(); removed if that never comes.
class PartialFile {
 public:
  // Throws CheckpointError, as all members do, if the file system refuses or another process is writing the file.
  explicit PartialFile(std::filesystem::path path);
  ~PartialFile();
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  // May be called from several threads at once, for disjoint ranges.
  void write(uint64_t offset, std::span<const std::byte> bytes);
  // Gives the file its final name, replacing one that was there.
  void finish();

 private:
  std::filesystem::path path_;
  std::filesystem::path partial_;
  int fd_ = -1;
};

// One safetensors file. The data begins at a multiple of 64 bytes (the header is padded), so tensors whose sizes are
// multiples of their dtype's size can be used where they lie.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors,
                    const std::vector<std::pair<std::string, std::string>>& metadata = {{"format", "mlx"}});

  // Bytes of tensor `index` from `offset` on; from any thread. Every byte must be written once before finish().
  void write(size_t index, uint64_t offset, std::span<const std::byte> bytes);
  void finish() { file_.finish(); }

 private:
  PartialFile file_;
  std::vector<uint64_t> begins_;  // of each tensor, in the file
};

// Produces bytes [offset, offset + out.size()) of tensors[index]; called from several threads.
using TensorFiller = std::function<void(size_t index, uint64_t offset, std::span<std::byte> out)>;
using WriteProgress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;  // called from one thread

// Writes model.safetensors, or model-0000i-of-0000n.safetensors of at most `max_shard_bytes` each (a larger tensor gets
// a file of its own), and the index that MLX writes in both cases. `progress` may be empty.
void write_tensor_files(const std::filesystem::path& directory, std::span<const TensorSpec> tensors,
                        const TensorFiller& fill, uint64_t max_shard_bytes, const WriteProgress& progress);

// Rewrites the safetensors files of a directory that need it (Checkpoint::needs_padding), with a padded header and
// everything else as it was. Returns the names of those files. Afterwards every backend can use their tensors where they
// lie. A file that is a link is replaced by a file of its own.
std::vector<std::string> pad_headers(const std::filesystem::path& directory, const WriteProgress& progress = {});

// Writes a small text file the same way.
void write_text_file(const std::filesystem::path& path, std::string_view text);

}  // namespace calla
