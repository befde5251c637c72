#include "backend/metal/hazards.h"

#include <algorithm>

namespace calla::metal {
namespace {

bool any_overlap(std::span<const ByteRange> a, std::span<const ByteRange> b) {
  return std::any_of(a.begin(), a.end(), [&](const ByteRange& range) {
    return std::any_of(b.begin(), b.end(), [&](const ByteRange& other) { return range.overlaps(other); });
  });
}

}  // namespace

bool HazardTracker::conflicts(std::span<const ByteRange> reads, std::span<const ByteRange> writes) const {
  return any_overlap(reads, written_) || any_overlap(writes, written_) || any_overlap(writes, read_);
}

bool HazardTracker::add(std::span<const ByteRange> reads, std::span<const ByteRange> writes) {
  const bool barrier = conflicts(reads, writes);
  if (barrier) clear();
  read_.insert(read_.end(), reads.begin(), reads.end());
  written_.insert(written_.end(), writes.begin(), writes.end());
  return barrier;
}

void HazardTracker::clear() {
  read_.clear();
  written_.clear();
}

}  // namespace calla::metal
