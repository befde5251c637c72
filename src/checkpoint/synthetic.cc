#include "checkpoint/synthetic.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/check.h"
#include "base/error.h"
#include "base/random_word.h"
#include "checkpoint/describe.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

uint64_t name_key(uint64_t seed, std::string_view name) {
  uint64_t key = random_word(seed, 0);
  for (const char c : name) key = random_word(key ^ static_cast<unsigned char>(c), 0);
  return key;
}

float uniform(uint64_t key, uint64_t index) { return static_cast<float>(random_word(key, index) >> 40) * 0x1.0p-24f; }

// The standard deviation of uniform codes 0 .. 2^bits - 1, and their middle.
float code_deviation(int bits) {
  const double levels = static_cast<double>(1u << bits);
  return static_cast<float>(std::sqrt((levels * levels - 1) / 12));
}
float code_middle(int bits) { return static_cast<float>((1u << bits) - 1) / 2; }

bf16 scale_at(const SyntheticTensor& tensor, uint64_t index) {
  const float size = tensor.deviation / code_deviation(tensor.bits) * (0.75f + 0.5f * uniform(tensor.key, 2 * index));
  return to_bf16((random_word(tensor.key, 2 * index + 1) & 1) != 0 ? size : -size);
}

// Element of a tensor that is not codes.
float element_at(const SyntheticTensor& tensor, uint64_t index) {
  const float u = uniform(tensor.key, index);
  switch (tensor.kind) {
    case SyntheticKind::kScales:
      return to_float(scale_at(tensor, index));
    case SyntheticKind::kBiases:
      return -code_middle(tensor.bits) * to_float(scale_at(tensor, index));
    case SyntheticKind::kPlain:
      return (2 * u - 1) * std::sqrt(3.0f) * tensor.deviation;
    case SyntheticKind::kGamma:
      return 0.8f + 0.4f * u;
    case SyntheticKind::kALog:
      return std::log(1 + 15 * u);
    case SyntheticKind::kDtBias:
      return std::log(std::expm1(std::exp(std::log(0.001f) + std::log(100.0f) * u)));
    case SyntheticKind::kCodes:
      break;
  }
  check(false, "element_at: codes are made as words");
  return 0;
}

// Collects the tensors of a checkpoint in order.
class TensorList {
 public:
  explicit TensorList(const SyntheticOptions& options) : options_(options) {}

  // `gain`: how much larger than its inputs' the deviation of the output is to be.
  void matrix(const std::string& path, std::vector<uint64_t> shape, float gain,
              std::optional<QuantSpec> quant_if_any = {}) {
    const auto inputs = static_cast<float>(shape.back());
    matrix_of_deviation(path, std::move(shape), gain / std::sqrt(inputs), quant_if_any);
  }

  void matrix_of_deviation(const std::string& path, std::vector<uint64_t> shape, float deviation,
                           std::optional<QuantSpec> quant_if_any = {}) {
    const std::string module = "language_model." + path;
    const uint64_t inputs = shape.back();
    if (!options_.quant) {
      add(module + ".weight", Dtype::kBF16, std::move(shape), SyntheticKind::kPlain, deviation);
      return;
    }
    const QuantSpec quant = quant_if_any.value_or(*options_.quant);
    const uint64_t key = name_key(options_.seed, module + ".scales");
    shape.back() = inputs * static_cast<uint64_t>(quant.bits) / 32;
    add(module + ".weight", Dtype::kU32, shape, SyntheticKind::kCodes, 0);
    shape.back() = inputs / static_cast<uint64_t>(quant.group);
    for (const SyntheticKind kind : {SyntheticKind::kScales, SyntheticKind::kBiases}) {
      const char* suffix = kind == SyntheticKind::kScales ? ".scales" : ".biases";
      SyntheticTensor& tensor = add(module + suffix, Dtype::kBF16, shape, kind, deviation);
      tensor.key = key;
      tensor.bits = quant.bits;
    }
  }

  void vector(const std::string& path, int size, SyntheticKind kind, Dtype dtype = Dtype::kBF16) {
    add("language_model." + path, dtype, {static_cast<uint64_t>(size)}, kind, 0);
  }
  void plain(const std::string& path, std::vector<uint64_t> shape, float deviation) {
    add("language_model." + path, Dtype::kBF16, std::move(shape), SyntheticKind::kPlain, deviation);
  }

  std::vector<SyntheticTensor> take() { return std::move(tensors_); }

 private:
  SyntheticTensor& add(std::string name, Dtype dtype, std::vector<uint64_t> shape, SyntheticKind kind,
                       float deviation) {
    SyntheticTensor tensor;
    tensor.key = name_key(options_.seed, name);
    tensor.spec = {std::move(name), dtype, std::move(shape)};
    tensor.kind = kind;
    tensor.deviation = deviation;
    tensors_.push_back(std::move(tensor));
    return tensors_.back();
  }

  const SyntheticOptions& options_;
  std::vector<SyntheticTensor> tensors_;
};

uint64_t size_of(int value) { return static_cast<uint64_t>(value); }

// Gains: 1 into a mixer, 0.5 out of it, so that forty layers multiply the residual stream by about two.
constexpr float kGainIn = 1.0f;
constexpr float kGainOut = 0.5f;
constexpr float kEmbeddingDeviation = 0.7f;
constexpr float kTapDeviation = 0.5f;  // four taps: the convolution keeps the deviation

void add_gdn(TensorList& list, const std::string& prefix, const ModelShape& shape) {
  const uint64_t hidden = size_of(shape.hidden);
  list.vector(prefix + "A_log", shape.gdn_value_heads, SyntheticKind::kALog, Dtype::kF32);
  list.plain(prefix + "conv1d.weight", {size_of(shape.gdn_conv_width()), kConvWidth, 1}, kTapDeviation);
  list.vector(prefix + "dt_bias", shape.gdn_value_heads, SyntheticKind::kDtBias);
  list.matrix(prefix + "in_proj_a", {size_of(shape.gdn_value_heads), hidden}, kGainIn);
  list.matrix(prefix + "in_proj_b", {size_of(shape.gdn_value_heads), hidden}, kGainIn);
  list.matrix(prefix + "in_proj_qkv", {size_of(shape.gdn_conv_width()), hidden}, kGainIn);
  list.matrix(prefix + "in_proj_z", {size_of(shape.gdn_value_width()), hidden}, kGainIn);
  list.vector(prefix + "norm.weight", kGdnHeadDim, SyntheticKind::kGamma);
  list.matrix(prefix + "out_proj", {hidden, size_of(shape.gdn_value_width())}, kGainOut);
}

void add_attention(TensorList& list, const std::string& prefix, const ModelShape& shape) {
  const uint64_t hidden = size_of(shape.hidden);
  list.vector(prefix + "k_norm.weight", kHeadDim, SyntheticKind::kGamma);
  list.matrix(prefix + "k_proj", {size_of(shape.kv_width()), hidden}, kGainIn);
  list.matrix(prefix + "o_proj", {hidden, size_of(shape.q_width())}, kGainOut);
  list.vector(prefix + "q_norm.weight", kHeadDim, SyntheticKind::kGamma);
  list.matrix(prefix + "q_proj", {2 * size_of(shape.q_width()), hidden}, kGainIn);
  list.matrix(prefix + "v_proj", {size_of(shape.kv_width()), hidden}, kGainIn);
}

void add_moe(TensorList& list, const std::string& prefix, const SyntheticOptions& options) {
  const ModelShape& shape = options.shape;
  const uint64_t hidden = size_of(shape.hidden);
  const uint64_t experts = size_of(shape.experts);
  const uint64_t width = size_of(shape.expert_width);
  const uint64_t shared = size_of(shape.shared_expert_width);
  list.matrix(prefix + "gate", {experts, hidden}, kGainIn, options.router_quant);
  list.matrix(prefix + "shared_expert.down_proj", {hidden, shared}, kGainOut);
  list.matrix(prefix + "shared_expert.gate_proj", {shared, hidden}, kGainIn);
  list.matrix(prefix + "shared_expert.up_proj", {shared, hidden}, kGainIn);
  list.matrix(prefix + "shared_expert_gate", {1, hidden}, kGainIn, options.router_quant);
  list.matrix(prefix + "switch_mlp.down_proj", {experts, hidden, width}, kGainOut);
  list.matrix(prefix + "switch_mlp.gate_proj", {experts, width, hidden}, kGainIn);
  list.matrix(prefix + "switch_mlp.up_proj", {experts, width, hidden}, kGainIn);
}

// The files that a tokenizer and a chat template consist of; those that exist are copied.
void copy_tokenizer(const fs::path& from, const fs::path& to) {
  if (!fs::exists(from / "tokenizer.json"))
    throw CheckpointError((from / "tokenizer.json").string() + ": missing; give a directory with a tokenizer");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
                           "special_tokens_map.json", "added_tokens.json"})
    if (fs::exists(from / name)) fs::copy_file(from / name, to / name);
}

// A directory under a temporary name, removed unless it is given its final one. One process at a time can be making it.
class PartialDirectory {
 public:
  explicit PartialDirectory(const fs::path& path)
      : path_(path.has_filename() ? path : path.parent_path()),  // "DIR/" is DIR
        partial_(path_.string() + kPartial + std::to_string(::getpid())),
        reserved_(reserve(path_)) {
    refuse_existing(path_);  // the last owner of the name may just have finished
    remove_leftovers();
    fs::create_directories(partial_);
  }
  ~PartialDirectory() {
    std::error_code ignored;
    if (!finished_) fs::remove_all(partial_, ignored);
  }
  PartialDirectory(const PartialDirectory&) = delete;
  PartialDirectory& operator=(const PartialDirectory&) = delete;

  const fs::path& path() const { return partial_; }

 private:
  static constexpr const char* kPartial = ".partial-";

  static void refuse_existing(const fs::path& path) {
    std::error_code ignored;
    if (fs::equivalent(path, fs::current_path(), ignored))
      throw UsageError(path.string() + ": is the current directory; name a new one");
    if (fs::exists(path) && !(fs::is_directory(path) && fs::is_empty(path)))
      throw UsageError(path.string() + ": exists already; remove it or choose another name");
  }
  // Looks before it writes anything.
  static fs::path reserve(const fs::path& path) {
    refuse_existing(path);
    fs::create_directories(path.parent_path());
    return path;
  }
  // What earlier processes that were killed have left under this name: whoever still works there would have the lock.
  void remove_leftovers() const {
    const std::string prefix = path_.filename().string() + kPartial;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(path_.parent_path(), ignored)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(prefix)) continue;
      const bool is_number = name.find_first_not_of("0123456789", prefix.size()) == std::string::npos;
      if (is_number && name.size() > prefix.size()) fs::remove_all(entry.path(), ignored);
    }
  }

 public:
  void finish() {
    fs::rename(partial_, path_);
    finished_ = true;
  }

 private:
  fs::path path_;
  fs::path partial_;
  PartialFile reserved_;  // never finished: what counts is its lock
  bool finished_ = false;
};

}  // namespace

std::vector<SyntheticTensor> synthetic_tensors(const SyntheticOptions& options) {
  const ModelShape& shape = options.shape;
  const uint64_t vocab = size_of(shape.vocab);
  const uint64_t hidden = size_of(shape.hidden);
  TensorList list(options);
  list.matrix_of_deviation("model.embed_tokens", {vocab, hidden}, kEmbeddingDeviation);
  for (int i = 0; i < shape.layers(); ++i) {
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    list.vector(prefix + "input_layernorm.weight", shape.hidden, SyntheticKind::kGamma);
    if (shape.layer_kinds[static_cast<size_t>(i)] == LayerKind::kGatedDeltaNet) {
      add_gdn(list, prefix + "linear_attn.", shape);
    } else {
      add_attention(list, prefix + "self_attn.", shape);
    }
    list.vector(prefix + "post_attention_layernorm.weight", shape.hidden, SyntheticKind::kGamma);
    add_moe(list, prefix + "mlp.", options);
  }
  list.vector("model.norm.weight", shape.hidden, SyntheticKind::kGamma);
  list.matrix("lm_head", {vocab, hidden}, kGainIn);
  return list.take();
}

void fill_synthetic(const SyntheticTensor& tensor, uint64_t offset, std::span<std::byte> out) {
  if (tensor.kind == SyntheticKind::kCodes) {
    check(offset % 8 == 0, "fill_synthetic: whole words");
    for (size_t at = 0; at < out.size(); at += 8) {
      const uint64_t word = random_word(tensor.key, (offset + at) / 8);
      std::memcpy(out.data() + at, &word, std::min<size_t>(8, out.size() - at));
    }
    return;
  }
  const size_t size = dtype_bytes(tensor.spec.dtype);
  check(offset % size == 0 && out.size() % size == 0, "fill_synthetic: whole elements");
  for (size_t at = 0; at < out.size(); at += size) {
    const float value = element_at(tensor, (offset + at) / size);
    if (tensor.spec.dtype == Dtype::kF32) {
      std::memcpy(out.data() + at, &value, sizeof(value));
    } else {
      const bf16 rounded = to_bf16(value);
      std::memcpy(out.data() + at, &rounded, sizeof(rounded));
    }
  }
}

void make_checkpoint(const SyntheticOptions& options, const fs::path& directory, const WriteProgress& progress) {
  const std::vector<SyntheticTensor> tensors = synthetic_tensors(options);
  std::vector<TensorSpec> specs;
  uint64_t bytes = 0;
  for (const SyntheticTensor& tensor : tensors) {
    specs.push_back(tensor.spec);
    bytes += tensor.spec.bytes();
  }
  try {
    PartialDirectory partial(fs::absolute(directory).lexically_normal());
    if (const uint64_t room = fs::space(partial.path()).available; room < bytes)
      throw CheckpointError(directory.string() + ": needs " + describe_bytes(bytes) + ", but the disk has only " +
                            describe_bytes(room) + " left");
    if (!options.tokenizer_from.empty()) copy_tokenizer(options.tokenizer_from, partial.path());
    write_text_file(partial.path() / "config.json", synthetic_config(options));
    write_text_file(partial.path() / "generation_config.json", synthetic_generation_config(options));
    write_tensor_files(
        partial.path(), specs,
        [&](size_t index, uint64_t offset, std::span<std::byte> out) { fill_synthetic(tensors[index], offset, out); },
        options.max_shard_bytes, progress);
    partial.finish();
  } catch (const fs::filesystem_error& error) {
    throw CheckpointError(directory.string() + ": cannot write: " + error.what());
  }
}

}  // namespace calla
