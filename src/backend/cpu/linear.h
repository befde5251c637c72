#pragma once
// Linear: matrices of the checkpoint times rows of activations, on all threads, panel by panel.
#include <span>
#include <vector>

#include "backend/cpu/activations.h"
#include "backend/cpu/kernels.h"
#include "backend/weights.h"
#include "base/thread_pool.h"

namespace calla::cpu {

// Rows that pass through a panel at once: their planes (512 KiB at K = 2048) stay in L2 while several panels
// use them.
inline constexpr int kRowBlock = 128;

// One matrix (or one expert of a stack) and where its product with all rows goes.
struct Product {
  WeightMatrix matrix;
  float* out = nullptr;  // [rows][stride]
  size_t stride = 0;
  bool add = false;  // out += instead of out =
};

// Panels (of 16 outputs) [begin, end) of a matrix.
struct PanelRange {
  const WeightMatrix* matrix = nullptr;  // null: none
  int begin = 0, end = 0;
};

// Rows ids[0 .. m) of the activations, or rows [first, first + m) if ids is null.
struct RowSet {
  const int32_t* ids = nullptr;
  int first = 0;
  int m = 0;
};

class Linear {
 public:
  Linear(const Kernels& kernels, ThreadPool& pool, bool full_precision);

  Coding coding(const WeightMatrix& matrix) const { return coding_for(matrix, full_precision_); }
  // The codings that `activations` must have for these matrices.
  Codings codings(std::initializer_list<const WeightMatrix*> matrices) const;

  // All products have the same inputs: rows [0, m) of x.
  void multiply(std::span<const Product> products, const Activations& x, int m) const;

  // out[p][i][0..16) = panel range.begin + p times row i of the set; the first panel of `next` is fetched ahead.
  void panels(PanelRange range, const Activations& x, RowSet rows, float* out, PanelRange next) const;

  // Scratch of one thread: kScratchPanels panels of kRowBlock rows.
  static constexpr int kScratchPanels = 8;
  float* scratch(int thread) const {
    return scratch_.data() + static_cast<size_t>(thread) * kScratchPanels * kRowBlock * kPanel;
  }

 private:
  PanelKernel kernel(const WeightMatrix& matrix) const;

  const Kernels& kernels_;
  ThreadPool& pool_;
  const bool full_precision_;
  MappedArray<float> scratch_;
};

inline int panel_count(const WeightMatrix& matrix) { return (matrix.n + kPanel - 1) / kPanel; }

}  // namespace calla::cpu
