#pragma once
// Uploader: from the mapped checkpoint into device memory at the rate of the bus, as it is or packed on arrival.
//
//   mapping --fill threads--> page-locked buffers --copy stream--> where it belongs (copy)
//                                                             +--> staging area --the caller's stream--> tiles (pack)
//
// Half of the buffers are filled, which takes the page faults too, while the other half travels. Of two staging areas one
// is written while the other is packed; events keep the two streams apart. What the streams are to do about data that are
// still being filled waits in a queue, so their order is that of the calls.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <span>
#include <utility>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/weights.h"
#include "backend/weights.h"
#include "base/background_copies.h"

namespace calla::cuda {

class Uploader {
 public:
  // `on_upload(bytes sent, total)`, if not empty, is called now and then, by the calling thread; it must outlive this, and
  // so must `pack_stream`. `total` counts what copy() and pack() are given.
  Uploader(cudaStream_t pack_stream, size_t total, const std::function<void(double done, double total)>& on_upload,
           const UploadSizes& sizes);
  // Waits for both streams; what was not finished is given up.
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // `from` must last until finish().
  void copy(void* to, const void* from, size_t bytes);
  // For what does not last: it may go at once. Meant for small vectors.
  void copy_now(void* to, const void* from, size_t bytes);
  // Packs a quantised matrix or stack (for kSwiglu with `up`, of the same shape) into the tiles of `to` from `first_tile`
  // of each entry on, in pieces that fit a staging area. Both must last until finish().
  void pack(const PackedView& to, int first_tile, TileRows kind, const WeightMatrix& source, const WeightMatrix& up);
  // Returns when everything has arrived and has been packed.
  void finish();

  // Device memory that pack() needs in passing.
  static size_t staging_bytes(const UploadSizes& sizes) { return 2 * sizes.area; }

 private:
  struct Buffer {
    explicit Buffer(PinnedArray<std::byte> locked) : memory(std::move(locked)) {}
    PinnedArray<std::byte> memory;
    Event sent;  // its contents have left it
  };
  struct Area {
    DeviceBytes memory;
    size_t used = 0;
    std::vector<std::function<void()>> packs;  // of what is in it
    Event copied, packed;
  };

  std::future<PinnedArray<std::byte>> lock_buffer() const;
  std::span<std::byte> room(size_t most);
  void next_buffer();
  void close_buffer();
  void send(void* to, std::span<const std::byte> from);
  RawView stage(const WeightMatrix& m, size_t first_row, int entries, int rows);
  void next_area();
  void close_area();
  void do_oldest();

  const cudaStream_t pack_stream_;
  const size_t total_;
  const std::function<void(double done, double total)>& on_upload_;
  const UploadSizes sizes_;
  const Stream copies_;
  Area areas_[2];
  int area_ = 0;                                 // that is written
  std::list<Buffer> buffers_;                    // the longest in use first; the last is the one that takes data
  size_t used_ = 0;                              // bytes of the last
  size_t filling_ = 0;                           // buffers with data that are not all on their way
  size_t sent_ = 0;                              // bytes
  std::future<PinnedArray<std::byte>> locking_;  // the next buffer, while there are to be more
  std::deque<std::function<void()>> queue_;
  BackgroundCopies fills_;  // the last: its threads end before the buffers go
};

}  // namespace calla::cuda
