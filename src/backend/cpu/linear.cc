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

void Linear::panel(PanelRef ref, const Activations& x, RowSet rows, float* out, PanelRef next) const {
  const WeightMatrix& matrix = *ref.matrix;
  const auto place = [](PanelRef at, const std::byte*& codes, const bf16*& scales, const bf16*& biases) {
    const WeightMatrix& w = *at.matrix;
    const auto row = static_cast<size_t>(at.panel) * kPanel;
    if (w.format == WeightFormat::kBf16) {
      codes = reinterpret_cast<const std::byte*>(w.values + row * w.k);
    } else {
      codes = reinterpret_cast<const std::byte*>(w.codes + row * w.words_per_row());
      scales = w.scales + row * w.groups_per_row();
      biases = w.biases + row * w.groups_per_row();
    }
  };
  PanelArgs args;
  place(ref, args.codes, args.scales, args.biases);
  if (next.matrix != nullptr && next.matrix->k == matrix.k && next.matrix->format == matrix.format)
    place(next, args.next_codes, args.next_scales, args.next_biases);
  args.k = matrix.k;
  args.valid = std::min(kPanel, matrix.n - ref.panel * kPanel);
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
  kernel(matrix)(args);
}

void Linear::multiply(std::span<const Product> products, const Activations& x, int m) const {
  check(products.size() <= kMaxProducts, "at most 8 products at once");
  // Few rows: small pieces, read once. Many rows: the planes of a row block are used by several panels.
  const int panels_per_piece = m <= 8 ? 4 : 8;
  std::array<size_t, kMaxProducts + 1> first{};  // piece at which each product starts
  for (size_t i = 0; i < products.size(); ++i) {
    const int pieces = (panels(products[i].matrix) + panels_per_piece - 1) / panels_per_piece;
    first[i + 1] = first[i] + static_cast<size_t>(pieces);
  }
  const size_t count = first[products.size()];
  struct Place {
    const Product* product;
    int begin, end;  // panels
  };
  const auto place = [&](size_t piece) {
    size_t i = 0;
    while (piece >= first[i + 1]) ++i;
    const int begin = static_cast<int>(piece - first[i]) * panels_per_piece;
    return Place{&products[i], begin, std::min(begin + panels_per_piece, panels(products[i].matrix))};
  };
  pool_.for_each(count, [&](size_t piece, size_t next_piece, int thread) {
    const Place at = place(piece);
    const Product& product = *at.product;
    PanelRef after;
    if (next_piece < count) {
      const Place next = place(next_piece);
      after = {&next.product->matrix, next.begin};
    }
    float* y = scratch(thread, 0);
    for (int from = 0; from < m; from += kRowBlock) {
      const int rows = std::min(kRowBlock, m - from);
      for (int p = at.begin; p < at.end; ++p) {
        const bool last_block = from + rows == m;
        const PanelRef next = p + 1 < at.end ? PanelRef{&product.matrix, p + 1}
                              : last_block   ? after
                                             : PanelRef{&product.matrix, at.begin};
        panel({&product.matrix, p}, x, {nullptr, from, rows}, y, next);
        const int n = std::min(kPanel, product.matrix.n - p * kPanel);
        float* out = product.out + static_cast<size_t>(from) * product.stride + p * kPanel;
        if (product.add)
          kernels_.row.add(y, rows, n, nullptr, out, product.stride, nullptr);
        else
          kernels_.row.store(y, rows, n, out, product.stride, nullptr);
      }
    }
  });
}

}  // namespace calla::cpu
