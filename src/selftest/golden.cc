#include "selftest/golden.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "base/error.h"
#include "checkpoint/mapped_file.h"
#include "checkpoint/safetensors.h"
#include "selftest/evaluator.h"

namespace calla {
namespace {

constexpr int kFew = 8;  // positions that are too few to forgive one

class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path)
      : name_(path.string()), file_(path), header_(parse_safetensors(file_.bytes(), name_)) {
    for (const TensorEntry& entry : header_.tensors) by_name_[entry.name] = &entry;
  }
  const std::string& path() const { return name_; }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : by_name_) names.push_back(name);
    return names;
  }
  bool has(const std::string& name) const { return by_name_.contains(name); }
  std::vector<float> floats(const std::string& name) const { return read<float>(name, Dtype::kF32); }
  std::vector<int32_t> ints(const std::string& name) const { return read<int32_t>(name, Dtype::kI32); }
  // Token ids, checked against the vocabulary.
  std::vector<TokenId> tokens(const std::string& name, const ModelShape& shape) const {
    const std::vector<TokenId> ids = ints(name);
    if (ids.empty()) throw CheckpointError(name_ + ": " + name + " is empty");
    for (TokenId id : ids)
      if (id < 0 || id >= shape.vocab)
        throw CheckpointError(name_ + ": " + name + " holds token " + std::to_string(id) +
                              ", outside the model's vocabulary of " + std::to_string(shape.vocab) +
                              "; does this golden file belong to the model?");
    return ids;
  }
  void expect_size(const std::string& name, size_t found, size_t expected) const {
    if (found != expected)
      throw CheckpointError(name_ + ": " + name + " has " + std::to_string(found) + " elements, expected " +
                            std::to_string(expected));
  }

 private:
  template <class T>
  std::vector<T> read(const std::string& name, Dtype dtype) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) throw CheckpointError(name_ + ": there is no tensor " + name);
    const TensorEntry& entry = *found->second;
    if (entry.dtype != dtype)
      throw CheckpointError(name_ + ": " + name + " is " + std::string(dtype_name(entry.dtype)) + ", expected " +
                            std::string(dtype_name(dtype)));
    std::vector<T> values((entry.end - entry.begin) / sizeof(T));
    std::memcpy(values.data(), file_.bytes().data() + entry.begin, values.size() * sizeof(T));
    return values;
  }

  std::string name_;
  MappedFile file_;
  SafetensorsHeader header_;
  std::map<std::string, const TensorEntry*> by_name_;
};

TokenId argmax(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// Errors over many values. `relative` compares with the spread of the golden values.
class Errors {
 public:
  void add(double value, double golden) {
    const double error = std::abs(value - golden);
    if (!std::isfinite(value)) finite_ = false;
    max_ = std::max(max_, error);
    sum_ += error;
    squares_ += error * error;
    golden_sum_ += golden;
    golden_squares_ += golden * golden;
    ++count_;
  }
  void fill(GoldenResult& result) const {
    const double n = static_cast<double>(std::max<size_t>(count_, 1));
    const double variance = golden_squares_ / n - (golden_sum_ / n) * (golden_sum_ / n);
    result.max_error = finite_ ? max_ : INFINITY;
    result.mean_error = finite_ ? sum_ / n : INFINITY;
    result.relative = finite_ ? std::sqrt(squares_ / n / std::max(variance, 1e-30)) : INFINITY;
  }

 private:
  double max_ = 0, sum_ = 0, squares_ = 0, golden_sum_ = 0, golden_squares_ = 0;
  size_t count_ = 0;
  bool finite_ = true;
};

GoldenResult named(const std::string& name, const std::string& kind) {
  GoldenResult result;
  result.name = name;
  result.kind = kind;
  return result;
}

class Runner {
 public:
  Runner(Backend& backend, const ModelShape& shape, const GoldenFile& file, const GoldenOptions& options,
         int max_tokens)
      : backend_(backend),
        shape_(shape),
        file_(file),
        tolerance_(options.tolerance),
        prefix_(options.prefix > 0 ? static_cast<size_t>(options.prefix) : SIZE_MAX),
        evaluator_(backend, shape, max_tokens, options.chunk, options.max_heads) {}

  // CASE/input_ids and what goes with it: one teacher-forced run.
  void teacher_forced(const std::string& name) {
    std::vector<TokenId> tokens = file_.tokens(name + "/input_ids", shape_);
    const auto vocab = static_cast<size_t>(shape_.vocab);
    const bool all = file_.has(name + "/logits"), last8 = file_.has(name + "/logits_last8");
    const std::vector<float> golden = all     ? file_.floats(name + "/logits")
                                      : last8 ? file_.floats(name + "/logits_last8")
                                              : std::vector<float>();
    const size_t first = all ? 0 : last8 ? tokens.size() - std::min<size_t>(8, tokens.size()) : tokens.size();
    if (all || last8)
      file_.expect_size(name + (all ? "/logits" : "/logits_last8"), golden.size(), (tokens.size() - first) * vocab);
    std::vector<int32_t> best = file_.has(name + "/argmax") ? file_.ints(name + "/argmax") : std::vector<int32_t>();
    if (!best.empty()) file_.expect_size(name + "/argmax", best.size(), tokens.size());
    std::vector<float> next =
        file_.has(name + "/next_logprob") ? file_.floats(name + "/next_logprob") : std::vector<float>();
    if (!next.empty()) file_.expect_size(name + "/next_logprob", next.size(), tokens.size() - 1);
    const bool cut = tokens.size() > prefix_;
    if (cut) {
      tokens.resize(prefix_);
      next.resize(std::min(next.size(), prefix_ - 1));
    }

    GoldenResult logits_result = named(name, "logits"), next_result = named(name, "perplexity");
    Errors logit_errors, next_errors;
    int agree = 0, judged = 0;
    double nll = 0, golden_nll = 0, forced_nll = 0, forced_golden_nll = 0;
    evaluator_.reset();
    evaluator_.run(tokens, [&](int index, std::span<const float> logits) {
      const auto i = static_cast<size_t>(index);
      if (i >= first && !golden.empty()) {  // of a cut text the last 8 are not reached
        const std::span<const float> expected = std::span(golden).subspan((i - first) * vocab, vocab);
        for (size_t v = 0; v < vocab; ++v) logit_errors.add(logits[v], expected[v]);
        if (best.empty()) agree += argmax(logits) == argmax(expected), ++judged;
        if (i + 1 < tokens.size()) {
          forced_nll -= log_probability(logits, tokens[i + 1]);
          forced_golden_nll -= log_probability(expected, tokens[i + 1]);
        }
        ++logits_result.positions;
      }
      if (!best.empty()) agree += argmax(logits) == best[i], ++judged;
      if (i < next.size()) {
        const double value = log_probability(logits, tokens[i + 1]);
        next_errors.add(value, next[i]);
        nll -= value;
        golden_nll -= next[i];
      }
    });
    if (logits_result.positions > 0 || judged > 0) {
      logit_errors.fill(logits_result);
      if (judged > 0) logits_result.top1 = static_cast<double>(agree) / judged;
      if (logits_result.positions > 1)
        logits_result.perplexity = std::exp((forced_nll - forced_golden_nll) / (logits_result.positions - 1)) - 1;
      // A single flip among some positions says nothing about a rate; among very few it says that something is wrong.
      const bool top1_ok = logits_result.top1.value_or(1) >= tolerance_.top1 || (judged - agree <= 1 && judged >= kFew);
      logits_result.ok = top1_ok && std::isfinite(logits_result.relative) &&
                         (tolerance_.logits == 0 || logits_result.relative <= tolerance_.logits);
      results.push_back(logits_result);
    }
    if (!next.empty()) {
      next_errors.fill(next_result);
      next_result.positions = static_cast<int>(next.size());
      next_result.perplexity = std::exp((nll - golden_nll) / static_cast<double>(next.size())) - 1;
      next_result.ok = std::abs(next_result.perplexity) <= tolerance_.perplexity;
      results.push_back(next_result);
    }
    if (!cut) states(name);
  }

  // The text in windows of 512 tokens, each from an empty state.
  void windows(const std::string& name) {
    const std::vector<TokenId> tokens = file_.tokens(name + "/input_ids", shape_);
    const std::vector<float> golden = file_.floats(name + "/logprob_w512");
    constexpr size_t kWindow = 512;
    const size_t count = (tokens.size() + kWindow - 1) / kWindow;
    file_.expect_size(name + "/logprob_w512", golden.size(), tokens.size() - count);
    GoldenResult result = named(name, "perplexity w512");
    Errors errors;
    double nll = 0, golden_nll = 0;
    size_t scored = 0;
    const size_t end = std::min(tokens.size(), prefix_);
    for (size_t begin = 0; begin < end; begin += kWindow) {
      const auto window = std::span(tokens).subspan(begin, std::min(kWindow, end - begin));
      evaluator_.reset();
      evaluator_.run(window, [&](int index, std::span<const float> logits) {
        if (static_cast<size_t>(index) + 1 >= window.size()) return;
        const double value = log_probability(logits, window[static_cast<size_t>(index) + 1]);
        errors.add(value, golden[scored]);
        nll -= value;
        golden_nll -= golden[scored++];
      });
    }
    errors.fill(result);
    result.positions = static_cast<int>(scored);
    result.perplexity = std::exp((nll - golden_nll) / static_cast<double>(scored)) - 1;
    // The tolerance is that of the whole text; the mean of fewer positions' errors varies more.
    const double share = static_cast<double>(scored) / static_cast<double>(golden.size());
    result.ok = std::abs(result.perplexity) <= tolerance_.perplexity / std::sqrt(share);
    result.note = "perplexity " + std::to_string(std::exp(nll / static_cast<double>(scored)));
    results.push_back(result);
  }

  // A greedy answer, token by token with the cache.
  void greedy(const std::string& name, const std::string& prompt_name) {
    const std::vector<TokenId> prompt = file_.tokens(prompt_name, shape_);
    std::vector<TokenId> expected = file_.tokens(name + "/output_ids", shape_);
    const std::vector<float> margin = file_.floats(name + "/margin");
    file_.expect_size(name + "/margin", margin.size(), expected.size());
    for (const float value : margin)
      if (!(value >= 0) || !std::isfinite(value))
        throw CheckpointError(file_.path() + ": " + name + "/margin holds " + std::to_string(value) +
                              ", expected finite numbers from 0 on");
    expected.resize(std::min(expected.size(), prefix_));
    GoldenResult result = named(name, "greedy");
    evaluator_.reset();
    result.ok = true;
    TokenId token = evaluator_.pick(prompt);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (token != expected[i]) {
        result.ok = margin[i] <= tolerance_.margin;
        result.note = "differs at token " + std::to_string(i) + " of " + std::to_string(expected.size()) +
                      ", where the golden margin is " + std::to_string(margin[i]);
        break;
      }
      ++result.positions;
      if (i + 1 < expected.size()) token = evaluator_.step();
    }
    result.top1 = static_cast<double>(result.positions) / static_cast<double>(expected.size());
    results.push_back(result);
  }

 private:
  // CASE/gdnL/WHAT or CASE/attnL/WHAT: layer L must be there and of that kind, and WHAT one that is compared.
  void check_state_name(const std::string& full, size_t at) const {
    const bool gdn = full.compare(at, 3, "gdn") == 0;
    const char* digits = full.data() + at + (gdn ? 3 : 4);
    int layer = -1;
    const auto [end, error] = std::from_chars(digits, full.data() + full.size(), layer);
    const std::string_view what(end, static_cast<size_t>(full.data() + full.size() - end));
    const bool known = gdn ? what == "/state" || what == "/conv_state" : what == "/k_cache" || what == "/v_cache";
    const auto kind = gdn ? LayerKind::kGatedDeltaNet : LayerKind::kAttention;
    if (error != std::errc() || !known || layer < 0 || layer >= shape_.layers() ||
        shape_.layer_kinds[static_cast<size_t>(layer)] != kind)
      throw CheckpointError(file_.path() + ": " + full + " is no state of this model");
  }

  // State after the last token of a teacher-forced case.
  void states(const std::string& name) {
    const auto compare = [&](const std::string& what, std::span<const float> values) {
      const std::string full = name + "/" + what;
      if (!file_.has(full)) return;
      const std::vector<float> golden = file_.floats(full);
      file_.expect_size(full, golden.size(), values.size());
      GoldenResult result = named(name, what);
      Errors errors;
      double difference = 0, norm = 0;
      for (size_t i = 0; i < golden.size(); ++i) {
        errors.add(values[i], golden[i]);
        difference += (values[i] - golden[i]) * (values[i] - golden[i]);
        norm += golden[i] * golden[i];
      }
      errors.fill(result);
      result.positions = static_cast<int>(golden.size());
      result.relative = std::sqrt(difference / std::max(norm, 1e-30));
      result.ok = result.relative <= tolerance_.state;
      results.push_back(result);
    };
    for (const std::string& full : file_.names())
      if (full.starts_with(name + "/gdn") || full.starts_with(name + "/attn")) check_state_name(full, name.size() + 1);
    for (int layer = 0; layer < shape_.layers(); ++layer) {
      const std::string gdn = "gdn" + std::to_string(layer), attn = "attn" + std::to_string(layer);
      if (file_.has(name + "/" + gdn + "/state") || file_.has(name + "/" + gdn + "/conv_state")) {
        std::vector<float> state(static_cast<size_t>(shape_.gdn_value_heads) * kGdnHeadDim * kGdnHeadDim);
        std::vector<float> conv(static_cast<size_t>(kConvWidth - 1) * shape_.gdn_conv_width());
        backend_.read_gdn_state(layer, 0, state, conv);
        compare(gdn + "/state", state);
        compare(gdn + "/conv_state", conv);
      }
      if (file_.has(name + "/" + attn + "/k_cache") || file_.has(name + "/" + attn + "/v_cache")) {
        const int rows = evaluator_.position();
        std::vector<float> k(static_cast<size_t>(shape_.kv_heads) * rows * kHeadDim), v(k.size());
        backend_.read_kv(layer, evaluator_.pages(), rows, k, v);
        compare(attn + "/k_cache", k);
        compare(attn + "/v_cache", v);
      }
    }
  }

  Backend& backend_;
  const ModelShape& shape_;
  const GoldenFile& file_;
  const GoldenTolerance& tolerance_;
  const size_t prefix_;  // of a text, and of an answer
  Evaluator evaluator_;

 public:
  std::vector<GoldenResult> results;
};

}  // namespace

GoldenTolerance fast_tolerance() { return {}; }

GoldenTolerance full_precision_tolerance() {
  GoldenTolerance tolerance;
  tolerance.logits = 1e-3;
  tolerance.state = 1e-3;
  tolerance.margin = 1e-2;
  return tolerance;
}

GoldenTolerance bf16_random_tolerance() {
  GoldenTolerance tolerance;
  tolerance.logits = 0.08;
  tolerance.perplexity = 0.01;
  tolerance.top1 = 0.9;
  tolerance.state = 0.04;
  tolerance.margin = 0.15;
  return tolerance;
}

std::vector<GoldenResult> run_golden(Backend& backend, const ModelShape& shape, const std::filesystem::path& path,
                                     const GoldenOptions& options) {
  const GoldenFile file(path);
  std::set<std::string> cases;
  size_t longest = 1, longest_answer = 1;
  for (const std::string& name : file.names()) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos) continue;
    const std::string case_name = name.substr(0, slash);
    const auto& wanted = options.cases;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), case_name) == wanted.end()) continue;
    cases.insert(case_name);
    const std::string what = name.substr(slash + 1);
    if (what == "input_ids" || what == "prompt_ids") longest = std::max(longest, file.ints(name).size());
    if (what == "output_ids") longest_answer = std::max(longest_answer, file.ints(name).size());
  }
  for (const std::string& name : options.cases)
    if (!cases.contains(name)) throw CheckpointError(path.string() + ": there is no case " + name);
  if (cases.empty()) throw CheckpointError(path.string() + ": no cases; a golden file names its tensors CASE/WHAT");
  Runner runner(backend, shape, file, options, static_cast<int>(longest + longest_answer));
  for (const std::string& name : cases) {
    if (options.longest_prompt > 0 && file.has(name + "/prompt_ids") &&
        file.ints(name + "/prompt_ids").size() > static_cast<size_t>(options.longest_prompt))
      continue;
    const size_t before = runner.results.size();
    if (options.progress) options.progress(name);
    if (file.has(name + "/logprob_w512"))
      runner.windows(name);
    else if (file.has(name + "/input_ids"))
      runner.teacher_forced(name);
    else if (file.has(name + "/prompt_ids") && file.has(name + "/output_ids"))
      runner.greedy(name, name + "/prompt_ids");
    else if (name.starts_with("greedy") && file.has("len" + name.substr(6) + "/input_ids"))
      runner.greedy(name, "len" + name.substr(6) + "/input_ids");
    else
      throw CheckpointError(path.string() + ": case " + name + " has neither input_ids nor prompt_ids with output_ids");
    if (runner.results.size() == before)
      throw CheckpointError(path.string() + ": case " + name + " has nothing to compare with");
  }
  return runner.results;
}

}  // namespace calla
