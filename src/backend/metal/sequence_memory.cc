#include "backend/metal/sequence_memory.h"

#include <algorithm>
#include <cstring>

#include "backend/metal/params.h"
#include "base/bf16.h"
#include "base/check.h"

namespace calla::metal {
namespace {

constexpr size_t kWord = 16;
constexpr size_t kStateFloats = static_cast<size_t>(kGdnHeadDim) * kGdnHeadDim;
constexpr size_t kTailRows = kConvWidth - 1;

int padded_vocab(const ModelShape& shape) { return (shape.vocab + 7) / 8 * 8; }
size_t state_bytes(const ModelShape& shape) {
  return static_cast<size_t>(shape.gdn_layers()) * shape.gdn_value_heads * kStateFloats * sizeof(float);
}
size_t tail_bytes(const ModelShape& shape) {  // both phases
  return static_cast<size_t>(shape.gdn_layers()) * 2 * kTailRows * shape.gdn_conv_width() * sizeof(bf16);
}
size_t count_bytes(const ModelShape& shape) { return static_cast<size_t>(padded_vocab(shape)) * sizeof(TokenCount); }
constexpr size_t kLastTokenBytes = mtl::kLastTokenStride * sizeof(int32_t);

// Threadgroups for a word a thread.
size_t groups_of(uint32_t words) { return (words + mtl::kElementThreads - 1) / mtl::kElementThreads; }

void fill(StepEncoder& encoder, const Kernel& kernel, const BufferSpan& span, uint32_t value) {
  const auto words = static_cast<uint32_t>(span.bytes / kWord);
  if (words > 0)
    encoder.dispatch(kernel, mtl::FillParams{words, value}, {writes(span)}, {groups_of(words)}, mtl::kElementThreads);
}

}  // namespace

size_t SequenceMemory::recurrent_slot_bytes(const ModelShape& shape) {
  return state_bytes(shape) + tail_bytes(shape) + count_bytes(shape) + kLastTokenBytes;
}

size_t SequenceMemory::kv_page_bytes(const ModelShape& shape) {
  return static_cast<size_t>(shape.attention_layers()) * 2 * shape.kv_heads * kKvPageRows * kHeadDim * sizeof(bf16);
}

SequenceMemory::SequenceMemory(Device& device, const ModelShape& shape, const StateMemoryPlan& plan)
    : shape_(shape),
      plan_(plan),
      layers_(shape.gdn_layers()),
      count_stride_(padded_vocab(shape)),
      state_bytes_(state_bytes(shape)),
      tail_bytes_(tail_bytes(shape)),
      phases_(static_cast<size_t>(plan.recurrent_slots) * shape.gdn_layers()),
      copy_(device.kernel("copy_pieces")),
      fill_(device.kernel("fill_words")) {
  const auto slots = static_cast<size_t>(plan.recurrent_slots);
  states_ = device.allocate(slots * state_bytes_, "GDN states");
  tails_ = device.allocate(slots * tail_bytes_, "convolution tails");
  counts_ = device.allocate(slots * count_bytes(shape), "token counts");
  last_tokens_ = device.allocate(slots * kLastTokenBytes, "last tokens");
  kv_ = device.allocate(static_cast<size_t>(plan.kv_pages) * kv_page_bytes(shape), "KV pages");
}

std::vector<BufferSpan> SequenceMemory::parts_of(int slot) const {
  const auto s = static_cast<size_t>(slot);
  return {states_.part(s * state_bytes_, state_bytes_), tails_.part(s * tail_bytes_, tail_bytes_),
          counts_.part(s * count_bytes(shape_), count_bytes(shape_)),
          last_tokens_.part(s * kLastTokenBytes, kLastTokenBytes)};
}

void SequenceMemory::clear_recurrent(StepEncoder& encoder, int slot) {
  const std::vector<BufferSpan> parts = parts_of(slot);
  for (size_t i = 0; i < 3; ++i) fill(encoder, fill_, parts[i], 0);
  fill(encoder, fill_, parts[3], 0xffffffffu);  // no token
  for (int layer = 0; layer < layers_; ++layer) phases_[static_cast<size_t>(slot) * layers_ + layer] = 0;
}

void SequenceMemory::copy_recurrent(StepEncoder& encoder, int from, int to) {
  const std::vector<BufferSpan> source = parts_of(from);
  const std::vector<BufferSpan> target = parts_of(to);
  for (size_t i = 0; i < source.size(); ++i) {
    const auto words = static_cast<uint32_t>(source[i].bytes / kWord);
    if (words == 0) continue;
    encoder.dispatch(copy_, mtl::CopyParams{words, words}, {reads(source[i]), writes(target[i])}, {groups_of(words)},
                     mtl::kElementThreads);
  }
  std::copy_n(phases_.begin() + static_cast<std::ptrdiff_t>(from) * layers_, layers_,
              phases_.begin() + static_cast<std::ptrdiff_t>(to) * layers_);
}

void SequenceMemory::copy_kv_page(StepEncoder& encoder, int from, int to, int rows) {
  const size_t page = kv_page_bytes(shape_);
  constexpr size_t kRowBytes = kHeadDim * sizeof(bf16);
  const auto words = static_cast<uint32_t>(rows * kRowBytes / kWord);
  const auto stride = static_cast<uint32_t>(kKvPageRows * kRowBytes / kWord);
  const size_t pieces = page / (kKvPageRows * kRowBytes);  // a layer's keys or values of one head
  if (words == 0 || pieces == 0) return;
  encoder.dispatch(copy_, mtl::CopyParams{words, stride},
                   {reads(kv_.part(from * page, page)), writes(kv_.part(to * page, page))}, {groups_of(words), pieces},
                   mtl::kElementThreads);
}

void SequenceMemory::set_token_counts(int slot, std::span<const TokenId> prompt, std::span<const TokenId> generated) {
  const std::span<TokenCount> counts(parts_of(slot)[2].as<TokenCount>(), static_cast<size_t>(count_stride_));
  std::ranges::fill(counts, TokenCount{0});
  for (TokenId token : prompt) counts[token] |= kInPrompt;
  for (TokenId token : generated) {
    if ((counts[token] & ~kInPrompt) != kInPrompt - 1) ++counts[token];
  }
}

BufferSpan SequenceMemory::tail(int gdn_layer, int slot, int phase) const {
  const size_t bytes = kTailRows * shape_.gdn_conv_width() * sizeof(bf16);
  return tails_.part(((static_cast<size_t>(slot) * layers_ + gdn_layer) * 2 + phase) * bytes, bytes);
}

// The bytes of a slot, the unused tails left as they are: phases go into the file with them.
void SequenceMemory::export_recurrent(int slot, std::span<std::byte> out) const {
  check(out.size() == recurrent_slot_bytes(shape_), "size of an exported slot");
  size_t at = 0;
  for (const BufferSpan& part : parts_of(slot)) {
    std::memcpy(out.data() + at, part.as<std::byte>(), part.bytes);
    at += part.bytes;
  }
  // The last of the four words of the last token is free: it takes the phase, the same in all layers between steps.
  const int32_t phase_now = layers_ > 0 ? phase(0, slot) : 0;
  for (int layer = 0; layer < layers_; ++layer)
    check(phase(layer, slot) == phase_now, "export in the middle of a step");
  std::memcpy(out.data() + at - sizeof(int32_t), &phase_now, sizeof(phase_now));
}

void SequenceMemory::import_recurrent(int slot, std::span<const std::byte> in) {
  check(in.size() == recurrent_slot_bytes(shape_), "size of an imported slot");
  size_t at = 0;
  for (const BufferSpan& part : parts_of(slot)) {
    std::memcpy(part.as<std::byte>(), in.data() + at, part.bytes);
    at += part.bytes;
  }
  int32_t phase_now = 0;
  std::memcpy(&phase_now, in.data() + at - sizeof(int32_t), sizeof(phase_now));
  for (int layer = 0; layer < layers_; ++layer)
    phases_[static_cast<size_t>(slot) * layers_ + layer] = static_cast<uint8_t>(phase_now & 1);
}

void SequenceMemory::export_kv_page(int page, std::span<std::byte> out) const {
  const size_t bytes = kv_page_bytes(shape_);
  check(out.size() == bytes, "size of an exported KV page");
  std::memcpy(out.data(), kv_.as<std::byte>() + page * bytes, bytes);
}

void SequenceMemory::import_kv_page(int page, std::span<const std::byte> in) {
  const size_t bytes = kv_page_bytes(shape_);
  check(in.size() == bytes, "size of an imported KV page");
  std::memcpy(kv_.as<std::byte>() + page * bytes, in.data(), bytes);
}

void SequenceMemory::read_gdn(int gdn_layer, int slot, std::span<float> state, std::span<float> conv) const {
  const size_t layer_floats = shape_.gdn_value_heads * kStateFloats;
  const float* from = states_.as<float>() + (static_cast<size_t>(slot) * layers_ + gdn_layer) * layer_floats;
  for (int head = 0; head < shape_.gdn_value_heads; ++head) {
    for (int column = 0; column < kGdnHeadDim; ++column) {
      for (int row = 0; row < kGdnHeadDim; ++row) {
        state[head * kStateFloats + row * kGdnHeadDim + column] =
            from[head * kStateFloats + column * kGdnHeadDim + row];
      }
    }
  }
  const bf16* tail_rows = tail(gdn_layer, slot, phase(gdn_layer, slot)).as<bf16>();
  for (size_t i = 0; i < conv.size(); ++i) conv[i] = to_float(tail_rows[i]);
}

void SequenceMemory::write_gdn(int gdn_layer, int slot, std::span<const float> state, std::span<const float> conv) {
  const size_t layer_floats = shape_.gdn_value_heads * kStateFloats;
  float* to = states_.as<float>() + (static_cast<size_t>(slot) * layers_ + gdn_layer) * layer_floats;
  for (int head = 0; head < shape_.gdn_value_heads; ++head) {
    for (int column = 0; column < kGdnHeadDim; ++column) {
      for (int row = 0; row < kGdnHeadDim; ++row) {
        to[head * kStateFloats + column * kGdnHeadDim + row] = state[head * kStateFloats + row * kGdnHeadDim + column];
      }
    }
  }
  bf16* tail_rows = tail(gdn_layer, slot, phase(gdn_layer, slot)).as<bf16>();
  for (size_t i = 0; i < conv.size(); ++i) tail_rows[i] = to_bf16(conv[i]);
}

bf16* SequenceMemory::kv_row(int attention_layer, int page, int which, int head, int row) const {
  const size_t index =
      (((static_cast<size_t>(page) * shape_.attention_layers() + attention_layer) * 2 + which) * shape_.kv_heads +
       head) *
          kKvPageRows +
      row;
  return kv_.as<bf16>() + index * kHeadDim;
}

void SequenceMemory::read_kv(int attention_layer, std::span<const int32_t> pages, int rows, std::span<float> k,
                             std::span<float> v) const {
  for (int head = 0; head < shape_.kv_heads; ++head) {
    for (int row = 0; row < rows; ++row) {
      const size_t at = (static_cast<size_t>(head) * rows + row) * kHeadDim;
      for (int which = 0; which < 2; ++which) {
        const bf16* from = kv_row(attention_layer, pages[row / kKvPageRows], which, head, row % kKvPageRows);
        for (int i = 0; i < kHeadDim; ++i) (which == 0 ? k : v)[at + i] = to_float(from[i]);
      }
    }
  }
}

void SequenceMemory::write_kv(int attention_layer, std::span<const int32_t> pages, int rows, std::span<const float> k,
                              std::span<const float> v) {
  for (int head = 0; head < shape_.kv_heads; ++head) {
    for (int row = 0; row < rows; ++row) {
      const size_t at = (static_cast<size_t>(head) * rows + row) * kHeadDim;
      for (int which = 0; which < 2; ++which) {
        bf16* to = kv_row(attention_layer, pages[row / kKvPageRows], which, head, row % kKvPageRows);
        for (int i = 0; i < kHeadDim; ++i) to[i] = to_bf16((which == 0 ? k : v)[at + i]);
      }
    }
  }
}

}  // namespace calla::metal
