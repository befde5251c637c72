#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/bf16.h"
#include "base/check.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "checkpoint/describe.h"
#include "checkpoint/json_file.h"
#include "checkpoint/tensor_names.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = 8u << 20;

using WeightMap = std::vector<std::pair<std::string, std::string>>;  // tensor -> file, ordered by tensor

// The index's weight_map. File names must be plain names, so that an index cannot point outside its directory.
WeightMap read_index(const fs::path& path) {
  const nlohmann::json index = parse_json(read_text_file(path, kMaxIndexBytes), path.string());
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty())
    throw CheckpointError(path.string() + ": expected an object with a weight_map that names the tensors' files");
  WeightMap out;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string())
      throw CheckpointError(path.string() + ": weight_map: " + describe_name(tensor) + " is not mapped to a file name");
    const auto& name = file.get_ref<const std::string&>();
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain)
      throw CheckpointError(path.string() + ": weight_map: \"" + describe_name(name) +
                            "\" is not the name of a file in this directory");
    out.emplace_back(tensor, name);
  }
  return out;
}

float fp16_to_float(uint16_t bits) {
  const float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
  const int exponent = (bits >> 10) & 31;
  const auto fraction = static_cast<float>(bits & 1023u);
  if (exponent == 31) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}

// A piece of a float tensor, for verify().
struct ScanTask {
  const Tensor* tensor;
  uint64_t begin, end;     // elements
  uint64_t bad = 0;        // how many are not finite
  uint64_t first_bad = 0;  // the first of them
};

// A float is not finite when all its exponent bits are set.
template <typename Word>
void scan(ScanTask& task, Word exponent_mask) {
  const std::byte* data = task.tensor->data.data();
  for (uint64_t i = task.begin; i < task.end; ++i) {
    Word bits = 0;
    std::memcpy(&bits, data + i * sizeof(Word), sizeof(Word));
    if ((bits & exponent_mask) != exponent_mask) [[likely]]
      continue;
    if (task.bad++ == 0) task.first_bad = i;
  }
}

void scan(ScanTask& task) {
  switch (task.tensor->dtype) {
    case Dtype::kBF16:
      return scan<uint16_t>(task, 0x7f80);
    case Dtype::kF16:
      return scan<uint16_t>(task, 0x7c00);
    default:
      return scan<uint32_t>(task, 0x7f800000);
  }
}

}  // namespace

float Tensor::float_at(uint64_t index) const {
  const std::byte* at = data.data() + index * dtype_bytes(dtype);
  if (dtype == Dtype::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return dtype == Dtype::kBF16 ? to_float(bf16{bits}) : fp16_to_float(bits);
}

Checkpoint Checkpoint::open(const fs::path& directory) {
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored))
    throw CheckpointError(directory.string() + ": not a directory; give the directory that holds config.json and " +
                          kSingleFile);
  Checkpoint checkpoint;
  checkpoint.directory_ = directory;
  const bool has_index = fs::exists(directory / kIndexFile, ignored);
  if (has_index) {
    const WeightMap weight_map = read_index(directory / kIndexFile);
    std::set<std::string> files;
    for (const auto& [tensor, file] : weight_map) files.insert(file);
    for (const std::string& file : files) {
      if (!fs::exists(directory / file, ignored))
        throw CheckpointError((directory / kIndexFile).string() + ": names the file " + describe_name(file) +
                              ", which is missing; is the download complete?");
    }
    for (const std::string& file : files) checkpoint.add_file(file);
    checkpoint.check_index(weight_map);
  } else if (fs::exists(directory / kSingleFile, ignored)) {
    checkpoint.add_file(kSingleFile);
  } else {
    throw CheckpointError(directory.string() + ": has neither " + kSingleFile + " nor " + kIndexFile +
                          "; give the directory of a checkpoint in the MLX layout");
  }
  checkpoint.sort_tensors();
  for (size_t i = 1; i < checkpoint.tensors_.size(); ++i) {
    const Tensor& a = checkpoint.tensors_[i - 1];
    const Tensor& b = checkpoint.tensors_[i];
    if (a.name == b.name)
      throw CheckpointError(directory.string() + ": tensor " + describe_name(a.name) + " is in " +
                            checkpoint.files_[a.file] + " and again in " + checkpoint.files_[b.file]);
  }
  return checkpoint;
}

void Checkpoint::add_file(const std::string& name) {
  const fs::path path = directory_ / name;
  MappedFile file(path);
  SafetensorsHeader header = parse_safetensors(file.bytes(), path.string());
  for (TensorEntry& entry : header.tensors) {
    tensors_.push_back({std::move(entry.name), entry.dtype, std::move(entry.shape),
                        file.bytes().subspan(entry.begin, entry.end - entry.begin), static_cast<int>(files_.size())});
  }
  files_.push_back(name);
  mappings_.push_back(std::move(file));
}

// Every tensor must be in the file that the index names. Tensors that the index leaves out are kept, with a warning.
void Checkpoint::check_index(const WeightMap& weight_map) {
  std::set<std::pair<std::string_view, std::string_view>> present;
  for (const Tensor& tensor : tensors_) present.emplace(tensor.name, files_[tensor.file]);
  for (const auto& [tensor, file] : weight_map) {
    if (present.erase({tensor, file}) == 0)
      throw CheckpointError((directory_ / kIndexFile).string() + ": says that tensor " + describe_name(tensor) +
                            " is in " + file + ", but it is not; are the files of one download?");
  }
  if (!present.empty()) {
    warnings_.push_back(std::string(kIndexFile) + " leaves out " + std::to_string(present.size()) +
                        " tensor(s) of the files, such as " + describe_name(present.begin()->first));
  }
}

const Tensor* Checkpoint::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const Tensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

std::vector<std::span<const std::byte>> Checkpoint::mappings() const {
  std::vector<std::span<const std::byte>> out;
  for (const MappedFile& file : mappings_) out.push_back(file.bytes());
  return out;
}

uint64_t Checkpoint::data_begin(size_t file) const {
  uint64_t length = 0;  // of the header, checked when the file was opened
  std::memcpy(&length, mappings_[file].bytes().data(), sizeof(length));
  return sizeof(length) + length;
}

bool Checkpoint::needs_padding(size_t file) const {
  constexpr uint64_t kEnough = 8;  // see Tensor::suits_every_backend
  if (data_begin(file) % kEnough == 0) return false;
  return std::any_of(tensors_.begin(), tensors_.end(), [&](const Tensor& tensor) {
    return static_cast<size_t>(tensor.file) == file && !is_unused_part(tensor.name) && !tensor.suits_every_backend();
  });
}

uint64_t Checkpoint::bytes() const {
  uint64_t sum = 0;
  for (const Tensor& tensor : tensors_) sum += tensor.data.size();
  return sum;
}

Tensor& Checkpoint::at(const std::string& name) {
  const Tensor* found = find(name);
  check(found != nullptr, "no such tensor");
  return tensors_[static_cast<size_t>(found - tensors_.data())];
}

void Checkpoint::sort_tensors() {
  std::sort(tensors_.begin(), tensors_.end(), [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
}

void Checkpoint::release(const Tensor& tensor) const {
  const MappedFile& file = mappings_[static_cast<size_t>(tensor.file)];
  file.advise(MemoryUse::kDontNeed, static_cast<size_t>(tensor.data.data() - file.bytes().data()), tensor.data.size());
}

uint64_t Checkpoint::align_tensors(std::span<const std::string> names) {
  constexpr uint64_t kAlignment = 64;               // a cache line
  std::vector<std::pair<Tensor*, uint64_t>> moves;  // tensor, offset in the copy
  uint64_t size = 0;
  for (const std::string& name : names) {
    Tensor& tensor = at(name);
    if (tensor.aligned()) continue;
    moves.emplace_back(&tensor, size);
    size += (tensor.data.size() + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (moves.empty()) return 0;
  AnonymousMemory copy(size);
  ThreadPool pool;
  pool.parallel_for(moves.size(), 1, [&](size_t begin, size_t end, int) {
    for (size_t i = begin; i < end; ++i) {
      const auto& [tensor, offset] = moves[i];
      std::memcpy(copy.bytes().data() + offset, tensor->data.data(), tensor->data.size());
      release(*tensor);
    }
  });
  for (const auto& [tensor, offset] : moves) tensor->data = copy.bytes().subspan(offset, tensor->data.size());
  copies_.push_back(std::move(copy));
  return size;
}

uint64_t Checkpoint::split_rows(const std::string& name, const std::string& first, const std::string& second) {
  const Tensor whole = at(name);
  check(whole.shape.size() == 3 && whole.shape[1] % 2 == 0, "split_rows: [stack, 2 * rows, columns]");
  const uint64_t stack = whole.shape[0];
  AnonymousMemory copy(whole.data.size());
  const size_t half = whole.data.size() / 2;
  const size_t block = stack > 0 ? half / stack : 0;  // bytes of one half of one of the stack
  for (uint64_t i = 0; i < stack; ++i) {
    std::memcpy(copy.bytes().data() + i * block, whole.data.data() + 2 * i * block, block);
    std::memcpy(copy.bytes().data() + half + i * block, whole.data.data() + (2 * i + 1) * block, block);
  }
  release(whole);
  const std::vector<uint64_t> shape = {stack, whole.shape[1] / 2, whole.shape[2]};
  at(name) = {first, whole.dtype, shape, copy.bytes().first(half), whole.file};
  tensors_.push_back({second, whole.dtype, shape, copy.bytes().subspan(half), whole.file});
  sort_tensors();
  copies_.push_back(std::move(copy));
  return 2 * half;
}

void Checkpoint::rename(const std::string& name, const std::string& new_name) {
  check(find(new_name) == nullptr, "rename: the name is taken");
  at(name).name = new_name;
  sort_tensors();
}

std::vector<NonFinite> Checkpoint::verify(const Progress& progress) const {
  constexpr uint64_t kPiece = 1u << 22;  // elements per task
  std::vector<ScanTask> tasks;
  uint64_t total = 0;
  for (const Tensor& tensor : tensors_) {
    if (!tensor.is_float()) continue;
    total += tensor.data.size();
    for (uint64_t at = 0; at < tensor.elements(); at += kPiece)
      tasks.push_back({&tensor, at, std::min(at + kPiece, tensor.elements())});
  }
  ThreadPool pool;
  const size_t round = 4 * static_cast<size_t>(pool.threads());  // tasks between two reports
  uint64_t done = 0;
  for (size_t at = 0; at < tasks.size(); at += round) {
    const size_t count = std::min(round, tasks.size() - at);
    pool.parallel_for(count, 1, [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) scan(tasks[at + i]);
    });
    for (size_t i = at; i < at + count; ++i)
      done += (tasks[i].end - tasks[i].begin) * dtype_bytes(tasks[i].tensor->dtype);
    if (progress) progress(done, total);
  }
  std::vector<NonFinite> problems;
  const Tensor* last = nullptr;
  for (const ScanTask& task : tasks) {
    if (task.bad == 0) continue;
    if (task.tensor == last) {
      problems.back().count += task.bad;
    } else {
      problems.push_back({task.tensor->name, task.first_bad, task.tensor->float_at(task.first_bad), task.bad});
      last = task.tensor;
    }
  }
  return problems;
}

}  // namespace calla
