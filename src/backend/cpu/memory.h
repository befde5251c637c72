#pragma once
// Memory that costs nothing until it is touched: anonymous, zeroed, not reserved, huge pages advised.
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "base/check.h"

namespace calla::cpu {

class MappedMemory {
 public:
  MappedMemory() = default;
  // Throws DeviceError if the address space cannot be had. `what` names the memory in the message.
  MappedMemory(size_t bytes, const char* what);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// An array of T in mapped memory, sized once, zero at first.
template <class T>
class MappedArray {
 public:
  MappedArray() = default;
  MappedArray(size_t count, const char* what) : memory_(count * sizeof(T), what), count_(count) {}
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  size_t size() const { return count_; }
  T& operator[](size_t i) const { return data()[i]; }
  std::span<T> span() const { return {data(), count_}; }

 private:
  MappedMemory memory_;
  size_t count_ = 0;
};

}  // namespace calla::cpu
