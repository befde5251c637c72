#include "backend/cpu/bandwidth.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backend/cpu/memory.h"
#include "base/error.h"
#include "base/median.h"

namespace calla::cpu {
namespace {

// Sums 64-byte lines; eight independent sums, so that the compiler's vector loads do not wait for each other.
uint64_t read_all(std::span<const uint64_t> words) {
  std::array<uint64_t, 32> sums{};
  for (size_t i = 0; i + sums.size() <= words.size(); i += sums.size())
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += words[i + j];
  uint64_t sum = 0;
  for (uint64_t s : sums) sum += s;
  return sum;
}

}  // namespace

double probe_read_bandwidth(ThreadPool& pool) {
  constexpr size_t kBytes = size_t{512} << 20;
  std::optional<MappedMemory> memory;
  try {
    memory.emplace(kBytes, "memory for the bandwidth probe");
  } catch (const DeviceError&) {  // what else has been measured counts without it
    return 0;
  }
  std::memset(memory->data(), 1, kBytes);
  const auto* words = reinterpret_cast<const uint64_t*>(memory->data());
  const size_t part = kBytes / sizeof(uint64_t) / static_cast<size_t>(pool.threads());
  std::vector<double> rates;
  std::vector<uint64_t> sums(static_cast<size_t>(pool.threads()) * 8);
  for (int pass = 0; pass < 5; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
      const auto t = static_cast<size_t>(thread);
      sums[t * 8] += read_all(std::span(words + t * part, part));
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    rates.push_back(static_cast<double>(part) * sizeof(uint64_t) * pool.threads() / seconds);
  }
  return median(std::move(rates));
}

}  // namespace calla::cpu
