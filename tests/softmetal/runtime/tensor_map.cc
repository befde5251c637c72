// Lane layouts of cooperative tensors: M5's two, and a shuffled one.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <tuple>
#include <vector>

#include "findings.h"

namespace softmetal {
namespace {

using Place = TensorMap::Place;

// A 16 x 16 fragment: lane and slot 0..7 to (column, row). MSL leaves it open; M5's depends on relaxed_precision.
Place fragment_place(uint32_t lane, uint32_t i, bool relaxed) {
  if (relaxed) {
    const uint32_t q = lane >> 2;
    const uint32_t row = (q & 4u) | ((lane >> 1) & 3u);
    const uint32_t column = ((q & 2u) | (lane & 1u)) * 4;
    return {static_cast<int16_t>(column + i % 4), static_cast<int16_t>(row + 8 * (i / 4)), true};
  }
  const uint32_t column = (lane & 1u) * 2 + ((lane >> 3) & 1u) * 4;
  const uint32_t row = ((lane >> 1) & 3u) + ((lane >> 4) & 1u) * 4;
  return {static_cast<int16_t>(column + (i & 1u) + 8 * ((i & 3u) / 2)), static_cast<int16_t>(row + 8 * (i / 4)), true};
}

void fill_m5(TensorMap& map, int d0, int d1, bool relaxed) {
  const int across = d0 / 16, fragments = across * (d1 / 16);
  map.capacity = static_cast<uint32_t>(fragments) * 8;
  for (uint32_t lane = 0; lane < kSimdWidth; ++lane) {
    for (int f = 0; f < fragments; ++f) {
      for (uint32_t i = 0; i < 8; ++i) {
        Place p = fragment_place(lane, i, relaxed);
        p.i0 = static_cast<int16_t>(p.i0 + f % across * 16);
        p.i1 = static_cast<int16_t>(p.i1 + f / across * 16);
        // Relaxed: one fragment after the other. Strict: halves of the fragments of a pair alternate.
        uint32_t slot = static_cast<uint32_t>(f) * 8 + i;
        if (!relaxed && fragments % 2 == 0)
          slot = static_cast<uint32_t>(f / 2) * 16 + i / 4 * 8 + static_cast<uint32_t>(f % 2) * 4 + i % 4;
        map.place[lane][slot] = p;
      }
    }
  }
}

void fill_shuffled(TensorMap& map, int d0, int d1, uint64_t seed) {
  map.capacity = static_cast<uint32_t>(d0 * d1) / kSimdWidth + kSpareTensorSlots;
  std::vector<Place> places;
  for (int i1 = 0; i1 < d1; ++i1)
    for (int i0 = 0; i0 < d0; ++i0) places.push_back({static_cast<int16_t>(i0), static_cast<int16_t>(i1), true});
  places.resize(map.capacity * kSimdWidth, Place{0, 0, false});
  std::mt19937_64 random(seed);
  std::shuffle(places.begin(), places.end(), random);
  for (uint32_t lane = 0; lane < kSimdWidth; ++lane)
    for (uint32_t i = 0; i < map.capacity; ++i) map.place[lane][i] = places[lane * map.capacity + i];
}

}  // namespace

const TensorMap* tensor_map(int d0, int d1, bool relaxed, TensorRole role) {
  // Asked for every element: the common case takes no lock. Options change between command buffers only.
  struct Recent {
    int d0 = 0, d1 = 0;
    bool relaxed = false;
    TensorRole role = TensorRole::kLeft;
    uint64_t version = 0;
    const TensorMap* map = nullptr;
  };
  static thread_local Recent recent[8];
  const uint64_t version = options_version();
  Recent& slot =
      recent[(static_cast<unsigned>(d0 / 16) + 2u * static_cast<unsigned>(d1 / 16) + 3u * static_cast<unsigned>(role)) %
             8];
  if (slot.map && slot.d0 == d0 && slot.d1 == d1 && slot.relaxed == relaxed && slot.role == role &&
      slot.version == version)
    return slot.map;

  const Options o = options();
  const bool shuffled = o.tensor_layout == TensorLayout::kShuffled;
  static std::mutex mutex;
  static auto& maps =
      *new std::map<std::tuple<int, int, bool, TensorRole, uint64_t, TensorFault>, std::unique_ptr<TensorMap>>;
  std::lock_guard lock(mutex);
  auto& map = maps[{d0, d1, relaxed, role, shuffled ? o.seed : 0, o.tensor_fault}];
  if (!map) {
    map = std::make_unique<TensorMap>();
    map->fault = o.tensor_fault;
    if (shuffled) {
      fill_shuffled(*map, d0, d1, o.seed ^ (static_cast<uint64_t>(role) << 32) ^ static_cast<uint64_t>(d0 * 64 + d1));
    } else {
      fill_m5(*map, d0, d1, relaxed);
    }
  }
  slot = {d0, d1, relaxed, role, version, map.get()};
  return map.get();
}

}  // namespace softmetal
