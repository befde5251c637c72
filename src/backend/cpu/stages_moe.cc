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

constexpr int kPanelsPerPiece = 4;  // 64 outputs of gate and up (147 KB at hidden 2048), or of all down projections

int pieces_of(const WeightMatrix& matrix) { return (panel_count(matrix) + kPanelsPerPiece - 1) / kPanelsPerPiece; }

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
  inputs_.prepare(x, shape_.hidden, nullptr, rows_, shape_.hidden, linear_.codings({&w.router, &w.shared_expert_gate}),
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
  inputs_.prepare(slot(Slot::kMoeInput), shape_.hidden, nullptr, rows_, shape_.hidden,
                  linear_.codings({&w.expert_gate_proj, &w.expert_up_proj, &w.shared_gate_proj, &w.shared_up_proj}),
                  kernels_.row, threads_);

  // One piece: some panels of gate and up of one expert, for all its rows. The shared expert comes last.
  struct Piece {
    WeightMatrix gate, up;
    int begin = 0, end = 0;  // panels
    int m = 0;
    const int32_t *rows = nullptr, *out_rows = nullptr;  // null: all rows in order
    float* out = nullptr;
  };
  const auto expert_pieces = static_cast<size_t>(pieces_of(w.expert_gate_proj));
  const size_t routed = groups_.size() * expert_pieces;
  const size_t count = routed + static_cast<size_t>(pieces_of(w.shared_gate_proj));
  const auto place = [&](size_t index) {
    Piece p;
    if (index < routed) {
      const ExpertGroup& group = groups_[index / expert_pieces];
      p.gate = w.expert_gate_proj.expert(group.expert);
      p.up = w.expert_up_proj.expert(group.expert);
      p.begin = static_cast<int>(index % expert_pieces) * kPanelsPerPiece;
      p.m = group.end - group.begin;
      p.rows = entry_rows_.data() + group.begin;
      p.out_rows = entry_ids_.data() + group.begin;
      p.out = routed_hidden_.data();
    } else {
      p.gate = w.shared_gate_proj;
      p.up = w.shared_up_proj;
      p.begin = static_cast<int>(index - routed) * kPanelsPerPiece;
      p.m = rows_;
      p.out = shared_hidden_.data();
    }
    p.end = std::min(p.begin + kPanelsPerPiece, panel_count(p.gate));
    return p;
  };
  threads_.for_each(count, [&](size_t index, size_t next_index, int thread) {
    const Piece p = place(index);
    Piece following;
    PanelRange after;
    if (next_index < count) {
      following = place(next_index);
      after = {&following.gate, following.begin, following.end};
    }
    const auto stride = static_cast<size_t>(p.gate.n);
    for (int from = 0; from < p.m; from += kRowBlock) {
      RowSet rows{nullptr, from, std::min(kRowBlock, p.m - from)};
      float* out = p.out + static_cast<size_t>(from) * stride;
      const int32_t* out_rows = nullptr;
      if (p.rows != nullptr) {
        rows = {p.rows + from, 0, rows.m};
        out = p.out;
        out_rows = p.out_rows + from;
      }
      float* gate = linear_.scratch(thread);
      float* up = gate + kPanelsPerPiece * rows.m * kPanel;
      linear_.panels({&p.gate, p.begin, p.end}, inputs_, rows, gate, {&p.up, p.begin, p.end});
      linear_.panels({&p.up, p.begin, p.end}, inputs_, rows, up, after);
      for (int panel = p.begin; panel < p.end; ++panel) {
        const int at = (panel - p.begin) * rows.m * kPanel, n = std::min(kPanel, p.gate.n - panel * kPanel);
        kernels_.row.swiglu(gate + at, up + at, rows.m, n, out + panel * kPanel, stride, out_rows);
      }
    }
  });
  scope.add_bytes(groups_.size() * 2 * w.expert_gate_proj.expert(0).bytes() + 2 * w.shared_gate_proj.bytes());
}

void CpuBackend::experts_down(int layer) {
  Profile::Scope scope(profile_, Stage::kExpertsDown);
  const MoeWeights& w = weights_.layers[layer].moe;
  // The routed rows in the order of their experts: each expert's rows lie side by side.
  routed_inputs_.prepare(routed_hidden_.data(), shape_.expert_width, entry_ids_.data(), rows_ * kExpertsPerToken,
                         shape_.expert_width, linear_.codings({&w.expert_down_proj}), kernels_.row, threads_);
  shared_inputs_.prepare(shared_hidden_.data(), shape_.shared_expert_width, nullptr, rows_, shape_.shared_expert_width,
                         linear_.codings({&w.shared_down_proj}), kernels_.row, threads_);
  if (rows_ <= kFewRows)
    experts_down_few(w);
  else
    experts_down_many(w);
  scope.add_bytes(groups_.size() * w.expert_down_proj.expert(0).bytes() + w.shared_down_proj.bytes());
}

// Few rows: a thread reads long runs of one expert's weights; the products are added up afterwards.
void CpuBackend::experts_down_few(const MoeWeights& w) {
  const auto hidden = static_cast<size_t>(shape_.hidden);
  const auto pieces = static_cast<size_t>(pieces_of(w.expert_down_proj));
  const int entries = rows_ * kExpertsPerToken;
  const size_t count = (groups_.size() + 1) * pieces;  // the shared expert last
  const auto matrix = [&](size_t index) {
    const size_t g = index / pieces;
    return g < groups_.size() ? w.expert_down_proj.expert(groups_[g].expert) : w.shared_down_proj;
  };
  const auto range = [&](size_t index, const WeightMatrix& down) {
    const int begin = static_cast<int>(index % pieces) * kPanelsPerPiece;
    return PanelRange{&down, begin, std::min(begin + kPanelsPerPiece, panel_count(down))};
  };
  threads_.for_each(count, [&](size_t index, size_t next_index, int thread) {
    const WeightMatrix down = matrix(index);
    WeightMatrix following;
    PanelRange after;
    if (next_index < count) {
      following = matrix(next_index);
      after = range(next_index, following);
    }
    const size_t g = index / pieces;
    const bool routed = g < groups_.size();
    const RowSet rows =
        routed ? RowSet{nullptr, groups_[g].begin, groups_[g].end - groups_[g].begin} : RowSet{nullptr, 0, rows_};
    float* out = down_products_.data() + static_cast<size_t>(routed ? groups_[g].begin : entries) * hidden;
    float* y = linear_.scratch(thread);
    const PanelRange at = range(index, down);
    linear_.panels(at, routed ? routed_inputs_ : shared_inputs_, rows, y, after);
    for (int panel = at.begin; panel < at.end; ++panel, y += rows.m * kPanel) {
      const int n = std::min(kPanel, down.n - panel * kPanel);
      kernels_.row.store(y, rows.m, n, out + panel * kPanel, hidden, nullptr);
    }
  });
  for (int i = 0; i < entries; ++i)
    kernels_.row.axpy(entry_weights_[i], down_products_.data() + i * hidden, shape_.hidden,
                      row(Slot::kResidual, entry_rows_[i]));
  for (int r = 0; r < rows_; ++r)
    kernels_.row.axpy(slot(Slot::kSharedGate)[r], down_products_.data() + (entries + r) * hidden, shape_.hidden,
                      row(Slot::kResidual, r));
}

// Many rows. One piece: some columns of the residual stream, for all experts in turn, so that no two threads add to
// one place.
void CpuBackend::experts_down_many(const MoeWeights& w) {
  const auto stride = static_cast<size_t>(shape_.hidden);
  // Wide pieces use an expert's rows for more panels; narrow ones keep many threads busy.
  const int all = panel_count(w.expert_down_proj);
  const int per_piece = std::clamp(all / (8 * threads_.threads()), kPanelsPerPiece, Linear::kScratchPanels);
  const auto count = static_cast<size_t>((all + per_piece - 1) / per_piece);
  const auto range = [&](size_t index, const WeightMatrix& down) {
    const int begin = static_cast<int>(index) * per_piece;
    return PanelRange{&down, begin, std::min(begin + per_piece, all)};
  };
  threads_.for_each(count, [&](size_t index, size_t next_index, int thread) {
    // The columns of one expert for some rows; `after` is read next.
    const auto add = [&](const WeightMatrix& down, const Activations& x, RowSet rows, const int32_t* out_rows,
                         float* out, const float* weights, PanelRange after) {
      float* y = linear_.scratch(thread);
      const PanelRange at = range(index, down);
      linear_.panels(at, x, rows, y, after);
      for (int panel = at.begin; panel < at.end; ++panel, y += rows.m * kPanel) {
        const int n = std::min(kPanel, down.n - panel * kPanel);
        kernels_.row.add(y, rows.m, n, weights, out + panel * kPanel, stride, out_rows);
      }
    };
    float* residual = slot(Slot::kResidual);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const ExpertGroup& group = groups_[g];
      const WeightMatrix down = w.expert_down_proj.expert(group.expert);
      const WeightMatrix following =
          g + 1 < groups_.size() ? w.expert_down_proj.expert(groups_[g + 1].expert) : w.shared_down_proj;
      for (int from = group.begin; from < group.end; from += kRowBlock)
        add(down, routed_inputs_, {nullptr, from, std::min(kRowBlock, group.end - from)}, entry_rows_.data() + from,
            residual, entry_weights_.data() + from, range(index, following));
    }
    const WeightMatrix first_expert = w.expert_down_proj.expert(groups_.front().expert);
    for (int from = 0; from < rows_; from += kRowBlock) {
      PanelRange after;
      if (from + kRowBlock >= rows_ && next_index < count) after = range(next_index, first_expert);
      add(w.shared_down_proj, shared_inputs_, {nullptr, from, std::min(kRowBlock, rows_ - from)}, nullptr,
          residual + static_cast<size_t>(from) * stride, slot(Slot::kSharedGate) + from, after);
    }
  });
}

}  // namespace calla::cpu
