#pragma once
// Memory: the bytes behind a buffer or behind setBytes, with the shadow that the checker keeps for it.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace softmetal {

class Shadow;  // checker's

// Fills fresh memory, so that bytes which the CPU wrote can be told from untouched ones. One random 8-byte word.
uint64_t poison_word();

class Memory {
 public:
  // Fresh, page-aligned, with an inaccessible page on both sides. Poisoned if `poison`.
  Memory(size_t bytes, bool poison);
  // Foreign memory; `release` is called at the end, if given.
  Memory(void* data, size_t bytes, std::function<void(void*, size_t)> release);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool poisoned() const { return poisoned_; }

  std::string label;
  bool untracked = false;               // HazardTrackingModeUntracked
  bool device_only = false;             // setBytes data and the like: nobody else sees it
  std::atomic<int> unretained_uses{0};  // command buffers in flight that do not hold a reference
  std::unique_ptr<Shadow> shadow;
  const uint64_t id;

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  char* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  bool poisoned_ = false;
  std::function<void(void*, size_t)> release_;
};

}  // namespace softmetal
