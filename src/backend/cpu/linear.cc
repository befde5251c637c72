#include "backend/cpu/linear.h"

#include <algorithm>
#include <array>

#include "base/check.h"

namespace calla::cpu {
namespace {

constexpr size_t kMaxProducts = 8;

}  // namespace

Linear::Linear(const Kernels& kernels, ThreadPool& pool, bool full_precision)
    : kernels_(kernels),
      pool_(pool),
      full_precision_(full_precision),
      scratch_(static_cast<size_t>(pool.threads()) * kScratchPanels * kRowBlock * kPanel, "matrix scratch") {}

Codings Linear::codings(std::initializer_list<const WeightMatrix*> matrices) const {
  Codings all;
  for (const WeightMatrix* matrix : matrices) all.add(coding(*matrix));
  return all;
}

PanelKernel Linear::kernel(const WeightMatrix& matrix) const {
  const MatmulKernels& k = kernels_.matmul;
  if (matrix.format == WeightFormat::kBf16) return k.float_bf16;
  if (full_precision_) return matrix.bits == 4 ? k.float4 : k.float8;
  if (matrix.bits == 4) return matrix.group == 32 ? k.int4_g32 : k.int4_g64;
  return matrix.group == 32 ? k.int8_g32 : k.int8_g64;
}

void Linear::panels(PanelRange range, const Activations& x, RowSet rows, float* out, PanelRange next) const {
  const WeightMatrix& matrix = *range.matrix;
  const auto place = [](const WeightMatrix& w, int panel, const std::byte*& codes, const bf16*& scales,
                        const bf16*& biases) {
    const auto row = static_cast<size_t>(panel) * kPanel;
    if (w.format == WeightFormat::kBf16) {
      codes = reinterpret_cast<const std::byte*>(w.values + row * w.k);
    } else {
      codes = reinterpret_cast<const std::byte*>(w.codes + row * w.words_per_row());
      scales = w.scales + row * w.groups_per_row();
      biases = w.biases + row * w.groups_per_row();
    }
  };
  PanelArgs args;
  args.k = matrix.k;
  if (matrix.format == WeightFormat::kBf16) {
    args.row_bytes = static_cast<size_t>(matrix.k) * sizeof(bf16);
  } else {
    args.row_bytes = matrix.words_per_row() * sizeof(uint32_t);
    args.groups = static_cast<int>(matrix.groups_per_row());
    args.group = matrix.group;
  }
  x.describe(coding(matrix), rows.first, args);
  if (rows.ids != nullptr) {
    check(!x.ordered(), "rows by number of activations that have their own order");
    args.rows = rows.ids;
  }
  args.m = rows.m;
  args.out = out;
  const PanelKernel multiply_panel = kernel(matrix);
  place(matrix, range.begin, args.codes, args.scales, args.biases);
  for (int panel = range.begin; panel < range.end; ++panel) {
    args.valid = std::min(kPanel, matrix.n - panel * kPanel);
    if (panel + 1 < range.end) {
      place(matrix, panel + 1, args.next_codes, args.next_scales, args.next_biases);
    } else {
      args.next_codes = nullptr;
      args.next_scales = args.next_biases = nullptr;
      if (next.matrix != nullptr && next.matrix->k == matrix.k && next.matrix->format == matrix.format)
        place(*next.matrix, next.begin, args.next_codes, args.next_scales, args.next_biases);
    }
    multiply_panel(args);
    args.codes = args.next_codes;
    args.scales = args.next_scales;
    args.biases = args.next_biases;
    args.out += static_cast<size_t>(rows.m) * kPanel;
  }
}

void Linear::multiply(std::span<const Product> products, const Activations& x, int m) const {
  check(products.size() <= kMaxProducts, "at most 8 products at once");
  // Few rows: small pieces, and enough of them for all threads. Many rows: the planes of a row block are used by
  // several panels.
  int all = 0;
  for (const Product& product : products) all += panel_count(product.matrix);
  const int per_piece = m <= 8 ? std::clamp(all / (16 * pool_.threads()), 1, 4) : kScratchPanels;
  std::array<size_t, kMaxProducts + 1> first{};  // piece at which each product starts
  for (size_t i = 0; i < products.size(); ++i) {
    const int pieces = (panel_count(products[i].matrix) + per_piece - 1) / per_piece;
    first[i + 1] = first[i] + static_cast<size_t>(pieces);
  }
  const size_t count = first[products.size()];
  struct Place {
    const Product* product;
    PanelRange range;
  };
  const auto place = [&](size_t piece) {
    size_t i = 0;
    while (piece >= first[i + 1]) ++i;
    const WeightMatrix& matrix = products[i].matrix;
    const int begin = static_cast<int>(piece - first[i]) * per_piece;
    return Place{&products[i], {&matrix, begin, std::min(begin + per_piece, panel_count(matrix))}};
  };
  pool_.for_each(count, [&](size_t piece, size_t next_piece, int thread) {
    const auto [product, range] = place(piece);
    const PanelRange after = next_piece < count ? place(next_piece).range : PanelRange{};
    float* y = scratch(thread);
    for (int from = 0; from < m; from += kRowBlock) {
      const int rows = std::min(kRowBlock, m - from);
      panels(range, x, {nullptr, from, rows}, y, from + rows == m ? after : range);
      for (int p = range.begin; p < range.end; ++p) {
        const float* from_panel = y + static_cast<size_t>(p - range.begin) * rows * kPanel;
        const int n = std::min(kPanel, product->matrix.n - p * kPanel);
        float* out = product->out + static_cast<size_t>(from) * product->stride + p * kPanel;
        if (product->add)
          kernels_.row.add(from_panel, rows, n, nullptr, out, product->stride, nullptr);
        else
          kernels_.row.store(from_panel, rows, n, out, product->stride, nullptr);
      }
    }
  });
}

}  // namespace calla::cpu
