#include "checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "checkpoint/describe.h"

namespace calla {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

// Closes a file descriptor at the end of a scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

int advice(MemoryUse use) {
  switch (use) {
    case MemoryUse::kNormal:
      return POSIX_MADV_NORMAL;
    case MemoryUse::kRandom:
      return POSIX_MADV_RANDOM;
    case MemoryUse::kSequential:
      return POSIX_MADV_SEQUENTIAL;
    case MemoryUse::kWillNeed:
      return POSIX_MADV_WILLNEED;
    case MemoryUse::kDontNeed:
      return POSIX_MADV_DONTNEED;
  }
  return POSIX_MADV_NORMAL;
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  // O_NONBLOCK: a named pipe in the place of the file must not make us wait.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) throw CheckpointError(path.string() + ": cannot open: " + reason(errno));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw CheckpointError(path.string() + ": cannot stat: " + reason(errno));
  if (!S_ISREG(info.st_mode)) throw CheckpointError(path.string() + ": not a regular file; put the file itself there");
  if (info.st_size == 0) throw CheckpointError(path.string() + ": the file is empty; download it again?");
  size_ = static_cast<size_t>(info.st_size);
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED)
    throw CheckpointError(path.string() + ": cannot map " + describe_bytes(size_) + ": " + reason(errno));
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::advise(MemoryUse use, size_t offset, size_t length) const {
  if (offset >= size_ || length == 0) return;
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t begin = offset / page * page;
  const size_t end = std::min(size_, length > size_ - offset ? size_ : offset + length);
  // Only a hint: a failure changes nothing that we rely on.
  (void)::posix_madvise(const_cast<std::byte*>(data_) + begin, end - begin, advice(use));
}

AnonymousMemory::AnonymousMemory(size_t size) : size_(size) {
  if (size == 0) return;
  void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED)
    throw CheckpointError("cannot allocate " + describe_bytes(size) + " of memory: " + reason(errno));
  data_ = static_cast<std::byte*>(address);
}

AnonymousMemory::~AnonymousMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

AnonymousMemory::AnonymousMemory(AnonymousMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AnonymousMemory& AnonymousMemory::operator=(AnonymousMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace calla
