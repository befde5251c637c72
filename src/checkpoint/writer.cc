#include "checkpoint/writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/check.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "checkpoint/checkpoint.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kDataAlignment = 64;
constexpr uint64_t kPiece = 4u << 20;  // bytes that a thread makes and writes at a time: large writes, small memory

[[noreturn]] void fail(const fs::path& path, const char* what) {
  throw CheckpointError(path.string() + ": cannot " + what + ": " + std::generic_category().message(errno));
}

std::string file_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

// Where each file's tensors begin, in order; the last entry is the number of tensors.
std::vector<size_t> split_into_shards(std::span<const TensorSpec> tensors, uint64_t max_bytes) {
  std::vector<size_t> begins = {0};
  uint64_t size = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (size > 0 && size + tensors[i].bytes() > max_bytes) {
      begins.push_back(i);
      size = 0;
    }
    size += tensors[i].bytes();
  }
  begins.push_back(tensors.size());
  return begins;
}

// Writes the header of a safetensors file, padded with spaces. Returns where the data begins.
uint64_t write_header(PartialFile& file, std::string text) {
  while ((8 + text.size()) % kDataAlignment != 0) text += ' ';
  const uint64_t length = text.size();
  std::string prefix(sizeof(length), '\0');
  std::memcpy(prefix.data(), &length, sizeof(length));
  text.insert(0, prefix);
  file.write(0, std::as_bytes(std::span(text)));
  return text.size();
}

// Fills and writes the tensors of one file, all threads at pieces that follow one another.
void write_shard(SafetensorsWriter& writer, std::span<const TensorSpec> tensors, size_t first, const TensorFiller& fill,
                 ThreadPool& pool, const std::function<void(uint64_t)>& done) {
  struct Piece {
    size_t tensor;
    uint64_t begin, end;
  };
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = tensors[i].bytes();
    for (uint64_t at = 0; at < bytes; at += kPiece) pieces.push_back({i, at, std::min(bytes, at + kPiece)});
  }
  std::vector<std::vector<std::byte>> buffers(static_cast<size_t>(pool.threads()), std::vector<std::byte>(kPiece));
  const size_t round = 16 * buffers.size();  // pieces between two reports
  for (size_t at = 0; at < pieces.size(); at += round) {
    const size_t count = std::min(round, pieces.size() - at);
    std::mutex mutex;
    std::exception_ptr error;  // the pool's bodies must not throw
    pool.parallel_for(count, 1, [&](size_t begin, size_t end, int thread) {
      for (size_t i = at + begin; i < at + end; ++i) {
        try {
          const Piece& piece = pieces[i];
          const auto bytes = std::span(buffers[static_cast<size_t>(thread)]).first(piece.end - piece.begin);
          fill(first + piece.tensor, piece.begin, bytes);
          writer.write(piece.tensor, piece.begin, bytes);
        } catch (...) {
          const std::lock_guard lock(mutex);
          error = std::current_exception();
        }
      }
    });
    if (error) std::rethrow_exception(error);
    uint64_t bytes = 0;
    for (size_t i = at; i < at + count; ++i) bytes += pieces[i].end - pieces[i].begin;
    done(bytes);
  }
}

}  // namespace

PartialFile::PartialFile(fs::path path) : path_(std::move(path)), partial_(path_.string() + ".partial") {
  // Not blocking, for a pipe under this name would never open.
  fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
  if (fd_ < 0 && errno != ENXIO) fail(partial_, "create the file");
  // One writer at a time. What a killed one left is taken over: its lock is gone.
  struct stat mine = {}, there = {};
  if (fd_ < 0 || ::fstat(fd_, &mine) != 0 || !S_ISREG(mine.st_mode)) {
    if (fd_ >= 0) ::close(fd_);
    throw CheckpointError(partial_.string() + ": not a regular file; remove it");
  }
  const bool locked = ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
  if (!locked || ::fstat(fd_, &mine) != 0 || ::stat(partial_.c_str(), &there) != 0 || mine.st_ino != there.st_ino) {
    ::close(fd_);
    throw CheckpointError(path_.string() + ": another process is writing it; wait for that one to end");
  }
  // A file that is replaced keeps its permissions.
  const bool replaces = ::stat(path_.c_str(), &there) == 0;
  if (::ftruncate(fd_, 0) != 0 || (replaces && ::fchmod(fd_, there.st_mode & 07777) != 0)) {
    const int error = errno;
    ::close(fd_);
    errno = error;
    fail(partial_, "prepare the file");
  }
}

PartialFile::~PartialFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_.c_str());
}

void PartialFile::write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(partial_, "write");
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
}

void PartialFile::finish() {
  // The bytes reach the disk before the name does, or a power cut could leave neither the old file nor the new. The
  // lock is held until the name is final.
  if (::fsync(fd_) != 0 || ::rename(partial_.c_str(), path_.c_str()) != 0) fail(path_, "finish the file");
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) fail(path_, "finish the file");
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::span<const TensorSpec> tensors,
                                     const std::vector<std::pair<std::string, std::string>>& metadata)
    : file_(path) {
  nlohmann::ordered_json header;
  header["__metadata__"] = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  uint64_t at = 0;
  for (const TensorSpec& tensor : tensors) {
    const uint64_t end = at + tensor.bytes();
    header[tensor.name] = {{"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, end}}};
    begins_.push_back(at);
    at = end;
  }
  const uint64_t data_begin = write_header(file_, header.dump());
  for (uint64_t& begin : begins_) begin += data_begin;
}

void SafetensorsWriter::write(size_t index, uint64_t offset, std::span<const std::byte> bytes) {
  check(index < begins_.size(), "write: no such tensor");
  file_.write(begins_[index] + offset, bytes);
}

void write_tensor_files(const fs::path& directory, std::span<const TensorSpec> tensors, const TensorFiller& fill,
                        uint64_t max_shard_bytes, const WriteProgress& progress) {
  uint64_t total = 0;
  for (const TensorSpec& tensor : tensors) total += tensor.bytes();
  const std::vector<size_t> begins = split_into_shards(tensors, max_shard_bytes);
  const size_t shards = begins.size() - 1;
  uint64_t done = 0;
  nlohmann::json index;
  index["metadata"]["total_size"] = total;
  ThreadPool pool;
  for (size_t shard = 0; shard < shards; ++shard) {
    const auto own = tensors.subspan(begins[shard], begins[shard + 1] - begins[shard]);
    const std::string name = file_name(shard, shards);
    SafetensorsWriter writer(directory / name, own);
    write_shard(writer, own, begins[shard], fill, pool, [&](uint64_t bytes) {
      done += bytes;
      if (progress) progress(done, total);
    });
    writer.finish();
    for (const TensorSpec& tensor : own) index["weight_map"][tensor.name] = name;
  }
  write_text_file(directory / "model.safetensors.index.json", index.dump(4) + "\n");
}

std::vector<std::string> pad_headers(const fs::path& directory, const WriteProgress& progress) {
  // Opening checks the files completely, so what is rewritten is known to be sound.
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const std::vector<std::span<const std::byte>> files = checkpoint.mappings();
  std::vector<size_t> odd;
  uint64_t total = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    if (!checkpoint.needs_padding(i)) continue;
    odd.push_back(i);
    total += files[i].size();
  }
  std::vector<std::string> names;
  uint64_t done = 0;
  for (const size_t i : odd) {
    const uint64_t begin = checkpoint.data_begin(i);
    PartialFile file(directory / checkpoint.files()[i]);
    const uint64_t padded = write_header(file, {reinterpret_cast<const char*>(files[i].data()) + 8, begin - 8});
    for (uint64_t at = begin; at < files[i].size(); at += kPiece) {
      const std::span<const std::byte> piece = files[i].subspan(at, std::min<uint64_t>(kPiece, files[i].size() - at));
      file.write(padded + (at - begin), piece);
      done += piece.size();
      if (progress) progress(done, total);
    }
    file.finish();
    names.push_back(checkpoint.files()[i]);
  }
  return names;
}

void write_text_file(const fs::path& path, std::string_view text) {
  PartialFile file(path);
  file.write(0, std::as_bytes(std::span(text)));
  file.finish();
}

}  // namespace calla
