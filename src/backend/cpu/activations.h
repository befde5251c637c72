#pragma once
// Activations: rows of inputs in the forms that the matrix kernels take. The fp32 rows belong to someone
// else; the quantised copies are made by prepare() and kept until the next one.
#include <array>
#include <cstdint>

#include "backend/cpu/kernels.h"
#include "backend/cpu/memory.h"
#include "backend/weights.h"
#include "base/thread_pool.h"

namespace calla::cpu {

// The form of the rows that a matrix is multiplied with.
enum class Coding : uint8_t { kSplit64, kSplit32, kNatural64, kNatural32, kFloat };
inline constexpr int kQuantizedCodings = 4;

// `full_precision`: fp32 rows for every matrix. bf16 matrices always take fp32 rows.
Coding coding_for(const WeightMatrix& matrix, bool full_precision);

// A set of codings.
class Codings {
 public:
  void add(Coding coding) { bits_ |= 1u << static_cast<int>(coding); }
  bool has(Coding coding) const { return (bits_ >> static_cast<int>(coding)) & 1u; }

 private:
  unsigned bits_ = 0;
};

class Activations {
 public:
  // Room for `rows` rows of up to `k` inputs; untouched room costs nothing.
  Activations(int rows, int k);

  // Takes x [.][k] (rows `stride` floats apart) and makes the codings asked for. Row i of these activations is row
  // order[i] of x, or row i if order is null; `order` must live as long as they are used.
  void prepare(const float* x, size_t stride, const int32_t* order, int rows, int k, Codings codings,
               const RowKernels& kernels, ThreadPool& pool);

  // Fills in the activations' side of `args`: rows [first, ...) in order.
  void describe(Coding coding, int first, PanelArgs& args) const;
  bool ordered() const { return order_ != nullptr; }

 private:
  struct Quantized {
    MappedArray<int8_t> planes;
    MappedArray<ActivationScale> scales;
  };

  const float* x_ = nullptr;
  size_t x_stride_ = 0;
  const int32_t* order_ = nullptr;
  size_t plane_stride_ = 0;
  size_t scale_stride_ = 0;
  std::array<Quantized, kQuantizedCodings> quantized_;
};

}  // namespace calla::cpu
