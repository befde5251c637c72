#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "memory.h"

namespace softmetal {

template <class T>
LazyArray<T>::LazyArray(size_t count) : bytes_(std::max<size_t>(count * sizeof(T), 1)) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<T*>(p);
}
template <class T>
LazyArray<T>::~LazyArray() {
  munmap(data_, bytes_);
}
template class LazyArray<uint8_t>;
template class LazyArray<uint64_t>;
template class LazyArray<Cell>;
template class LazyArray<PageSet*>;

int PageSet::conflict(const PageSet& o) const {
  for (size_t i = 0; i < kWords; ++i) {
    const uint64_t mine = read[i] | write[i] | atomic[i], theirs = o.read[i] | o.write[i] | o.atomic[i];
    const uint64_t both = (write[i] & theirs) | (o.write[i] & mine) | (atomic[i] & o.read[i]) | (read[i] & o.atomic[i]);
    if (both) return static_cast<int>(i * 64) + std::countr_zero(both);
  }
  return -1;
}

Shadow::Shadow(const Memory& memory)
    : memory_(memory),
      states_(memory.bytes()),
      cells_(memory.bytes()),
      generations_(memory.bytes() / kShadowPage + 1),
      current_(memory.bytes() / kShadowPage + 1) {}

bool Shadow::block_is_poison(size_t at) const {
  const size_t begin = at / 8 * 8;
  const uint64_t word = poison_word();
  return std::memcmp(memory_.data() + begin, &word, std::min<size_t>(8, memory_.bytes() - begin)) == 0;
}

bool Shadow::read_is_uninitialised(size_t at, size_t bytes) {
  if (!memory_.poisoned()) return false;
  const uint64_t word = poison_word();
  const char* poison = reinterpret_cast<const char*>(&word);
  for (size_t i = at; i < at + bytes; ++i) {
    if (states_[i] == kWritten) continue;
    // Untouched by the GPU: the CPU may have written. A whole block decides where the GPU wrote nothing near; where it
    // wrote a part of the block, the bytes of this access decide.
    const bool same = states_[i] == kUnknown ? block_is_poison(i) : memory_.data()[i] == poison[i % 8];
    if (!same) {
      states_[i] = kWritten;
      continue;
    }
    if (states_[i] == kUnwritten) {
      bool all = true;
      for (size_t k = at; k < at + bytes; ++k)
        all = all && (states_[k] == kWritten || memory_.data()[k] == poison[k % 8]);
      if (!all) continue;
    }
    return true;
  }
  return false;
}

void Shadow::mark_written(size_t at, size_t bytes) {
  if (!memory_.poisoned()) return;
  size_t i = at;
  while (i < at + bytes) {
    const size_t begin = i / 8 * 8, end = std::min(begin + 8, memory_.bytes());
    if (states_[i] == kUnknown) {  // the first GPU write to this block: settle what the CPU wrote
      const State other = block_is_poison(i) ? kUnwritten : kWritten;
      for (size_t k = begin; k < end; ++k) states_[k] = other;
    }
    for (; i < end && i < at + bytes; ++i) states_[i] = kWritten;
  }
}

void Shadow::clear_page(size_t page, uint64_t dispatch) {
  const size_t begin = page * kShadowPage, end = std::min(begin + kShadowPage, memory_.bytes());
  std::memset(static_cast<void*>(&cells_[begin]), 0, (end - begin) * sizeof(Cell));
  generations_[page] = dispatch;
}

PageSet* Shadow::new_page_set(size_t page) {
  sets_.emplace_back(page, std::make_unique<PageSet>());
  return sets_.back().second.get();
}

void Shadow::note(size_t at, size_t bytes, bool write, bool atomic) {
  for (size_t i = at; i < at + bytes;) {
    PageSet& set = page_set(i);
    auto& words = !write ? set.read : atomic ? set.atomic : set.write;
    const size_t in_page = i % kShadowPage;
    const size_t count = std::min({64 - in_page % 64, at + bytes - i});
    const uint64_t mask = count == 64 ? ~uint64_t{0} : ((uint64_t{1} << count) - 1) << (in_page % 64);
    words[in_page / 64] |= mask;
    i += count;
  }
}

void Shadow::take_sets(AccessSet& into) {
  for (auto& [page, set] : sets_) {
    current_[page] = nullptr;
    into[{memory_.id, page}] = std::move(set);
  }
  sets_.clear();
}

}  // namespace softmetal
