// prepare_attention and attend. One row of one KV head (8 query heads) is the unit of arithmetic; positions
// are taken in parts of kPartRows, each with its own online softmax, merged in order. Prefill gives a thread
// a tile of rows that share the pages; decode over a long context gives the parts to different threads. The
// results are the same.
#include <algorithm>

#include "backend/cpu/attention_scratch.h"
#include "backend/cpu/cpu_backend.h"

namespace calla::cpu {
namespace {

void rotate(float* x, const float* table, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half], c = table[i], s = table[half + i];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

void store(float x, half& out) { out = to_half(x); }
void store(float x, float& out) { out = x; }

template <class T>
void store_row(const float* k, const float* v, int row, T* keys, T* values) {
  for (int i = 0; i < kHeadDim; ++i) {
    store(k[i], keys[key_index(row, i)]);
    store(v[i], values[value_index(row, i)]);
  }
}

void scale_queries(const float* q, float* out) {
  static_assert(kHeadDim == 256);
  constexpr float kScale = 0.0625f;  // 1 / sqrt(kHeadDim), exact
  for (int i = 0; i < kGroupFloats; ++i) out[i] = q[i] * kScale;
}

int parts_of(int position) { return position / kPartRows + 1; }

}  // namespace

void CpuBackend::prepare_attention(int layer) {
  Profile::Scope scope(profile_, Stage::kPrepareAttention);
  const AttentionWeights& w = *weights_.layers[layer].attention;
  const auto prepare = [&](const RowRange& range, int i) {
    const int r = range.first + i;
    const float* table = rope_.data() + static_cast<size_t>(r) * shape_.rotary_dim;
    for (int head = 0; head < shape_.q_heads; ++head) {
      float* q = row(Slot::kAttnQ, r) + head * kHeadDim;
      kernels_.row.rmsnorm(row(Slot::kAttnQGate, r) + head * 2 * kHeadDim, w.q_norm.data(), kHeadDim, shape_.rms_eps,
                           q);
      rotate(q, table, shape_.rotary_dim);
    }
    const int position = positions_[r];
    const int page = range.sequence->kv_pages[position / kPageRows];
    for (int head = 0; head < shape_.kv_heads; ++head) {
      float k[kHeadDim];
      kernels_.row.rmsnorm(row(Slot::kAttnK, r) + head * kHeadDim, w.k_norm.data(), kHeadDim, shape_.rms_eps, k);
      rotate(k, table, shape_.rotary_dim);
      const float* v = row(Slot::kAttnV, r) + head * kHeadDim;
      if (options_.full_precision)
        store_row(k, v, position % kPageRows, pool_.keys<float>(layer, page, head),
                  pool_.values<float>(layer, page, head));
      else
        store_row(k, v, position % kPageRows, pool_.keys<half>(layer, page, head),
                  pool_.values<half>(layer, page, head));
    }
  };
  threads_.parallel_for(static_cast<size_t>(rows_), 8, [&](size_t begin, size_t end, int) {
    size_t sequence = 0;
    for (size_t r = begin; r < end; ++r) {
      while (sequence + 1 < ranges_.size() && static_cast<int>(r) >= ranges_[sequence + 1].first) ++sequence;
      prepare(ranges_[sequence], static_cast<int>(r) - ranges_[sequence].first);
    }
  });
}

void CpuBackend::attend_page(int layer, const SequenceRows& sequence, int kv_head, int page, const float* q,
                             int position, AttentionPartial& partial) const {
  const int rows = std::min(kPageRows, position + 1 - page * kPageRows);
  const int id = sequence.kv_pages[page];
  const int next = (page + 1) * kPageRows <= position ? sequence.kv_pages[page + 1] : id;
  const auto attend = [&](auto kernel, auto element) {
    using T = decltype(element);
    kernel(q, pool_.keys<T>(layer, id, kv_head), pool_.values<T>(layer, id, kv_head), rows,
           pool_.keys<T>(layer, next, kv_head), &partial);
  };
  if (options_.full_precision)
    attend(kernels_.attention.page_float, float{});
  else
    attend(kernels_.attention.page_half, half{});
}

void CpuBackend::finish_attention(const AttentionPartial& partial, int batch_row, int kv_head) {
  float* out = row(Slot::kMixed, batch_row) + kv_head * kGroupFloats;
  kernels_.attention.finish(&partial, out);
  for (int h = 0; h < kGqaFactor; ++h) {
    const int head = kv_head * kGqaFactor + h;
    const float* gate = row(Slot::kAttnQGate, batch_row) + head * 2 * kHeadDim + kHeadDim;
    kernels_.row.sigmoid_gate(gate, kHeadDim, out + h * kHeadDim);
  }
}

// Rows [first, first + rows) of a sequence, all their positions.
void CpuBackend::attend_tile(int layer, const RowRange& range, int kv_head, int first, int rows, int thread) {
  AttentionTile& tile = attention_->tiles[thread];
  const SequenceRows& sequence = *range.sequence;
  for (int i = 0; i < rows; ++i) {
    scale_queries(row(Slot::kAttnQ, range.first + first + i) + kv_head * kGroupFloats, tile.q[i]);
    kernels_.attention.reset(&tile.total[i]);
  }
  const int last_position = sequence.position + first + rows - 1;
  for (int part = 0; part < parts_of(last_position); ++part) {
    for (int i = 0; i < rows; ++i) kernels_.attention.reset(&tile.part[i]);
    for (int page = part * kPagesPerPart; page < (part + 1) * kPagesPerPart; ++page)
      for (int i = 0; i < rows; ++i) {
        const int position = sequence.position + first + i;
        if (page * kPageRows <= position)
          attend_page(layer, sequence, kv_head, page, tile.q[i], position, tile.part[i]);
      }
    for (int i = 0; i < rows; ++i)
      if (part < parts_of(sequence.position + first + i)) kernels_.attention.merge(&tile.part[i], &tile.total[i]);
  }
  for (int i = 0; i < rows; ++i) finish_attention(tile.total[i], range.first + first + i, kv_head);
}

// The parts of every row as pieces of their own; for few rows.
void CpuBackend::attend_parts(int layer) {
  const auto heads = static_cast<size_t>(shape_.kv_heads);
  std::vector<AttentionPartial>& parts = attention_->parts;
  size_t count = 0;
  for (int r = 0; r < rows_; ++r) count += parts_of(positions_[r]) * heads;
  if (parts.size() < count) parts.resize(count);
  struct Place {
    const RowRange* range;
    int row, head, part;
  };
  const auto place = [&](size_t piece) {
    for (const RowRange& range : ranges_)
      for (int i = 0; i < range.sequence->rows; ++i) {
        const int r = range.first + i;
        const size_t pieces = parts_of(positions_[r]) * heads;
        if (piece < pieces) return Place{&range, r, static_cast<int>(piece % heads), static_cast<int>(piece / heads)};
        piece -= pieces;
      }
    check(false, "attention piece within the batch");
    return Place{};
  };
  threads_.for_each(count, [&](size_t piece, size_t, int thread) {
    const Place at = place(piece);
    float* q = attention_->tiles[thread].q[0];
    scale_queries(row(Slot::kAttnQ, at.row) + at.head * kGroupFloats, q);
    kernels_.attention.reset(&parts[piece]);
    for (int page = at.part * kPagesPerPart; page < (at.part + 1) * kPagesPerPart; ++page)
      if (page * kPageRows <= positions_[at.row])
        attend_page(layer, *at.range->sequence, at.head, page, q, positions_[at.row], parts[piece]);
  });
  AttentionPartial& total = attention_->tiles[0].total[0];
  size_t first = 0;
  for (int r = 0; r < rows_; ++r) {
    const auto n = static_cast<size_t>(parts_of(positions_[r]));
    for (size_t head = 0; head < heads; ++head) {
      kernels_.attention.reset(&total);
      for (size_t part = 0; part < n; ++part) kernels_.attention.merge(&parts[first + part * heads + head], &total);
      finish_attention(total, r, static_cast<int>(head));
    }
    first += n * heads;
  }
}

void CpuBackend::attend(int layer) {
  Profile::Scope scope(profile_, Stage::kAttend);
  size_t positions = 0;
  for (const SequenceRows& sequence : batch_.sequences) positions += sequence.position + sequence.rows;
  scope.add_bytes(positions * pool_.page_bytes() / kPageRows / shape_.attention_layers());

  const auto heads = static_cast<size_t>(shape_.kv_heads);
  std::vector<AttentionRows>& tiles = attention_tiles_;
  tiles.clear();
  for (const RowRange& range : ranges_)
    for (int first = 0; first < range.sequence->rows; first += kTileRows) tiles.push_back({&range, first});
  if (tiles.size() * heads < 4 * static_cast<size_t>(threads_.threads())) {
    attend_parts(layer);
    return;
  }
  // The last tiles of a sequence see most positions: they go first.
  const size_t count = tiles.size() * heads;
  threads_.for_each(count, [&](size_t piece, size_t, int thread) {
    const AttentionRows& tile = tiles[(count - 1 - piece) / heads];
    const int rows = std::min(kTileRows, tile.range->sequence->rows - tile.first);
    attend_tile(layer, *tile.range, static_cast<int>(piece % heads), tile.first, rows, thread);
  });
}

}  // namespace calla::cpu
