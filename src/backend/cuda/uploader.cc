#include "backend/cuda/uploader.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "base/thread_pool.h"

namespace calla::cuda {
namespace {

constexpr int kMostThreads = 12;  // more brought no more
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

LockableBytes::LockableBytes(size_t bytes, const char* what)
    : data_(std::aligned_alloc(kHugePage, align(bytes, kHugePage))), size_(bytes), what_(what) {
  if (data_ == nullptr) page_lock_check(cudaErrorMemoryAllocation, size_, what_);
#ifdef MADV_HUGEPAGE
  (void)madvise(data_, size_, MADV_HUGEPAGE);  // a hint: failure costs speed only
#endif
}

LockableBytes::~LockableBytes() {
  if (locked_) cudaHostUnregister(data_);
  std::free(data_);
}

void LockableBytes::lock() {
  const cudaError_t status = cudaHostRegister(data_, size_, cudaHostRegisterDefault);
  // Some virtualised and integrated systems lock no memory but their own. Without a lock transfers are slower, as the driver
  // brings them by way of buffers of its own, but right: events tell when they have left the memory, as ever.
  if (status == cudaErrorNotSupported) {
    (void)cudaGetLastError();  // or the next check of a launch would find it
    return;
  }
  page_lock_check(status, size_, what_);
  locked_ = true;
}

Uploader::Uploader(cudaStream_t pack_stream, size_t total, const std::function<void(double, double)>& on_upload,
                   const UploadSizes& sizes)
    : pack_stream_(pack_stream),
      total_(total),
      on_upload_(on_upload),
      sizes_(sizes),
      memory_(sizes.buffers * sizes.buffer, "upload buffers"),
      fills_(std::min(kMostThreads, available_cores())) {
  check(sizes.buffer % kDeviceAlignment == 0 && sizes.buffers > 0, "an upload has buffers");
  const BackgroundCopies::Copy zeros{memory_.data(), nullptr, memory_.size()};
  touched_ = fills_.start({&zeros, 1});
}

Uploader::~Uploader() {
  // After an exception copies may be on their way. An error of the device has been told, or is by the next call.
  (void)cudaStreamSynchronize(copies_.get());
  (void)cudaStreamSynchronize(pack_stream_);
}

void Uploader::copy(void* to, const void* from, size_t bytes) { bring(nullptr, to, from, bytes); }

void Uploader::bring(const void* image, void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const std::span<std::byte> part = room(image, static_cast<std::byte*>(to) + done, bytes - done);
    open_->fills.push_back({part.data(), static_cast<const std::byte*>(from) + done, part.size()});
    open_->counted += part.size();
    done += part.size();
  }
}

void Uploader::copy_now(void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const std::span<std::byte> part = room(nullptr, static_cast<std::byte*>(to) + done, bytes - done);
    std::memcpy(part.data(), static_cast<const std::byte*>(from) + done, part.size());
    done += part.size();
  }
}

void Uploader::finish() {
  close_area();
  close_buffer();
  while (!queue_.empty()) do_oldest();
  cuda_check(cudaStreamSynchronize(copies_.get()), "upload of the weights");
  cuda_check(cudaStreamSynchronize(pack_stream_), "upload of the weights");
  if (on_upload_) on_upload_(static_cast<double>(total_), static_cast<double>(total_));
}

void Uploader::do_oldest() {
  queue_.front()();
  queue_.pop_front();
}

// ---- page-locked buffers -------------------------------------------------------------------------------------------

// At the first use: what the caller did meanwhile went on beside the touching.
void Uploader::lock_buffers() {
  fills_.wait(touched_);
  memory_.lock();
  for (size_t i = 0; i < sizes_.buffers; ++i) buffers_.emplace_back(memory_.data() + i * sizes_.buffer);
}

// Page-locked memory for up to `most` bytes that belong at `to`.
std::span<std::byte> Uploader::room(const void* image, std::byte* to, size_t most) {
  if (open_ == nullptr || open_->used == sizes_.buffer) open_buffer();
  Buffer& b = *open_;
  const std::span<std::byte> part{b.memory + b.used, std::min(most, sizes_.buffer - b.used)};
  Transfer* const last = b.transfers.empty() ? nullptr : &b.transfers.back();
  if (last != nullptr && last->image == image && last->to + (b.used - last->at) == to) {  // right behind it
    last->bytes = b.used - last->at + part.size();
  } else {
    b.transfers.push_back({image, to, b.used, part.size()});
  }
  b.used += align(part.size());
  return part;
}

void Uploader::open_buffer() {
  close_buffer();
  if (buffers_.empty()) lock_buffers();
  while (filling_ >= std::max(size_t{1}, buffers_.size() / 2)) do_oldest();
  Buffer& b = buffers_[turns_++ % buffers_.size()];  // the longest in use
  b.sent.synchronize();                              // which was recorded: fewer than all are still waiting
  b.used = b.counted = 0;
  b.fills.clear();
  b.transfers.clear();
  ++filling_;
  open_ = &b;
}

void Uploader::close_buffer() {
  if (open_ == nullptr) return;
  const uint64_t fill = fills_.start(open_->fills);
  queue_.push_back([this, &buffer = *open_, fill] {
    fills_.wait(fill);
    send(buffer);
  });
  open_ = nullptr;
}

void Uploader::send(Buffer& buffer) {
  for (const Transfer& t : buffer.transfers)
    cuda_check(cudaMemcpyAsync(t.to, buffer.memory + t.at, t.bytes, cudaMemcpyHostToDevice, copies_.get()),
               "upload of the weights");
  buffer.sent.record(copies_.get());
  sent_ += buffer.counted;
  --filling_;
  if (on_upload_) on_upload_(static_cast<double>(sent_), static_cast<double>(total_));
}

// ---- staging areas -------------------------------------------------------------------------------------------------

void Uploader::pack(const PackedView& to, int first_tile, TileRows kind, const WeightMatrix& source,
                    const WeightMatrix& up) {
  const int units = kind == TileRows::kSwiglu ? 8 : kTileRows;  // rows of a matrix in a tile
  const size_t matrices = kind == TileRows::kSwiglu ? 2 : 1;
  const size_t row_bytes = source.words_per_row() * 4 + source.groups_per_row() * 4;
  for (int entry = 0, row = 0; entry < source.stack;) {
    Area& area = areas_[area_];
    if (!area.memory) area.memory = DeviceBytes(sizes_.area, "staging memory for the upload");
    // Codes, scales and biases of each matrix are aligned.
    const size_t room = sizes_.area - area.used, lost = matrices * 3 * kDeviceAlignment;
    const int fit = room > lost ? static_cast<int>((room - lost) / (matrices * row_bytes)) : 0;
    // To the end of the entry, or whole tiles.
    const int left = source.n - row, rows = fit >= left ? left : fit / units * units;
    if (rows == 0) {
      check(area.used > 0, "a staging area holds a tile's rows");
      next_area();
      continue;
    }
    const int entries = rows == source.n ? std::min(fit / source.n, source.stack - entry) : 1;
    const size_t first_row = static_cast<size_t>(entry) * static_cast<size_t>(source.n) + static_cast<size_t>(row);
    const RawView raw = stage(source, first_row, entries, rows);
    const RawView raw_up = kind == TileRows::kSwiglu ? stage(up, first_row, entries, rows) : raw;
    area.packs.emplace_back([=, this, at = to.entry(entry), tile = first_tile + row / units] {
      pack_tiles(at, entries, tile, kind, raw, raw_up, pack_stream_);
    });
    row += rows;
    if (row < source.n) continue;
    row = 0;
    entry += entries;
  }
}

// Copies `entries` times `rows` rows to the area that is written.
RawView Uploader::stage(const WeightMatrix& m, size_t first_row, int entries, int rows) {
  Area& area = areas_[area_];
  const size_t all = static_cast<size_t>(entries) * static_cast<size_t>(rows);
  const auto part = [&]<class T>(const T* from, size_t per_row) {
    std::byte* to = area.memory.data() + area.used;
    area.used += align(all * per_row * sizeof(T));
    check(area.used <= sizes_.area, "a staging area holds what is brought");
    bring(area.memory.data(), to, from + first_row * per_row, all * per_row * sizeof(T));
    return to;
  };
  RawView v;
  v.n = rows;
  v.k = m.k;
  v.bits = m.bits;
  v.group = m.group;
  v.codes = reinterpret_cast<const uint32_t*>(part(m.codes, m.words_per_row()));
  v.scales = reinterpret_cast<const uint16_t*>(part(m.scales, m.groups_per_row()));
  v.biases = reinterpret_cast<const uint16_t*>(part(m.biases, m.groups_per_row()));
  return v;
}

void Uploader::next_area() {
  close_area();
  area_ = 1 - area_;
  Area& area = areas_[area_];
  area.used = 0;
  queue_.push_back([this, &area] { area.packed.wait_in(copies_.get()); });
}

void Uploader::close_area() {
  Area& area = areas_[area_];
  if (area.packs.empty()) return;
  close_buffer();  // what belongs into the next area waits for other events
  queue_.push_back([this, &area] {
    area.copied.record(copies_.get());
    area.copied.wait_in(pack_stream_);
  });
  std::move(area.packs.begin(), area.packs.end(), std::back_inserter(queue_));
  area.packs.clear();
  queue_.push_back([this, &area] { area.packed.record(pack_stream_); });
}

}  // namespace calla::cuda
