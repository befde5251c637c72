#pragma once
// Checkpoint: the tensors of a model directory, mapped. One file (model.safetensors) or several with an index
// (model.safetensors.index.json). Opening reads the headers only; the weights are paged in by whoever uses them.
//
// Reading order of this folder: safetensors.h (one file), checkpoint.h (a directory), config.h (config.json),
// writer.h, quantise.h, synthetic.h (making checkpoints), inspect.h (the report).
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"

namespace calla {

struct Tensor {
  std::string name;  // as the file spells it
  Dtype dtype = Dtype::kU8;
  std::vector<uint64_t> shape;
  std::span<const std::byte> data;  // into the mapping, or into a copy (align_tensors)
  int file = 0;                     // index into Checkpoint::files()

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data.data()); }
  uint64_t elements() const { return data.size() / dtype_bytes(dtype); }
  // Whether `data` may be used as an array of its dtype where it lies.
  bool aligned() const { return address() % dtype_bytes(dtype) == 0; }
  // Whether every backend can use `data` where it lies: cpu needs aligned elements, cuda uploads from anywhere, but Metal
  // loads 64 bits of codes at once.
  bool suits_every_backend() const { return aligned() && (dtype != Dtype::kU32 || address() % 8 == 0); }
  // Whether it holds floats that we can read: bf16, fp16 or fp32.
  bool is_float() const { return dtype == Dtype::kBF16 || dtype == Dtype::kF16 || dtype == Dtype::kF32; }
  // Element of a float tensor by flat index; works at any address.
  float float_at(uint64_t index) const;
};

// A number that is not finite, found by Checkpoint::verify.
struct NonFinite {
  std::string tensor;
  uint64_t first_element = 0;  // flat index
  float value = 0;             // NaN or an infinity
  uint64_t count = 0;          // in this tensor
};

class Checkpoint {
 public:
  // Opens a directory. Throws CheckpointError, in well under a second and without large allocations, if a
  // file is missing, cut off or malformed, or if the index and the files disagree.
  static Checkpoint open(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const { return directory_; }
  const std::vector<std::string>& files() const { return files_; }  // names in the directory
  std::span<const Tensor> tensors() const { return tensors_; }      // ordered by name
  const Tensor* find(std::string_view name) const;                  // null: not there
  std::vector<std::span<const std::byte>> mappings() const;         // of the files, in the order of files()
  uint64_t data_begin(size_t file) const;                           // where the file's tensors begin, behind its header
  // Whether some backend would have to copy tensors of the file that it could use in place behind a padded header.
  bool needs_padding(size_t file) const;
  uint64_t bytes() const;  // of all tensors
  // Things worth a line to the user that do not stand in the way of loading.
  const std::vector<std::string>& warnings() const { return warnings_; }

  // Copies the tensors among `names` that lie at addresses unfit for their dtype into memory of the checkpoint's own,
  // and points their `data` there. (MLX does not pad the header, so whole files can lie at odd addresses.) Returns the
  // bytes copied. Cost: reads those tensors, and holds them in memory that cannot be paged out to the file.
  uint64_t align_tensors(std::span<const std::string> names);

  // Replaces a tensor [stack, 2 * rows, columns] by two of [stack, rows, columns]: the first half of the rows of each
  // stack, and the second. Both are copies, held as those of align_tensors. Returns the bytes copied.
  uint64_t split_rows(const std::string& name, const std::string& first, const std::string& second);
  // Gives a tensor another name; a name that no other tensor has.
  void rename(const std::string& name, const std::string& new_name);

  // Reads every float tensor (all of bf16, fp16, fp32: scales, biases, norms) and reports those with a NaN or an
  // infinity, in the order of tensors(). `progress(done, total)` in bytes may be empty; it is called from this thread.
  using Progress = std::function<void(uint64_t done, uint64_t total)>;
  std::vector<NonFinite> verify(const Progress& progress = {}) const;

 private:
  void add_file(const std::string& name);
  Tensor& at(const std::string& name);  // it must be there
  void sort_tensors();
  void release(const Tensor& tensor) const;  // its pages of the mapping will not be read again
  void check_index(const std::vector<std::pair<std::string, std::string>>& weight_map);

  std::filesystem::path directory_;
  std::vector<std::string> files_;
  std::vector<MappedFile> mappings_;
  std::vector<Tensor> tensors_;
  std::vector<std::string> warnings_;
  std::vector<AnonymousMemory> copies_;
};

}  // namespace calla
