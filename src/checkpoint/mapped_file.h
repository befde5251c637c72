#pragma once
// MappedFile: a file's bytes in memory without reading them, for as long as the object lives. Read-only.
// AnonymousMemory: page-aligned zeroed memory of our own, given back when the object dies.
//
// A file that another program shortens while it is mapped makes later reads fail with SIGBUS; the length is checked
// once, when it is mapped.
#include <cstddef>
#include <filesystem>
#include <span>

namespace calla {

// What a range of a mapping will be used for; a hint to the operating system, without effect on what is read.
enum class MemoryUse { kNormal, kRandom, kSequential, kWillNeed, kDontNeed };

class MappedFile {
 public:
  // Throws CheckpointError if the file is missing, unreadable, empty or not a regular file.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Page-aligned. Moving the MappedFile does not move the bytes.
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  void advise(MemoryUse use, size_t offset, size_t length) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

class AnonymousMemory {
 public:
  // Throws CheckpointError if the system has no such amount of memory to give.
  explicit AnonymousMemory(size_t size);
  ~AnonymousMemory();
  AnonymousMemory(AnonymousMemory&& other) noexcept;
  AnonymousMemory& operator=(AnonymousMemory&& other) noexcept;
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace calla
