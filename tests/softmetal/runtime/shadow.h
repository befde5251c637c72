#pragma once
// Shadow: what the checker remembers about the bytes of a Memory. Everything is mapped lazily, so that a large buffer
// costs only where it is touched.
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace softmetal {

class Memory;

// A zeroed array of which only touched pages take memory.
template <class T>
class LazyArray {
 public:
  explicit LazyArray(size_t count);
  ~LazyArray();
  LazyArray(const LazyArray&) = delete;
  LazyArray& operator=(const LazyArray&) = delete;
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

// Who touched a byte last, within a dispatch. One word, so that it is cheap to compare and store.
//   valid 1 | atomic 1 | readers 2 | group 22 | thread 10 | epoch 16 | simdgroup epoch 12
struct Toucher {
  enum Several : uint64_t { kOne = 0, kSimdgroup = 1, kGroup = 2, kGroups = 3 };  // how many threads it stands for
  uint64_t bits = 0;

  static Toucher make(bool atomic, uint32_t group, uint32_t thread, uint32_t epoch, uint32_t simd_epoch) {
    return {uint64_t{1} << 63 | uint64_t{atomic} << 62 | uint64_t{group & 0x3FFFFFu} << 38 |
            uint64_t{thread & 0x3FFu} << 28 | uint64_t{epoch & 0xFFFFu} << 12 | (simd_epoch & 0xFFFu)};
  }
  bool valid() const { return bits >> 63; }
  bool atomic() const { return bits >> 62 & 1; }
  uint64_t several() const { return bits >> 60 & 3; }
  uint32_t group() const { return static_cast<uint32_t>(bits >> 38 & 0x3FFFFFu); }
  uint32_t thread() const { return static_cast<uint32_t>(bits >> 28 & 0x3FFu); }
  uint32_t epoch() const { return static_cast<uint32_t>(bits >> 12 & 0xFFFFu); }
  uint32_t simd_epoch() const { return static_cast<uint32_t>(bits & 0xFFFu); }

  // Does everything that this stands for come before what `me` does now?
  bool before(const Toucher& me) const {
    if (!valid()) return true;
    if (several() == kGroups || group() != me.group()) return false;
    if (epoch() != me.epoch()) return true;
    if (several() == kGroup) return false;
    if (several() == kOne && thread() == me.thread()) return true;
    return thread() / 32 == me.thread() / 32 && simd_epoch() != me.simd_epoch();
  }
  // Both, when neither comes before the other.
  Toucher merged(const Toucher& me) const {
    uint64_t how = several();
    const bool both_atomic = atomic() && me.atomic();
    if (group() != me.group()) {
      how = kGroups;
    } else if (thread() / 32 != me.thread() / 32) {
      how = how > kGroup ? how : uint64_t{kGroup};
    } else if (thread() != me.thread() && how < kSimdgroup) {
      how = kSimdgroup;
    }
    return {(me.bits & ~(uint64_t{7} << 60)) | how << 60 | uint64_t{both_atomic} << 62};
  }
};

struct Cell {
  Toucher write, read;
  bool operator==(const Cell& o) const { return write.bits == o.write.bits && read.bits == o.read.bits; }
};

// The accesses of a dispatch to one 4 KB page, a bit per byte.
struct PageSet {
  static constexpr size_t kWords = 64;
  std::array<uint64_t, kWords> read{}, write{}, atomic{};
  void add(const PageSet& o) {
    for (size_t i = 0; i < kWords; ++i) {
      read[i] |= o.read[i];
      write[i] |= o.write[i];
      atomic[i] |= o.atomic[i];
    }
  }
  // The first byte that both touch, one of them writing; -1 if none. Atomics do not conflict with atomics.
  int conflict(const PageSet& o) const;
};
constexpr size_t kShadowPage = 4096;
// By memory id and page.
using AccessSet = std::map<std::pair<uint64_t, size_t>, std::unique_ptr<PageSet>>;

class Shadow {
 public:
  explicit Shadow(const Memory& memory);

  enum State : uint8_t { kUnknown = 0, kWritten = 1, kUnwritten = 2 };

  // Marks and checks. True if some byte of [at, at + bytes) was never written by CPU or GPU.
  bool read_is_uninitialised(size_t at, size_t bytes);
  void mark_written(size_t at, size_t bytes);

  // The cell of a byte in this dispatch; a page's cells start empty in every dispatch.
  Cell& cell(size_t at, uint64_t dispatch) {
    const size_t page = at / kShadowPage;
    if (generations_[page] != dispatch) clear_page(page, dispatch);
    return cells_[at];
  }

  PageSet& page_set(size_t at) {
    PageSet*& set = current_[at / kShadowPage];
    if (!set) set = new_page_set(at / kShadowPage);
    return *set;
  }
  void note(size_t at, size_t bytes, bool write, bool atomic);
  void take_sets(AccessSet& into);  // of this dispatch; ends it

 private:
  bool block_is_poison(size_t at) const;
  void clear_page(size_t page, uint64_t dispatch);
  PageSet* new_page_set(size_t page);

  const Memory& memory_;
  LazyArray<uint8_t> states_;
  LazyArray<Cell> cells_;
  LazyArray<uint64_t> generations_;
  LazyArray<PageSet*> current_;
  std::vector<std::pair<size_t, std::unique_ptr<PageSet>>> sets_;
};

}  // namespace softmetal
