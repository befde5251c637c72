#pragma once
// StatePool: who owns which recurrent slot and which KV page of the backend's pool. Slots have one owner;
// pages are counted references, because sequences and snapshots that share a prefix share its pages. Engine
// thread only.
#include <cstdint>
#include <optional>
#include <vector>

#include "backend/backend.h"

namespace calla {

class StatePool;

// One recurrent slot; gives it back when it dies.
class SlotHandle {
 public:
  SlotHandle() = default;
  SlotHandle(SlotHandle&& other) noexcept : pool_(other.pool_), id_(other.id_) { other.pool_ = nullptr; }
  SlotHandle& operator=(SlotHandle&& other) noexcept;
  ~SlotHandle();
  int id() const { return id_; }
  explicit operator bool() const { return pool_ != nullptr; }

 private:
  friend class StatePool;
  SlotHandle(StatePool* pool, int id) : pool_(pool), id_(id) {}
  StatePool* pool_ = nullptr;
  int id_ = -1;
};

// The KV pages of the positions [0, n) of a sequence or snapshot, in order. Copying shares the pages.
class PageList {
 public:
  PageList() = default;
  PageList(const PageList& other);
  PageList(PageList&& other) noexcept : pool_(other.pool_), ids_(std::move(other.ids_)) { other.ids_.clear(); }
  PageList& operator=(PageList other) noexcept;
  ~PageList();
  std::span<const int32_t> ids() const { return ids_; }
  size_t size() const { return ids_.size(); }
  // Keeps the first `count` pages.
  void truncate(size_t count);

 private:
  friend class StatePool;
  StatePool* pool_ = nullptr;
  std::vector<int32_t> ids_;
};

class StatePool {
 public:
  // Allocates the pool in the backend, which must outlive it, as it must outlive its handles.
  StatePool(Backend& backend, const StateMemoryPlan& plan);
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  Backend& backend() { return backend_; }
  const StateMemoryPlan& plan() const { return plan_; }
  int free_slots() const { return static_cast<int>(free_slots_.size()); }
  int free_pages() const { return static_cast<int>(free_pages_.size()); }

  // A slot with undefined contents; none if all are taken.
  std::optional<SlotHandle> take_slot();
  // Appends one fresh page to `list`; false if none is free.
  bool append_page(PageList& list);
  // Makes the last page of `list` private by copying its first `rows` rows, if anyone else refers to it;
  // false if no page is free.
  bool make_last_page_private(PageList& list, int rows);

 private:
  friend class SlotHandle;
  friend class PageList;
  void release_slot(int id) { free_slots_.push_back(id); }
  void retain_page(int32_t id) { ++page_refs_[static_cast<size_t>(id)]; }
  void release_page(int32_t id);

  Backend& backend_;
  const StateMemoryPlan plan_;
  std::vector<int> free_slots_;
  std::vector<int32_t> free_pages_;
  std::vector<int> page_refs_;
};

// Pages needed for `tokens` positions.
constexpr int pages_for(int tokens) { return (tokens + kKvPageRows - 1) / kKvPageRows; }

}  // namespace calla
