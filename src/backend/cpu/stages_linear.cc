// Stages that are matrices times rows: the projections around the mixers, the embedding and the head; and
// pick.
#include "backend/cpu/cpu_backend.h"
#include "base/check.h"

namespace calla::cpu {
namespace {

// One row of a matrix in fp32.
void expand_row(const WeightMatrix& matrix, int n, float* out) {
  if (matrix.format == WeightFormat::kBf16) {
    for (int k = 0; k < matrix.k; ++k) out[k] = to_float(matrix.values[static_cast<size_t>(n) * matrix.k + k]);
    return;
  }
  const int per_word = 32 / matrix.bits;
  const uint32_t mask = (1u << matrix.bits) - 1;
  const uint32_t* words = matrix.codes + n * matrix.words_per_row();
  const size_t first_group = n * matrix.groups_per_row();
  for (int k = 0; k < matrix.k; k += per_word) {
    const size_t group = first_group + k / matrix.group;
    const float scale = to_float(matrix.scales[group]), bias = to_float(matrix.biases[group]);
    uint32_t word = words[k / per_word];
    for (int i = 0; i < per_word; ++i, word >>= matrix.bits)
      out[k + i] = scale * static_cast<float>(word & mask) + bias;
  }
}

size_t bytes(std::initializer_list<const WeightMatrix*> matrices) {
  size_t sum = 0;
  for (const WeightMatrix* matrix : matrices) sum += matrix->bytes();
  return sum;
}

}  // namespace

void CpuBackend::norm_rows(const FloatVector& weight, float* out) {
  const auto hidden = static_cast<size_t>(shape_.hidden);
  threads_.parallel_for(static_cast<size_t>(rows_), 16, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r)
      kernels_.row.rmsnorm(slot(Slot::kResidual) + r * hidden, weight.data(), shape_.hidden, shape_.rms_eps,
                           out + r * hidden);
  });
}

void CpuBackend::embed() {
  Profile::Scope scope(profile_, Stage::kEmbed);
  threads_.parallel_for(static_cast<size_t>(rows_), 16, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r)
      expand_row(weights_.embedding, tokens_[r], row(Slot::kResidual, static_cast<int>(r)));
  });
}

void CpuBackend::project_gdn(int layer) {
  Profile::Scope scope(profile_, Stage::kProjectGdn);
  const GdnWeights& w = *weights_.layers[layer].gdn;
  norm_rows(weights_.layers[layer].input_norm, normed_.data());
  inputs_.prepare(normed_.data(), shape_.hidden, nullptr, rows_, shape_.hidden,
                  linear_.codings({&w.in_qkv, &w.in_z, &w.in_a, &w.in_b}), kernels_.row, threads_);
  const auto heads = static_cast<size_t>(shape_.gdn_value_heads);
  const Product products[] = {
      {w.in_qkv, slot(Slot::kGdnQkv), static_cast<size_t>(shape_.gdn_conv_width())},
      {w.in_z, slot(Slot::kGdnZ), static_cast<size_t>(shape_.gdn_value_width())},
      {w.in_a, slot(Slot::kGdnA), heads},
      {w.in_b, slot(Slot::kGdnB), heads},
  };
  linear_.multiply(products, inputs_, rows_);
  scope.add_bytes(bytes({&w.in_qkv, &w.in_z, &w.in_a, &w.in_b}));
}

void CpuBackend::project_attention(int layer) {
  Profile::Scope scope(profile_, Stage::kProjectAttention);
  const AttentionWeights& w = *weights_.layers[layer].attention;
  norm_rows(weights_.layers[layer].input_norm, normed_.data());
  inputs_.prepare(normed_.data(), shape_.hidden, nullptr, rows_, shape_.hidden, linear_.codings({&w.q, &w.k, &w.v}),
                  kernels_.row, threads_);
  const Product products[] = {
      {w.q, slot(Slot::kAttnQGate), static_cast<size_t>(2 * shape_.q_width())},
      {w.k, slot(Slot::kAttnK), static_cast<size_t>(shape_.kv_width())},
      {w.v, slot(Slot::kAttnV), static_cast<size_t>(shape_.kv_width())},
  };
  linear_.multiply(products, inputs_, rows_);
  scope.add_bytes(bytes({&w.q, &w.k, &w.v}));
}

void CpuBackend::project_residual(int layer) {
  Profile::Scope scope(profile_, Stage::kProjectResidual);
  const LayerWeights& w = weights_.layers[layer];
  const WeightMatrix& out = w.gdn ? w.gdn->out : w.attention->out;
  inputs_.prepare(slot(Slot::kMixed), shape_.mixer_width(), nullptr, rows_, out.k, linear_.codings({&out}),
                  kernels_.row, threads_);
  const Product product{out, slot(Slot::kResidual), static_cast<size_t>(shape_.hidden), true};
  linear_.multiply({&product, 1}, inputs_, rows_);
  scope.add_bytes(out.bytes());
}

void CpuBackend::head() {
  Profile::Scope scope(profile_, Stage::kHead);
  const auto hidden = static_cast<size_t>(shape_.hidden);
  const int heads = static_cast<int>(batch_.heads.size());
  for (int i = 0; i < heads; ++i)
    kernels_.row.rmsnorm(row(Slot::kResidual, batch_.heads[i].row), weights_.final_norm.data(), shape_.hidden,
                         shape_.rms_eps, normed_.data() + i * hidden);
  inputs_.prepare(normed_.data(), hidden, nullptr, heads, shape_.hidden, linear_.codings({&weights_.lm_head}),
                  kernels_.row, threads_);
  const Product product{weights_.lm_head, current().logits.data(), static_cast<size_t>(shape_.vocab)};
  linear_.multiply({&product, 1}, inputs_, heads);
  scope.add_bytes(weights_.lm_head.bytes());
}

void CpuBackend::pick() {
  Profile::Scope scope(profile_, Stage::kPick);
  Step& step = current();
  threads_.for_each(batch_.heads.size(), [&](size_t i, size_t, int thread) {
    const HeadRow& head = batch_.heads[i];
    if (!head.pick) return;
    const int state = batch_.sequences[head.sequence].recurrent_slot;
    const auto position = static_cast<uint64_t>(positions_[head.row] + 1);  // of the token picked now
    const TokenId token =
        pickers_[thread].pick(step.logits.span().subspan(i * shape_.vocab, shape_.vocab), head.sampling,
                              pool_.counts(state), head.allowed, position, kernels_.row);
    step.picked[i] = token;
    if (token < 0) return;
    pool_.count_token(state, token);
    pool_.last_token(state) = token;
  });
}

}  // namespace calla::cpu
