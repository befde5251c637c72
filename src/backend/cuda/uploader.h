#pragma once
// Uploader: from the mapped checkpoint into device memory at the rate of the bus, as it is or packed on arrival.
//
//   mapping --fill threads--> page-locked buffers --copy stream--> where it belongs (copy)
//                                                             +--> staging area --the caller's stream--> tiles (pack)
//
// Half of the buffers are filled, which takes the page faults too, while the other half travels; what belongs side by side
// travels in one piece, whatever matrices it is of. Of two staging areas one is written while the other is packed; events
// keep the two streams apart. What the streams are to do about data that are still being filled waits in a queue, so their
// order is that of the calls.
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "backend/cuda/device.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/pack.h"
#include "backend/cuda/weights.h"
#include "backend/weights.h"
#include "base/background_copies.h"

namespace calla::cuda {

// Memory of this machine that is page-locked, where the system can, when all of it has been touched. Once several threads
// have done that, locking takes a tenth of the time of a PinnedArray, whose allocation also holds up the runtime's other
// calls.
class LockableBytes {
 public:
  LockableBytes(size_t bytes, const char* what);
  ~LockableBytes();
  LockableBytes(const LockableBytes&) = delete;
  LockableBytes& operator=(const LockableBytes&) = delete;
  // Throws DeviceError if the system allows no more of it.
  void lock();
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_;
  size_t size_;
  const char* what_;
  bool locked_ = false;
};

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
  // Part of a buffer that belongs in one piece of `image`: a staging area, or what copy() was given (null).
  struct Transfer {
    const void* image;
    std::byte* to;
    size_t at, bytes;
  };
  struct Buffer {
    explicit Buffer(std::byte* begin) : memory(begin) {}
    std::byte* const memory;
    size_t used = 0;
    size_t counted = 0;  // bytes of copy()
    std::vector<BackgroundCopies::Copy> fills;
    std::vector<Transfer> transfers;
    Event sent;  // its contents have left it
  };
  struct Area {
    DeviceBytes memory;
    size_t used = 0;
    std::vector<std::function<void()>> packs;  // of what is in it
    Event copied, packed;
  };

  void lock_buffers();
  void bring(const void* image, void* to, const void* from, size_t bytes);
  std::span<std::byte> room(const void* image, std::byte* to, size_t most);
  void open_buffer();
  void close_buffer();
  void send(Buffer& buffer);
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
  int area_ = 0;          // that is written
  LockableBytes memory_;  // of the buffers
  std::deque<Buffer> buffers_;
  size_t turns_ = 0;        // buffers that were opened
  Buffer* open_ = nullptr;  // that takes data
  size_t filling_ = 0;      // buffers with data that are not all on their way
  size_t sent_ = 0;         // bytes
  std::deque<std::function<void()>> queue_;
  BackgroundCopies fills_;  // the last: its threads end before the buffers go
  uint64_t touched_;        // the fill that touches them
};

}  // namespace calla::cuda
