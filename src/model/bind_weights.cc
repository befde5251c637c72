#include "model/bind_weights.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "checkpoint/describe.h"
#include "checkpoint/machine_memory.h"
#include "checkpoint/tensor_names.h"

namespace calla {
namespace {

using Shape = std::vector<uint64_t>;

Shape shape_of(std::initializer_list<int> sizes) {
  Shape shape;
  for (const int size : sizes) shape.push_back(static_cast<uint64_t>(size));
  return shape;
}

std::string what_it_is(const Tensor& tensor) {
  return std::string(dtype_name(tensor.dtype)) + " " + describe_shape(tensor.shape);
}

// How a checkpoint stores the gammas of its zero-centred norms.
enum class NormStyle { kUnknown, kConverted, kRaw };

class Binder {
 public:
  Binder(const Checkpoint& checkpoint, const ModelShape& shape, const QuantConfig& quant)
      : checkpoint_(checkpoint), shape_(shape), quant_(quant) {
    for (const Tensor& tensor : checkpoint.tensors()) {
      if (is_unused_part(tensor.name)) continue;
      const auto [place, fresh] = unclaimed_.emplace(std::string(canonical_name(tensor.name)), &tensor);
      if (!fresh)
        problem(tensor.name, "means the same as " + describe_name(place->second->name) + "; only one may be there");
    }
  }

  ModelWeights bind() {
    ModelWeights weights;
    weights.embedding = matrix("embed_tokens", 1, shape_.vocab, shape_.hidden);
    for (int i = 0; i < shape_.layers(); ++i) weights.layers.push_back(bind_layer(i));
    weights.final_norm = norm("norm.weight", shape_.hidden);
    weights.lm_head = matrix("lm_head", 1, shape_.vocab, shape_.hidden);
    refuse_extra_layers();
    fail_on_problems();
    const bool shift = norms_are_raw();
    if (shift) {
      for (LayerWeights& layer : weights.layers) {
        add_one(layer.input_norm);
        add_one(layer.post_norm);
        if (layer.attention) {
          add_one(layer.attention->q_norm);
          add_one(layer.attention->k_norm);
        }
      }
      add_one(weights.final_norm);
    }
    return weights;
  }

  // Names of the bound matrices' tensors that lie at addresses unfit for their dtype.
  const std::vector<std::string>& misaligned() const { return misaligned_; }

  std::optional<std::string> warning_about_extras() const {
    if (unclaimed_.empty()) return std::nullopt;
    std::string line = std::to_string(unclaimed_.size()) + " tensor(s) have no place in this model and are ignored: ";
    size_t named = 0;
    for (const auto& [name, tensor] : unclaimed_) {
      if (named == 3) return line + ", ...";
      if (named++ > 0) line += ", ";
      line += describe_name(tensor->name);
    }
    return line;
  }

 private:
  LayerWeights bind_layer(int index) {
    const std::string prefix = "layers." + std::to_string(index) + ".";
    LayerWeights layer;
    layer.input_norm = norm(prefix + "input_layernorm.weight", shape_.hidden);
    layer.post_norm = norm(prefix + "post_attention_layernorm.weight", shape_.hidden);
    if (shape_.layer_kinds[static_cast<size_t>(index)] == LayerKind::kGatedDeltaNet) {
      layer.gdn = bind_gdn(prefix + "linear_attn.");
    } else {
      layer.attention = bind_attention(prefix + "self_attn.");
    }
    layer.moe = bind_moe(prefix + "mlp.");
    return layer;
  }

  GdnWeights bind_gdn(const std::string& prefix) {
    GdnWeights gdn;
    gdn.in_qkv = matrix(prefix + "in_proj_qkv", 1, shape_.gdn_conv_width(), shape_.hidden);
    gdn.in_z = matrix(prefix + "in_proj_z", 1, shape_.gdn_value_width(), shape_.hidden);
    gdn.in_a = matrix(prefix + "in_proj_a", 1, shape_.gdn_value_heads, shape_.hidden);
    gdn.in_b = matrix(prefix + "in_proj_b", 1, shape_.gdn_value_heads, shape_.hidden);
    gdn.out = matrix(prefix + "out_proj", 1, shape_.hidden, shape_.gdn_value_width());
    gdn.conv = convolution(prefix + "conv1d.weight");
    gdn.a_log = vector(prefix + "A_log", shape_.gdn_value_heads);
    gdn.dt_bias = vector(prefix + "dt_bias", shape_.gdn_value_heads);
    gdn.norm = vector(prefix + "norm.weight", kGdnHeadDim);
    return gdn;
  }

  AttentionWeights bind_attention(const std::string& prefix) {
    AttentionWeights attention;
    attention.q = matrix(prefix + "q_proj", 1, 2 * shape_.q_width(), shape_.hidden);
    attention.k = matrix(prefix + "k_proj", 1, shape_.kv_width(), shape_.hidden);
    attention.v = matrix(prefix + "v_proj", 1, shape_.kv_width(), shape_.hidden);
    attention.out = matrix(prefix + "o_proj", 1, shape_.hidden, shape_.q_width());
    attention.q_norm = norm(prefix + "q_norm.weight", kHeadDim);
    attention.k_norm = norm(prefix + "k_norm.weight", kHeadDim);
    return attention;
  }

  MoeWeights bind_moe(const std::string& prefix) {
    const std::string experts = prefix + "switch_mlp.";
    const std::string shared = prefix + "shared_expert.";
    MoeWeights moe;
    moe.router = matrix(prefix + "gate", 1, shape_.experts, shape_.hidden);
    moe.expert_gate_proj = matrix(experts + "gate_proj", shape_.experts, shape_.expert_width, shape_.hidden);
    moe.expert_up_proj = matrix(experts + "up_proj", shape_.experts, shape_.expert_width, shape_.hidden);
    moe.expert_down_proj = matrix(experts + "down_proj", shape_.experts, shape_.hidden, shape_.expert_width);
    moe.shared_gate_proj = matrix(shared + "gate_proj", 1, shape_.shared_expert_width, shape_.hidden);
    moe.shared_up_proj = matrix(shared + "up_proj", 1, shape_.shared_expert_width, shape_.hidden);
    moe.shared_down_proj = matrix(shared + "down_proj", 1, shape_.hidden, shape_.shared_expert_width);
    moe.shared_expert_gate = matrix(prefix + "shared_expert_gate", 1, 1, shape_.hidden);
    return moe;
  }

  // Takes a tensor by its canonical name; null: not there (no problem noted).
  const Tensor* take(const std::string& name) {
    const auto found = unclaimed_.find(name);
    if (found == unclaimed_.end()) return nullptr;
    const Tensor* tensor = found->second;
    unclaimed_.erase(found);
    return tensor;
  }

  // Takes a tensor that must be there.
  const Tensor* require(const std::string& name) {
    const Tensor* tensor = take(name);
    if (tensor == nullptr) problem(name, "is missing");
    return tensor;
  }

  // Whether the tensor is as it should be; if not, notes the problem.
  bool fits(const Tensor& tensor, Dtype dtype, const Shape& shape) {
    if (tensor.dtype == dtype && tensor.shape == shape) return true;
    problem(tensor, "expected " + std::string(dtype_name(dtype)) + " " + describe_shape(shape) + ", found " +
                        what_it_is(tensor));
    return false;
  }

  // A matrix [stack][n][k] (stack 1: [n][k]), quantised if it has scales.
  WeightMatrix matrix(const std::string& module, int stack, int n, int k) {
    WeightMatrix m;
    m.stack = stack;
    m.n = n;
    m.k = k;
    const Tensor* weight = require(module + ".weight");
    const Tensor* scales = take(module + ".scales");
    const Tensor* biases = take(module + ".biases");
    if (weight == nullptr) return m;
    if (scales == nullptr && weight->dtype != Dtype::kU32) {
      bind_plain(m, *weight);
    } else if (scales == nullptr || biases == nullptr) {
      problem(module, std::string("is quantised but has no .") + (scales == nullptr ? "scales" : "biases"));
    } else {
      bind_affine(m, module, *weight, *scales, *biases);
    }
    return m;
  }

  static Shape matrix_shape(const WeightMatrix& m, int columns) {
    return m.stack == 1 ? shape_of({m.n, columns}) : shape_of({m.stack, m.n, columns});
  }

  void bind_plain(WeightMatrix& m, const Tensor& weight) {
    m.format = WeightFormat::kBf16;
    if (fits(weight, Dtype::kBF16, matrix_shape(m, m.k))) m.values = pointer<bf16>(weight);
  }

  void bind_affine(WeightMatrix& m, const std::string& module, const Tensor& weight, const Tensor& scales,
                   const Tensor& biases) {
    const std::optional<QuantSpec> spec = quant_.find(module);
    if (!spec) {
      problem(module, "is quantised (" + what_it_is(weight) + "), but config.json does not say how (quantization)");
      return;
    }
    m.format = WeightFormat::kAffine;
    m.bits = spec->bits;
    m.group = spec->group;
    if (m.k % m.group != 0) {
      problem(module, "has " + std::to_string(m.k) + " inputs, not a multiple of the quantisation group " +
                          std::to_string(m.group) + " of config.json");
      return;
    }
    const int words = m.k * m.bits / 32;
    const int groups = m.k / m.group;
    if (says_otherwise(m, module, weight, scales)) return;
    if (fits(weight, Dtype::kU32, matrix_shape(m, words))) m.codes = pointer<uint32_t>(weight);
    if (fits(scales, Dtype::kBF16, matrix_shape(m, groups))) m.scales = pointer<bf16>(scales);
    if (fits(biases, Dtype::kBF16, matrix_shape(m, groups))) m.biases = pointer<bf16>(biases);
  }

  // The likeliest mistake deserves a message of its own: config.json names other bits or another group than the
  // tensors' widths imply.
  bool says_otherwise(const WeightMatrix& m, const std::string& module, const Tensor& weight, const Tensor& scales) {
    if (weight.shape.empty() || scales.shape.empty()) return false;
    const uint64_t words = weight.shape.back();
    const uint64_t groups = scales.shape.back();
    const auto k = static_cast<uint64_t>(m.k);
    if (words == 0 || groups == 0 || words > k || groups > k || words * 32 % k != 0 || k % groups != 0) return false;
    const uint64_t bits = words * 32 / k;
    const uint64_t group = k / groups;
    if (bits == static_cast<uint64_t>(m.bits) && group == static_cast<uint64_t>(m.group)) return false;
    problem(module, "has the widths of " + std::to_string(bits) + "-bit weights in groups of " + std::to_string(group) +
                        ", but config.json says " + std::to_string(m.bits) + " bits in groups of " +
                        std::to_string(m.group));
    return true;
  }

  // Where the elements lie. A misaligned pointer is only ever replaced, never read through.
  template <typename T>
  const T* pointer(const Tensor& tensor) {
    if (!tensor.aligned()) misaligned_.push_back(tensor.name);
    return reinterpret_cast<const T*>(tensor.data.data());
  }

  // A small float tensor of any of `shapes`, widened.
  FloatVector floats(const std::string& name, std::initializer_list<Shape> shapes, const Tensor** found = nullptr) {
    const Tensor* tensor = require(name);
    if (tensor == nullptr) return {};
    if (!tensor->is_float() || std::find(shapes.begin(), shapes.end(), tensor->shape) == shapes.end()) {
      std::string expected = "expected BF16, F16 or F32 ";
      for (const Shape& shape : shapes) expected += (&shape == shapes.begin() ? "" : " or ") + describe_shape(shape);
      problem(*tensor, expected + ", found " + what_it_is(*tensor));
      return {};
    }
    FloatVector out(tensor->elements());
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = tensor->float_at(i);
      if (!std::isfinite(out[i])) {
        problem(*tensor, "element " + std::to_string(i) + " is not a finite number; the file is damaged");
        return {};
      }
    }
    if (found != nullptr) *found = tensor;
    return out;
  }

  FloatVector vector(const std::string& name, int size) { return floats(name, {shape_of({size})}); }

  // The gamma of a zero-centred norm.
  FloatVector norm(const std::string& name, int size) {
    FloatVector gamma = vector(name, size);
    if (!gamma.empty()) {
      double sum = 0;
      for (const float value : gamma) sum += value;
      gamma_means_.push_back(sum / static_cast<double>(gamma.size()));
    }
    return gamma;
  }

  // [C, 4, 1] (converted) and [C, 1, 4] (raw) hold the same numbers in the same order: [C][4].
  FloatVector convolution(const std::string& name) {
    const int channels = shape_.gdn_conv_width();
    const Shape converted = shape_of({channels, kConvWidth, 1});
    const Shape raw = shape_of({channels, 1, kConvWidth});
    const Tensor* tensor = nullptr;
    FloatVector taps = floats(name, {converted, raw}, &tensor);
    if (tensor != nullptr) {
      const NormStyle style = tensor->shape == raw ? NormStyle::kRaw : NormStyle::kConverted;
      if (style_ != NormStyle::kUnknown && style_ != style)
        problem(*tensor,
                "has another layout than the convolutions before it: the checkpoint mixes converted and "
                "original tensors");
      style_ = style;
    }
    return taps;
  }

  // Whether gammas are stored without their 1. The layout of the convolutions decides; the gammas' own values
  // must not contradict it. Without convolutions the gammas decide alone.
  bool norms_are_raw() const {
    std::vector<double> means = gamma_means_;
    const auto middle = means.begin() + static_cast<std::ptrdiff_t>(means.size() / 2);
    std::nth_element(means.begin(), middle, means.end());
    const double median = *middle;
    // Far from both, the values say nothing: trained gammas wander.
    const bool near_one = median > 0.6 && median < 1.4;
    const bool near_zero = median > -0.3 && median < 0.3;
    if (style_ == NormStyle::kUnknown) return near_zero;
    if ((style_ == NormStyle::kRaw && near_one) || (style_ == NormStyle::kConverted && near_zero))
      throw CheckpointError(checkpoint_.directory().string() +
                            ": the layout of conv1d.weight says that the norms' gammas are stored " +
                            (near_one ? "without their 1 (an original checkpoint), but they lie around 1"
                                      : "ready to multiply (a converted checkpoint), but they lie around 0") +
                            "; a conversion went wrong half way, convert the original again");
    return style_ == NormStyle::kRaw;
  }

  static void add_one(FloatVector& gamma) {
    for (float& value : gamma) value += 1;
  }

  // Tensors of layers beyond the config's last mean that config and tensors are of different models.
  void refuse_extra_layers() {
    for (const auto& [name, tensor] : unclaimed_) {
      if (!name.starts_with("layers.")) continue;
      int layer = 0;
      const char* end = name.data() + name.size();
      const auto parsed = std::from_chars(name.data() + 7, end, layer);
      if (parsed.ec != std::errc{} || parsed.ptr == end || *parsed.ptr != '.' || layer < shape_.layers()) continue;
      problem(*tensor, "belongs to layer " + std::to_string(layer) + ", but config.json has only " +
                           std::to_string(shape_.layers()) + " layers");
      return;
    }
  }

  void problem(const std::string& name, const std::string& what) {
    problems_.push_back(describe_name(name) + ": " + what);
  }
  void problem(const Tensor& tensor, const std::string& what) {
    problem(tensor.name, what + " (" + checkpoint_.files()[static_cast<size_t>(tensor.file)] + ")");
  }

  void fail_on_problems() const {
    constexpr size_t kMostNamed = 20;
    if (problems_.empty()) return;
    std::string text = checkpoint_.directory().string() + ": the tensors do not fit config.json:";
    for (size_t i = 0; i < std::min(problems_.size(), kMostNamed); ++i) text += "\n  " + problems_[i];
    if (problems_.size() > kMostNamed) text += "\n  ... and " + std::to_string(problems_.size() - kMostNamed) + " more";
    throw CheckpointError(text + "\nAre config.json and the weights of one model? If so, get them again.");
  }

  const Checkpoint& checkpoint_;
  const ModelShape& shape_;
  const QuantConfig& quant_;
  std::map<std::string, const Tensor*> unclaimed_;  // by canonical name
  std::vector<std::string> problems_;
  std::vector<std::string> misaligned_;
  std::vector<double> gamma_means_;
  NormStyle style_ = NormStyle::kUnknown;
};

constexpr std::string_view kStackedExperts = ".mlp.experts.gate_up_proj";

// The original checkpoint keeps the experts as mlp.experts.gate_up_proj [experts, 2 * width, hidden] (gate rows before
// up rows) and mlp.experts.down_proj. Brings them to the names and the layout of a conversion. Returns the bytes
// copied.
uint64_t unstack_experts(Checkpoint& checkpoint, const ModelShape& shape) {
  const Shape expected = shape_of({shape.experts, 2 * shape.expert_width, shape.hidden});
  std::vector<std::string> stacked;
  uint64_t bytes = 0;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (!tensor.name.ends_with(kStackedExperts) || is_unused_part(tensor.name)) continue;
    if (tensor.dtype != Dtype::kBF16 || tensor.shape != expected)
      throw CheckpointError(checkpoint.directory().string() + ": " + describe_name(tensor.name) + ": expected BF16 " +
                            describe_shape(expected) + ", found " + what_it_is(tensor));
    stacked.push_back(tensor.name);
    bytes += tensor.data.size();
  }
  if (const uint64_t memory = machine_memory().total; memory > 0 && bytes > memory / 4)
    throw CheckpointError(checkpoint.directory().string() + ": this is an original checkpoint; its stacked experts, " +
                          describe_bytes(bytes) +
                          ", would have to be copied into memory. Convert it first, for instance with mlx_lm.convert");
  bytes = 0;
  for (const std::string& name : stacked) {
    const std::string mlp = name.substr(0, name.size() - kStackedExperts.size()) + ".mlp.";
    const std::string down = mlp + "experts.down_proj";
    const std::string converted = mlp + "switch_mlp.";
    const auto taken = [&](const char* module) { return checkpoint.find(converted + module + ".weight") != nullptr; };
    // What is missing or there twice, the binder will name.
    if (checkpoint.find(down) == nullptr || taken("gate_proj") || taken("up_proj") || taken("down_proj")) continue;
    bytes += checkpoint.split_rows(name, converted + "gate_proj.weight", converted + "up_proj.weight");
    checkpoint.rename(down, converted + "down_proj.weight");
  }
  return bytes;
}

}  // namespace

void check_weights(const Checkpoint& checkpoint, const ModelShape& shape, const QuantConfig& quant) {
  for (const Tensor& tensor : checkpoint.tensors())
    if (tensor.name.ends_with(kStackedExperts)) return;
  Binder(checkpoint, shape, quant).bind();
}

BoundWeights bind_weights(Checkpoint& checkpoint, const ModelShape& shape, const QuantConfig& quant) {
  constexpr uint64_t kWorthALine = 16u << 20;
  BoundWeights bound;
  bound.warnings = checkpoint.warnings();
  const auto note_copies = [&](uint64_t bytes, const std::string& why) {
    bound.copied_bytes += bytes;
    if (bytes >= kWorthALine)
      bound.warnings.push_back(why + "; copying them took " + describe_bytes(bytes) + " of memory");
  };
  note_copies(
      unstack_experts(checkpoint, shape),
      "the experts' gate and up projections are stacked, as in an original checkpoint (converting it avoids this)");
  Binder binder(checkpoint, shape, quant);
  bound.weights = binder.bind();
  if (const auto extras = binder.warning_about_extras()) bound.warnings.push_back(*extras);
  if (!binder.misaligned().empty()) {
    // Everything fits, so the copy is worth its time. Bind again: the tensors have moved.
    const std::vector<std::string> names = binder.misaligned();
    note_copies(checkpoint.align_tensors(names),
                std::to_string(names.size()) +
                    " tensors lie at odd addresses in their files (`calla align` rewrites them once)");
    bound.weights = Binder(checkpoint, shape, quant).bind();
  }
  return bound;
}

}  // namespace calla
