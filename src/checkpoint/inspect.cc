#include "checkpoint/inspect.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/describe.h"
#include "checkpoint/tensor_names.h"

namespace calla {
namespace {

// The parts of the report, in its order.
enum Part { kEmbedding, kHead, kGdn, kAttention, kRouter, kExperts, kSharedExpert, kNorms, kUnused, kOther, kParts };
constexpr std::array<const char*, kParts> kPartNames = {
    "embedding",     "head",  "gated delta net",      "attention", "router", "routed experts",
    "shared expert", "norms", "unused (vision, MTP)", "other"};

Part part_of(std::string_view full_name) {
  if (is_unused_part(full_name)) return kUnused;
  const std::string_view name = canonical_name(full_name);
  const auto has = [&](std::string_view piece) { return name.find(piece) != std::string_view::npos; };
  if (name.starts_with("embed_tokens.")) return kEmbedding;
  if (name.starts_with("lm_head.")) return kHead;
  if (name == "norm.weight" || has("layernorm.")) return kNorms;
  if (has(".linear_attn.")) return kGdn;
  if (has(".self_attn.")) return kAttention;
  if (has(".mlp.switch_mlp.") || has(".mlp.experts.")) return kExperts;
  if (has(".mlp.shared_expert")) return kSharedExpert;
  if (has(".mlp.gate.")) return kRouter;
  return kOther;
}

// Parameters that a tensor stores: codes one by one; scales and biases are not parameters.
uint64_t parameters_of(const Tensor& tensor, const QuantConfig& quant) {
  const std::string_view name = canonical_name(tensor.name);
  if (name.ends_with(".scales") || name.ends_with(".biases")) return 0;
  if (tensor.dtype != Dtype::kU32) return tensor.elements();
  const std::string_view module = name.substr(0, name.rfind('.'));
  const QuantSpec spec = quant.find(module).value_or(QuantSpec{});
  return tensor.elements() * 32 / static_cast<uint64_t>(spec.bits);
}

// The share of a part that one decoded token reads.
uint64_t read_per_token(Part part, uint64_t amount, const ModelShape& shape) {
  switch (part) {
    case kEmbedding:
      return amount / static_cast<uint64_t>(shape.vocab);
    case kExperts:
      return amount / static_cast<uint64_t>(shape.experts) * kExpertsPerToken;
    case kUnused:
    case kOther:
      return 0;
    default:
      return amount;
  }
}

MemoryPlan plan_memory(const ModelShape& shape, uint64_t weights, const InspectOptions& options) {
  const auto u64 = [](int value) { return static_cast<uint64_t>(value); };
  MemoryPlan plan;
  plan.context = options.context > 0 ? options.context : std::min(kDefaultContext, shape.max_context);
  plan.sequences = options.sequences;
  plan.weights = weights;
  const uint64_t gdn_state = u64(shape.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim * 4;
  const uint64_t tail = u64(shape.gdn_conv_width()) * (kConvWidth - 1) * 2;
  plan.recurrent_state = u64(plan.sequences) * u64(shape.gdn_layers()) * (gdn_state + tail);
  const uint64_t kv_token = u64(shape.attention_layers()) * u64(shape.kv_width()) * 2 * 2;
  plan.kv_cache = u64(plan.sequences) * u64(plan.context) * kv_token;
  // One row of every activation, see Slot in backend.h.
  const int mixer =
      std::max(shape.gdn_conv_width() + shape.gdn_value_width(), 3 * shape.q_width() + 2 * shape.kv_width());
  const int row = 2 * shape.hidden + mixer + shape.mixer_width() + shape.experts +
                  kExpertsPerToken * shape.expert_width + shape.shared_expert_width;
  plan.scratch = (u64(options.chunk_rows) * u64(row) + u64(plan.sequences) * u64(shape.vocab)) * 4;
  return plan;
}

std::string count_text(uint64_t value) {
  std::array<char, 32> text{};
  const auto number = static_cast<double>(value);
  if (value >= 1'000'000'000) {
    std::snprintf(text.data(), text.size(), "%.2f G", number / 1e9);
  } else if (value >= 1'000'000) {
    std::snprintf(text.data(), text.size(), "%.2f M", number / 1e6);
  } else {
    return std::to_string(value);
  }
  return text.data();
}

// How the plan relates to the machine's memory.
struct Verdict {
  const char* word;
  std::string sentence;
};
Verdict verdict(const InspectReport& report) {
  const uint64_t need = report.plan.total();
  const MachineMemory& machine = report.machine;
  if (machine.total == 0) return {"unknown", "how much memory this machine has is unknown"};
  if (need <= machine.available) return {"fits", "fits into the memory that is free"};
  if (need <= machine.total)
    return {"tight", "fits only if other programs give memory back; expect the first answers to be slow"};
  return {"too large", "does not fit: weights would be read from the disk again for every token"};
}

std::string quant_text(const QuantConfig& quant) {
  if (!quant.defaults) return "none (bf16)";
  std::string text =
      "affine, " + std::to_string(quant.defaults->bits) + " bits, groups of " + std::to_string(quant.defaults->group);
  size_t others = 0;
  for (const auto& [module, spec] : quant.overrides) others += spec != quant.defaults;
  if (others > 0) text += " (" + std::to_string(others) + " matrices differ)";
  return text;
}

class Lines {
 public:
  void field(const char* name, const std::string& value) {
    std::array<char, 32> label{};
    std::snprintf(label.data(), label.size(), "%-20s", name);
    out_ << label.data() << value << '\n';
  }
  // Three columns: a name and two amounts, right-aligned.
  void row(const std::string& name, const std::string& a, const std::string& b) {
    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(), "  %-26s %12s %16s", name.c_str(), a.c_str(), b.c_str());
    std::string line = text.data();
    line.erase(line.find_last_not_of(' ') + 1);
    out_ << line << '\n';
  }
  void line(const std::string& text) { out_ << text << '\n'; }
  std::string text() const { return out_.str(); }

 private:
  std::ostringstream out_;
};

void add_tensor_table(Lines& lines, const InspectReport& report) {
  lines.line("");
  lines.line("Tensors");
  for (const Tensor& tensor : report.tensors)
    lines.line("  " + describe_name(tensor.name) + "  " + std::string(dtype_name(tensor.dtype)) + " " +
               describe_shape(tensor.shape) + "  " + describe_bytes(tensor.data.size()) +
               (report.files.size() > 1 ? "  " + report.files[static_cast<size_t>(tensor.file)] : ""));
}

}  // namespace

InspectReport inspect(const Checkpoint& checkpoint, const ModelConfig& config, const InspectOptions& options) {
  InspectReport report;
  report.directory = checkpoint.directory().string();
  report.config = config;
  report.files = checkpoint.files();
  report.tensor_count = checkpoint.tensors().size();
  report.warnings = checkpoint.warnings();
  if (options.tensors) report.tensors.assign(checkpoint.tensors().begin(), checkpoint.tensors().end());
  std::array<uint64_t, kParts> bytes{};
  std::array<uint64_t, kParts> parameters{};
  std::vector<bool> needs_padding;  // by file
  for (size_t i = 0; i < report.files.size(); ++i) needs_padding.push_back(checkpoint.needs_padding(i));
  uint64_t odd = 0;  // tensors that cannot be used where they lie
  uint64_t odd_bytes = 0;
  uint64_t off_bytes = 0;  // of codes that only Metal cannot use where they lie
  for (const Tensor& tensor : checkpoint.tensors()) {
    const Part part = part_of(tensor.name);
    bytes[part] += tensor.data.size();
    parameters[part] += parameters_of(tensor, config.quant);
    if (part == kUnused || part == kOther) continue;
    if (!tensor.aligned()) {
      ++odd;
      odd_bytes += tensor.data.size();
    } else if (!tensor.suits_every_backend() && needs_padding[static_cast<size_t>(tensor.file)]) {
      off_bytes += tensor.data.size();
    }
  }
  if (odd > 0)
    report.warnings.push_back(std::to_string(odd) +
                              " tensors lie at odd addresses in their files; loading has to copy " +
                              describe_bytes(odd_bytes) + " into memory; `calla align` rewrites them once");
  if (off_bytes > 0)
    report.warnings.push_back(
        "on a Mac's GPU, loading has to copy " + describe_bytes(off_bytes) +
        " into memory, because of where they lie in their files; `calla align` rewrites them once");
  uint64_t weights = 0;
  for (int i = 0; i < kParts; ++i) {
    const auto part = static_cast<Part>(i);
    const bool used = part != kUnused && part != kOther;
    if (bytes[part] == 0) continue;
    report.parts.push_back({kPartNames[part], bytes[part], read_per_token(part, bytes[part], config.shape)});
    if (!used) continue;
    weights += bytes[part];
    report.parameters += parameters[part];
    if (part != kEmbedding) report.active_parameters += read_per_token(part, parameters[part], config.shape);
  }
  report.plan = plan_memory(config.shape, weights, options);
  report.machine = machine_memory();
  return report;
}

std::string inspect_text(const InspectReport& report) {
  const ModelShape& shape = report.config.shape;
  Lines lines;
  lines.field("checkpoint", report.directory);
  lines.field("architecture",
              report.config.architecture.empty() ? report.config.model_type : report.config.architecture);
  lines.field("parameters",
              count_text(report.parameters) + ", " + count_text(report.active_parameters) + " active a token");
  lines.field("layers", std::to_string(shape.layers()) + ": " + std::to_string(shape.gdn_layers()) +
                            " gated delta net, " + std::to_string(shape.attention_layers()) + " attention");
  lines.field("hidden, vocabulary", std::to_string(shape.hidden) + ", " + std::to_string(shape.vocab));
  lines.field("experts", std::to_string(shape.experts) + " of width " + std::to_string(shape.expert_width) + ", " +
                             std::to_string(kExpertsPerToken) + " a token, and a shared one of width " +
                             std::to_string(shape.shared_expert_width));
  lines.field("heads", "attention " + std::to_string(shape.q_heads) + " on " + std::to_string(shape.kv_heads) +
                           ", delta net " + std::to_string(shape.gdn_value_heads) + " on " +
                           std::to_string(shape.gdn_key_heads));
  lines.field("context", std::to_string(shape.max_context) + " tokens");
  lines.field("quantisation", quant_text(report.config.quant));
  lines.field("files",
              std::to_string(report.files.size()) + " with " + std::to_string(report.tensor_count) + " tensors");
  lines.line("");
  lines.row("Weights", "bytes", "read a token");
  uint64_t bytes = 0;
  uint64_t per_token = 0;
  for (const PartBytes& part : report.parts) {
    lines.row(part.part, describe_bytes(part.bytes), part.per_token > 0 ? describe_bytes(part.per_token) : "-");
    bytes += part.bytes;
    per_token += part.per_token;
  }
  lines.row("all", describe_bytes(bytes), describe_bytes(per_token));
  const MemoryPlan& plan = report.plan;
  lines.line("");
  lines.line("Memory for " + std::to_string(plan.sequences) + " sequence(s) of " + std::to_string(plan.context) +
             " tokens");
  lines.row("weights (mapped)", describe_bytes(plan.weights), "");
  lines.row("recurrent state", describe_bytes(plan.recurrent_state), "");
  lines.row("KV cache", describe_bytes(plan.kv_cache), "");
  lines.row("scratch (estimate)", describe_bytes(plan.scratch), "");
  lines.row("all", describe_bytes(plan.total()), "");
  lines.row("this machine", describe_bytes(report.machine.total), describe_bytes(report.machine.available) + " free");
  lines.line("  " + verdict(report).sentence);
  if (!report.tensors.empty()) add_tensor_table(lines, report);
  if (report.verified) {
    lines.line("");
    lines.line(report.verified->empty() ? "Verified: every scale, bias and norm is a finite number"
                                        : "Damaged tensors");
    for (const NonFinite& problem : *report.verified)
      lines.line("  " + describe_name(problem.tensor) + ": element " + std::to_string(problem.first_element) + " is " +
                 std::to_string(problem.value) + " (" + std::to_string(problem.count) + " not finite)");
  }
  for (const std::string& warning : report.warnings) lines.line("warning: " + warning);
  return lines.text();
}

nlohmann::ordered_json inspect_json(const InspectReport& report) {
  using nlohmann::ordered_json;
  const ModelShape& shape = report.config.shape;
  ordered_json out;
  out["checkpoint"] = report.directory;
  out["architecture"] = report.config.architecture;
  out["model_type"] = report.config.model_type;
  out["parameters"] = report.parameters;
  out["active_parameters"] = report.active_parameters;
  out["shape"] = {{"hidden", shape.hidden},
                  {"layers", shape.layers()},
                  {"attention_layers", shape.attention_layers()},
                  {"vocab", shape.vocab},
                  {"q_heads", shape.q_heads},
                  {"kv_heads", shape.kv_heads},
                  {"gdn_key_heads", shape.gdn_key_heads},
                  {"gdn_value_heads", shape.gdn_value_heads},
                  {"experts", shape.experts},
                  {"experts_per_token", kExpertsPerToken},
                  {"expert_width", shape.expert_width},
                  {"shared_expert_width", shape.shared_expert_width},
                  {"max_context", shape.max_context}};
  if (report.config.quant.defaults)
    out["quantisation"] = {{"bits", report.config.quant.defaults->bits},
                           {"group", report.config.quant.defaults->group}};
  out["files"] = report.files;
  out["tensor_count"] = report.tensor_count;
  out["parts"] = ordered_json::array();
  for (const PartBytes& part : report.parts)
    out["parts"].push_back({{"part", part.part}, {"bytes", part.bytes}, {"bytes_per_token", part.per_token}});
  const MemoryPlan& plan = report.plan;
  out["memory"] = {{"context", plan.context},
                   {"sequences", plan.sequences},
                   {"weights", plan.weights},
                   {"recurrent_state", plan.recurrent_state},
                   {"kv_cache", plan.kv_cache},
                   {"scratch_estimate", plan.scratch},
                   {"total", plan.total()},
                   {"machine_total", report.machine.total},
                   {"machine_available", report.machine.available},
                   {"verdict", verdict(report).word}};
  for (const Tensor& tensor : report.tensors)
    out["tensors"].push_back({{"name", tensor.name},
                              {"dtype", dtype_name(tensor.dtype)},
                              {"shape", tensor.shape},
                              {"bytes", tensor.data.size()},
                              {"file", report.files[static_cast<size_t>(tensor.file)]}});
  if (report.verified) {
    out["damaged"] = ordered_json::array();
    for (const NonFinite& problem : *report.verified)
      out["damaged"].push_back({{"tensor", problem.tensor},
                                {"element", problem.first_element},
                                {"value", std::to_string(problem.value)},
                                {"count", problem.count}});
  }
  out["warnings"] = report.warnings;
  return out;
}

}  // namespace calla
