#pragma once
// HazardTracker: decides where a concurrent encoder needs a barrier. Every dispatch names the byte ranges that it reads
// and writes; a barrier is due before a dispatch that reads what was written, or writes what was read or written, since
// the last one. Nothing here knows Metal.
#include <cstddef>
#include <span>
#include <vector>

namespace calla::metal {

struct ByteRange {
  const void* resource = nullptr;
  size_t begin = 0;
  size_t end = 0;

  bool overlaps(const ByteRange& other) const {
    return resource == other.resource && begin < other.end && other.begin < end;
  }
};

class HazardTracker {
 public:
  // Records a dispatch. Returns true if a barrier must come before it; everything before is then forgotten.
  bool add(std::span<const ByteRange> reads, std::span<const ByteRange> writes);
  // Something else ordered the past before what comes (a new encoder, say).
  void clear();

 private:
  bool conflicts(std::span<const ByteRange> reads, std::span<const ByteRange> writes) const;

  std::vector<ByteRange> read_;  // since the last barrier
  std::vector<ByteRange> written_;
};

}  // namespace calla::metal
