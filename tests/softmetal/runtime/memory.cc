#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <random>

#include "checker.h"

namespace softmetal {
namespace {
constexpr size_t kPage = 16384;
std::atomic<uint64_t> next_id{1};
}  // namespace

uint64_t poison_word() {
  // Reads as NaN in float and in both 16-bit formats, so that a kernel which uses it gives itself away.
  static const uint64_t word = [] {
    std::random_device device;
    const uint64_t noise = (uint64_t{device()} << 32) | device();
    return noise | 0x7FC17FC17FC17FC1u;
  }();
  return word;
}

Memory::Memory(size_t bytes, bool poison) : id(next_id++), bytes_(bytes) {
  mapping_bytes_ = (bytes + kPage - 1) / kPage * kPage + 2 * kPage;
  // Metal gives page-aligned buffers; mmap aligns to 4 KB, so place the start on a 16 KB boundary by hand.
  mapping_bytes_ += kPage;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<char*>(mapping);
  const auto start = (reinterpret_cast<uintptr_t>(mapping_) + 2 * kPage - 1) / kPage * kPage;
  data_ = reinterpret_cast<char*>(start);
  if (mprotect(data_, (bytes + kPage - 1) / kPage * kPage, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_bytes_);
    throw std::bad_alloc();
  }
  if (poison) {
    poisoned_ = true;
    const uint64_t word = poison_word();
    for (size_t i = 0; i + 8 <= bytes; i += 8) std::memcpy(data_ + i, &word, 8);
    std::memcpy(data_ + bytes / 8 * 8, &word, bytes % 8);
  }
}

Memory::Memory(void* data, size_t bytes, std::function<void(void*, size_t)> release)
    : id(next_id++), data_(static_cast<char*>(data)), bytes_(bytes), release_(std::move(release)) {}

Memory::~Memory() {
  if (release_) release_(data_, bytes_);
  if (mapping_) munmap(mapping_, mapping_bytes_);
}

}  // namespace softmetal
