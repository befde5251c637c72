#include "backend/cpu/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>

#include "base/error.h"

namespace calla::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

MappedMemory::MappedMemory(size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
  flags |= MAP_NORESERVE;
#endif
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED)
    throw DeviceError("cpu: cannot map " + std::to_string(bytes >> 20) + " MiB, " + what + ": " + std::strerror(errno) +
                      "; use a smaller context or fewer sequences");
  data_ = static_cast<std::byte*>(memory);
#ifdef MADV_HUGEPAGE
  if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed only
#endif
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace calla::cpu
