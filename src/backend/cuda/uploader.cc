#include "backend/cuda/uploader.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "base/thread_pool.h"

namespace calla::cuda {
namespace {

constexpr int kMostThreads = 12;  // more brought no more
constexpr size_t kAlignment = 256;

size_t align(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Uploader::Uploader(cudaStream_t pack_stream, size_t total, const std::function<void(double, double)>& on_upload,
                   const UploadSizes& sizes)
    : pack_stream_(pack_stream),
      total_(total),
      on_upload_(on_upload),
      sizes_(sizes),
      locking_(lock_buffer()),
      fills_(std::min(kMostThreads, available_cores())) {
  check(sizes.buffer % kAlignment == 0 && sizes.buffers > 0, "an upload has buffers");
}

Uploader::~Uploader() {
  // After an exception copies may be on their way. An error of the device has been told, or is by the next call.
  (void)cudaStreamSynchronize(copies_.get());
  (void)cudaStreamSynchronize(pack_stream_);
}

void Uploader::copy(void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const std::span<std::byte> part = room(bytes - done);
    const BackgroundCopies::Copy copy{part.data(), static_cast<const std::byte*>(from) + done, part.size()};
    const uint64_t fill = fills_.start({&copy, 1});
    queue_.push_back([=, this, to = static_cast<std::byte*>(to) + done] {
      fills_.wait(fill);
      send(to, part);
      sent_ += part.size();
    });
    done += part.size();
  }
}

void Uploader::copy_now(void* to, const void* from, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const std::span<std::byte> part = room(bytes - done);
    std::memcpy(part.data(), static_cast<const std::byte*>(from) + done, part.size());
    queue_.push_back([=, this, to = static_cast<std::byte*>(to) + done] { send(to, part); });
    done += part.size();
  }
}

void Uploader::send(void* to, std::span<const std::byte> from) {
  cuda_check(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, copies_.get()),
             "upload of the weights");
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

// On a thread of its own (if the system refuses one: when it is asked for), while the buffers that there are go on.
std::future<PinnedArray<std::byte>> Uploader::lock_buffer() const {
  return std::async(std::launch::async | std::launch::deferred,
                    [bytes = sizes_.buffer] { return PinnedArray<std::byte>(bytes, "page-locked upload buffer"); });
}

// Page-locked memory for up to `most` bytes.
std::span<std::byte> Uploader::room(size_t most) {
  if (buffers_.empty() || used_ >= sizes_.buffer) next_buffer();
  const std::span<std::byte> part{buffers_.back().memory.data() + used_, std::min(most, sizes_.buffer - used_)};
  used_ += align(part.size());
  return part;
}

void Uploader::next_buffer() {
  close_buffer();
  while (filling_ >= std::max(size_t{1}, buffers_.size() / 2)) do_oldest();
  using std::chrono::seconds;
  if (locking_.valid() && (buffers_.empty() || locking_.wait_for(seconds(0)) != std::future_status::timeout)) {
    buffers_.emplace_back(locking_.get());
    if (buffers_.size() < sizes_.buffers) locking_ = lock_buffer();
  } else {
    buffers_.splice(buffers_.end(), buffers_, buffers_.begin());
    buffers_.back().sent.synchronize();  // which was recorded: fewer than all are still waiting
  }
  used_ = 0;
  ++filling_;
}

void Uploader::close_buffer() {
  if (buffers_.empty()) return;
  queue_.push_back([this, &buffer = buffers_.back()] {
    buffer.sent.record(copies_.get());
    --filling_;
    if (on_upload_) on_upload_(static_cast<double>(sent_), static_cast<double>(total_));
  });
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
    const size_t room = sizes_.area - area.used, lost = matrices * 3 * kAlignment;
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
  const auto bring = [&]<class T>(const T* from, size_t per_row) {
    std::byte* to = area.memory.data() + area.used;
    area.used += align(all * per_row * sizeof(T));
    check(area.used <= sizes_.area, "a staging area holds what is brought");
    copy(to, from + first_row * per_row, all * per_row * sizeof(T));
    return to;
  };
  RawView v;
  v.n = rows;
  v.k = m.k;
  v.bits = m.bits;
  v.group = m.group;
  v.codes = reinterpret_cast<const uint32_t*>(bring(m.codes, m.words_per_row()));
  v.scales = reinterpret_cast<const uint16_t*>(bring(m.scales, m.groups_per_row()));
  v.biases = reinterpret_cast<const uint16_t*>(bring(m.biases, m.groups_per_row()));
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
  queue_.push_back([this, &area] {
    area.copied.record(copies_.get());
    area.copied.wait_in(pack_stream_);
  });
  std::move(area.packs.begin(), area.packs.end(), std::back_inserter(queue_));
  area.packs.clear();
  queue_.push_back([this, &area] { area.packed.record(pack_stream_); });
}

}  // namespace calla::cuda
