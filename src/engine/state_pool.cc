#include "engine/state_pool.h"

#include <utility>

#include "base/check.h"

namespace calla {

SlotHandle& SlotHandle::operator=(SlotHandle&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(id_, other.id_);
  return *this;
}

SlotHandle::~SlotHandle() {
  if (pool_) pool_->release_slot(id_);
}

PageList::PageList(const PageList& other) : pool_(other.pool_), ids_(other.ids_) {
  for (int32_t id : ids_) pool_->retain_page(id);
}

PageList& PageList::operator=(PageList other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(ids_, other.ids_);
  return *this;
}

PageList::~PageList() { truncate(0); }

void PageList::truncate(size_t count) {
  while (ids_.size() > count) {
    pool_->release_page(ids_.back());
    ids_.pop_back();
  }
}

StatePool::StatePool(Backend& backend, const StateMemoryPlan& plan)
    : backend_(backend), plan_(plan), page_refs_(static_cast<size_t>(plan.kv_pages)) {
  backend.allocate_state(plan);
  // Handed out from the back: low numbers first, so that memory never touched stays untouched.
  for (int i = plan.recurrent_slots; i-- > 0;) free_slots_.push_back(i);
  for (int32_t i = plan.kv_pages; i-- > 0;) free_pages_.push_back(i);
}

std::optional<SlotHandle> StatePool::take_slot() {
  if (free_slots_.empty()) return std::nullopt;
  const int id = free_slots_.back();
  free_slots_.pop_back();
  return SlotHandle(this, id);
}

bool StatePool::append_page(PageList& list) {
  if (free_pages_.empty()) return false;
  const int32_t id = free_pages_.back();
  free_pages_.pop_back();
  check(page_refs_[static_cast<size_t>(id)] == 0, "a free page has no owner");
  page_refs_[static_cast<size_t>(id)] = 1;
  list.pool_ = this;
  list.ids_.push_back(id);
  return true;
}

bool StatePool::make_last_page_private(PageList& list, int rows) {
  check(!list.ids_.empty(), "a list with a last page");
  const int32_t shared = list.ids_.back();
  if (page_refs_[static_cast<size_t>(shared)] == 1) return true;
  PageList fresh;
  if (!append_page(fresh)) return false;
  backend_.copy_kv_page(shared, fresh.ids_[0], rows);
  std::swap(list.ids_.back(), fresh.ids_[0]);
  return true;
}

void StatePool::release_page(int32_t id) {
  int& refs = page_refs_[static_cast<size_t>(id)];
  check(refs > 0, "a released page has an owner");
  if (--refs == 0) free_pages_.push_back(id);
}

}  // namespace calla
