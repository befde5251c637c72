// The sparse MoE: route, group_rows, experts_up, experts_down. Rows are sorted by expert, so that an expert's
// weights are read once for all its rows; experts are taken in ascending order, the shared one last, for
// every row: that order of additions is the same in decode and in prefill.
#include <algorithm>
#include <array>
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "base/check.h"

namespace calla::cpu {
namespace {

constexpr int kPanelsPerPiece =
    4;  // 64 outputs of gate and up (147 KB at hidden 2048), or of all down projections

int pieces_of(const WeightMatrix& matrix) { return (panels(matrix) + kPanelsPerPiece - 1) / kPanelsPerPiece; }

// The largest `count` of n values: ids, largest first, lowest id on ties.
void top_k(const float* values, int n, int count, int* ids) {
  int kept = 0;
  for (int i = 0; i < n; ++i) {
    if (kept == count && !(values[i] > values[ids[kept - 1]])) continue;
    int at = kept < count ? kept++ : kept - 1;
    for (; at > 0 && values[i] > values[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = i;
  }
}

}  // namespace

void CpuBackend::route(int layer) {
  Profile::Scope scope(profile_, Stage::kRoute);
  const MoeWeights& w = weights_.layers[layer].moe;
  float* x = slot(Slot::kMoeInput);
  norm_rows(weights_.layers[layer].post_norm, x);
  inputs_.prepare(x, shape_.hidden, rows_, shape_.hidden, linear_.codings({&w.router, &w.shared_expert_gate}),
                  kernels_.row, threads_);
  const Product products[] = {
      {w.router, router_logits_.data(), static_cast<size_t>(shape_.experts)},
      {w.shared_expert_gate, slot(Slot::kSharedGate), 1},
  };
  linear_.multiply(products, inputs_, rows_);
  threads_.parallel_for(static_cast<size_t>(rows_), 16, [&](size_t begin, size_t end, int) {
    for (size_t r = begin; r < end; ++r) {
      const float* logits = router_logits_.data() + r * shape_.experts;
      std::array<int, kExpertsPerToken> ids{};
      top_k(logits, shape_.experts, kExpertsPerToken, ids.data());
      // p_i / sum p over the chosen: the softmax over all experts cancels but for the chosen ones.
      std::array<float, kExpertsPerToken> p;
      float sum = 0;
      for (int i = 0; i < kExpertsPerToken; ++i) sum += p[i] = std::exp(logits[ids[i]] - logits[ids[0]]);
      for (int i = 0; i < kExpertsPerToken; ++i) {
        slot(Slot::kExpertIds)[r * kExpertsPerToken + i] = static_cast<float>(ids[i]);
        slot(Slot::kExpertWeights)[r * kExpertsPerToken + i] = p[i] / sum;
      }
      float& gate = slot(Slot::kSharedGate)[r];
      gate = 1 / (1 + std::exp(-gate));
    }
  });
  scope.add_bytes(w.router.bytes() + w.shared_expert_gate.bytes());
}

void CpuBackend::group_rows(int /*layer*/) {
  Profile::Scope scope(profile_, Stage::kGroupRows);
  const int entries = rows_ * kExpertsPerToken;
  const float* ids = slot(Slot::kExpertIds);
  const float* weights = slot(Slot::kExpertWeights);
  std::ranges::fill(expert_starts_, 0);
  for (int i = 0; i < entries; ++i) {
    const int expert = static_cast<int>(ids[i]);
    check(expert >= 0 && expert < shape_.experts, "expert id");
    ++expert_starts_[expert + 1];
  }
  groups_.clear();
  for (int e = 0; e < shape_.experts; ++e) {
    const int begin = expert_starts_[e], end = begin + expert_starts_[e + 1];
    if (end > begin) groups_.push_back({e, begin, end});
    expert_starts_[e + 1] = end;
  }
  entry_rows_.resize(entries);
  entry_ids_.resize(entries);
  entry_weights_.resize(entries);
  for (int i = 0; i < entries; ++i) {
    const int at = expert_starts_[static_cast<int>(ids[i])]++;
    entry_rows_[at] = i / kExpertsPerToken;
    entry_ids_[at] = i;
    entry_weights_[at] = weights[i];
  }
}

void CpuBackend::experts_up(int layer) {
  Profile::Scope scope(profile_, Stage::kExpertsUp);
  const MoeWeights& w = weights_.layers[layer].moe;
  inputs_.prepare(
      slot(Slot::kMoeInput), shape_.hidden, rows_, shape_.hidden,
      linear_.codings({&w.expert_gate_proj, &w.expert_up_proj, &w.shared_gate_proj, &w.shared_up_proj}),
      kernels_.row, threads_);

  // One piece: some panels of gate and up of one expert, for all its rows. The shared expert has all rows: it
  // goes first, so that the last pieces are small.
  struct Piece {
    WeightMatrix gate, up;
    int begin, end;                 // panels
    const int32_t *rows, *entries;  // null: all rows in order
    int m;
    float* out;
    size_t stride;
  };
  const auto shared_pieces = static_cast<size_t>(pieces_of(w.shared_gate_proj));
  const auto expert_pieces = static_cast<size_t>(pieces_of(w.expert_gate_proj));
  const auto place = [&](size_t index) {
    Piece p{};
    if (index < shared_pieces) {
      p = {w.shared_gate_proj,
           w.shared_up_proj,
           static_cast<int>(index),
           0,
           nullptr,
           nullptr,
           rows_,
           shared_hidden_.data(),
           static_cast<size_t>(shape_.shared_expert_width)};
    } else {
      index -= shared_pieces;
      const ExpertGroup& group = groups_[index / expert_pieces];
      p = {w.expert_gate_proj.expert(group.expert),
           w.expert_up_proj.expert(group.expert),
           static_cast<int>(index % expert_pieces),
           0,
           entry_rows_.data() + group.begin,
           entry_ids_.data() + group.begin,
           group.end - group.begin,
           routed_hidden_.data(),
           static_cast<size_t>(shape_.expert_width)};
    }
    p.begin *= kPanelsPerPiece;
    p.end = std::min(p.begin + kPanelsPerPiece, panels(p.gate));
    return p;
  };
  const size_t count = shared_pieces + groups_.size() * expert_pieces;
  threads_.for_each(count, [&](size_t index, size_t next_index, int thread) {
    const Piece p = place(index);
    Piece following{};
    PanelRef after;
    if (next_index < count) {
      following = place(next_index);
      after = {&following.gate, following.begin};
    }
    float *gate = linear_.scratch(thread, 0), *up = linear_.scratch(thread, 1);
    for (int from = 0; from < p.m; from += kRowBlock) {
      const int m = std::min(kRowBlock, p.m - from);
      std::array<int32_t, kRowBlock> in_order;
      for (int i = 0; i < m; ++i) in_order[i] = from + i;
      const int32_t* rows = p.rows != nullptr ? p.rows + from : in_order.data();
      const int32_t* to = p.entries != nullptr ? p.entries + from : in_order.data();
      for (int panel = p.begin; panel < p.end; ++panel) {
        linear_.panel({&p.gate, panel}, inputs_, rows, m, gate, {&p.up, panel});
        linear_.panel({&p.up, panel}, inputs_, rows, m, up,
                      panel + 1 < p.end ? PanelRef{&p.gate, panel + 1} : after);
        const int n = std::min(kPanel, p.gate.n - panel * kPanel);
        kernels_.row.swiglu(gate, up, m, n, p.out + panel * kPanel, p.stride, to);
      }
    }
  });
  scope.add_bytes(groups_.size() * 2 * w.expert_gate_proj.expert(0).bytes() + 2 * w.shared_gate_proj.bytes());
}

void CpuBackend::experts_down(int layer) {
  Profile::Scope scope(profile_, Stage::kExpertsDown);
  const MoeWeights& w = weights_.layers[layer].moe;
  routed_inputs_.prepare(routed_hidden_.data(), shape_.expert_width, rows_ * kExpertsPerToken,
                         shape_.expert_width, linear_.codings({&w.expert_down_proj}), kernels_.row, threads_);
  shared_inputs_.prepare(shared_hidden_.data(), shape_.shared_expert_width, rows_, shape_.shared_expert_width,
                         linear_.codings({&w.shared_down_proj}), kernels_.row, threads_);

  // One piece: some columns of the residual stream, for all experts in turn, so that no two threads add to
  // one place.
  const auto stride = static_cast<size_t>(shape_.hidden);
  const auto count = static_cast<size_t>(pieces_of(w.expert_down_proj));
  threads_.for_each(count, [&](size_t index, size_t next_index, int thread) {
    const int begin = static_cast<int>(index) * kPanelsPerPiece;
    const int end = std::min(begin + kPanelsPerPiece, panels(w.expert_down_proj));
    float* y = linear_.scratch(thread, 0);
    // The columns of one expert for m rows; `after` is read next.
    const auto add = [&](const WeightMatrix& down, const Activations& x, const int32_t* inputs,
                         const int32_t* to, const float* weights, int m, PanelRef after) {
      for (int panel = begin; panel < end; ++panel) {
        linear_.panel({&down, panel}, x, inputs, m, y, panel + 1 < end ? PanelRef{&down, panel + 1} : after);
        const int n = std::min(kPanel, down.n - panel * kPanel);
        kernels_.row.add(y, m, n, weights, slot(Slot::kResidual) + panel * kPanel, stride, to);
      }
    };
    const WeightMatrix first_expert = w.expert_down_proj.expert(groups_.front().expert);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const ExpertGroup& group = groups_[g];
      const WeightMatrix down = w.expert_down_proj.expert(group.expert);
      const WeightMatrix following =
          g + 1 < groups_.size() ? w.expert_down_proj.expert(groups_[g + 1].expert) : w.shared_down_proj;
      for (int from = group.begin; from < group.end; from += kRowBlock)
        add(down, routed_inputs_, entry_ids_.data() + from, entry_rows_.data() + from,
            entry_weights_.data() + from, std::min(kRowBlock, group.end - from), {&following, begin});
    }
    for (int from = 0; from < rows_; from += kRowBlock) {
      const int m = std::min(kRowBlock, rows_ - from);
      std::array<int32_t, kRowBlock> in_order;
      for (int i = 0; i < m; ++i) in_order[i] = from + i;
      PanelRef after;
      if (from + m == rows_ && next_index < count)
        after = {&first_expert, static_cast<int>(next_index) * kPanelsPerPiece};
      add(w.shared_down_proj, shared_inputs_, in_order.data(), in_order.data(),
          slot(Slot::kSharedGate) + from, m, after);
    }
  });
  scope.add_bytes(groups_.size() * w.expert_down_proj.expert(0).bytes() + w.shared_down_proj.bytes());
}

}  // namespace calla::cpu
