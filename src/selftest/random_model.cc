#include "selftest/random_model.h"

#include <cmath>

#include "backend/weights_outline.h"
#include "base/random_word.h"
#include "base/thread_pool.h"

namespace calla {
namespace {

// In [-1, 1).
float signed_uniform(uint64_t word) { return static_cast<float>(word >> 40) * 0x1.0p-23f - 1; }

}  // namespace

RandomModel::RandomModel(const ModelShape& shape, uint64_t seed, int bits, int group)
    : shape_(shape), weights_(outline_weights(shape, seed, bits, group)) {
  ThreadPool pool;
  uint64_t stream = random_word(seed, 0);
  for_each_matrix(weights_, [&](WeightMatrix& m) {
    const size_t rows = static_cast<size_t>(m.stack) * static_cast<size_t>(m.n);
    const size_t words = rows * m.words_per_row(), groups = rows * m.groups_per_row();
    auto& codes = codes_.emplace_back(std::make_unique_for_overwrite<uint32_t[]>(words));
    auto& numbers = numbers_.emplace_back(std::make_unique_for_overwrite<bf16[]>(2 * groups));
    const uint64_t code_key = ++stream, scale_key = ++stream;
    const auto largest = static_cast<float>((1 << m.bits) - 1);
    // Uniform codes have a standard deviation of largest / sqrt(12).
    const float step = std::sqrt(12.0f) / (largest * std::sqrt(static_cast<float>(m.k)));
    constexpr size_t kGrain = 1 << 16;
    pool.parallel_for(words, kGrain, [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i)
        codes[i] = static_cast<uint32_t>(random_word(code_key, i / 2) >> (i % 2 * 32));
    });
    pool.parallel_for(groups, kGrain, [&](size_t begin, size_t end, int) {
      for (size_t i = begin; i < end; ++i) {
        const uint64_t word = random_word(scale_key, 2 * i);
        const float scale = (word & 1 ? step : -step) * (1 + 0.4f * signed_uniform(word));
        numbers[i] = to_bf16(scale);
        numbers[groups + i] =
            to_bf16(-scale * largest / 2 * (1 + 0.05f * signed_uniform(random_word(scale_key, 2 * i + 1))));
      }
    });
    m.codes = codes.get();
    m.scales = numbers.get();
    m.biases = numbers.get() + groups;
  });
}

}  // namespace calla
