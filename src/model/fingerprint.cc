#include "model/fingerprint.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>

namespace calla {

std::string fingerprint(const Checkpoint& checkpoint) {
  constexpr size_t kBlock = size_t{64} << 10, kStride = size_t{16} << 20;
  uint64_t hash = 0;
  for (const std::span<const std::byte> file : checkpoint.mappings()) {
    const uint64_t size = file.size();
    hash = XXH3_64bits_withSeed(&size, sizeof(size), hash);
    for (size_t begin = 0; begin < file.size(); begin += kStride)
      hash = XXH3_64bits_withSeed(file.data() + begin, std::min(kBlock, file.size() - begin), hash);
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace calla
