// cpu_kernels: the panel kernels alone, on one thread, with weights in the cache: cycles that memory cannot hide.
//   MAC/s counts weights times rows once (both planes of the activations together).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <vector>

#include "backend/cpu/activations.h"
#include "backend/cpu/linear.h"
#include "selftest/random_model.h"

namespace calla::cpu {
namespace {

void measure(const Kernels& kernels, const WeightMatrix& matrix, const char* name, bool full_precision) {
  ThreadPool threads(1);
  const Linear linear(kernels, threads, full_precision);
  constexpr int kRows = kRowBlock;
  std::vector<float> x(static_cast<size_t>(kRows) * matrix.k);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 2654435761u % 1000) / 500 - 1;
  Activations activations(kRows, matrix.k);
  activations.prepare(x.data(), matrix.k, nullptr, kRows, matrix.k, linear.codings({&matrix}), kernels.row, threads);
  for (int m : {1, 2, 4, 8, 16, 32, 128}) {
    const int repeats = std::max(2, 512 / m);
    const int count = panel_count(matrix);
    const MappedArray<float> out(static_cast<size_t>(count) * m * kPanel, "outputs");
    double best = 1e9;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      linear.panels({&matrix, 0, count}, activations, {nullptr, 0, m}, out.data(), {&matrix, 0, count});
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::printf("%-14s k %5d  m %3d  %7.1f GB/s of weights  %7.1f GMAC/s\n", name, matrix.k, m,
                static_cast<double>(matrix.bytes()) / best / 1e9,
                static_cast<double>(matrix.n) * matrix.k * m / best / 1e9);
  }
}

void measure_all(bool allow_avx512) {
  const Kernels kernels = choose_kernels(allow_avx512);
  std::printf("%s\n", kernels.name.c_str());
  ModelShape shape = tiny_shape(1);
  shape.hidden = 2048;
  shape.vocab = 256;  // 16 panels: 288 KB at 4 bits
  shape.experts = 8;
  const RandomModel four(shape, 1), eight(shape, 2, 8);
  measure(kernels, four.weights().lm_head, "4 bits", false);
  measure(kernels, eight.weights().lm_head, "8 bits", false);
  measure(kernels, four.weights().lm_head, "4 bits, fp32", true);
  shape.hidden = 512;
  const RandomModel narrow(shape, 1);
  measure(kernels, narrow.weights().lm_head, "4 bits", false);
}

}  // namespace
}  // namespace calla::cpu

int main() {
  calla::cpu::measure_all(true);
  calla::cpu::measure_all(false);
}
