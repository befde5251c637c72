#pragma once
// The experts that up to 32 rows choose, as a list of work: each expert once for (up to) eight of the rows that chose it,
// so that its weights are read once for all of them. Every block makes the list for itself, in shared memory, from the
// router's logits: a kernel of its own would cost a launch in the chain.
#include "backend/cuda/experts_decode.h"
#include "backend/cuda/top_experts.cuh"

namespace calla::cuda {

// A product of one expert: its weights times rows `entries[first .. first + count)`.
struct ExpertItem {
  int16_t expert;  // kSharedExpert: the shared one
  int16_t first, count;
};
inline constexpr int kSharedExpert = -1;
inline constexpr int kItemColumns = 8;  // of the tensor cores' product

struct ExpertItems {
  static constexpr int kMaxPairs = kMaxExpertRows * (kExpertsPerToken + 1);
  static constexpr int kMaxItems = kMaxFusedExperts + kMaxExpertRows / kItemColumns;

  int32_t ids[kMaxExpertRows][kExpertsPerToken];
  float weights[kMaxExpertRows][kExpertsPerToken + 1];  // the shared expert's gate last
  uint32_t rows_of[kMaxFusedExperts];                   // bit r: row r chose the expert
  int16_t first_entry[kMaxFusedExperts];
  int count;  // of items
  ExpertItem items[kMaxItems];
  uint16_t entries[kMaxPairs];  // row | choice << 8; choice 8 is the shared expert

  // All threads of the block, a multiple of 32; ends with a barrier.
  template <int kThreads>
  __device__ void build(const Activations& a, int rows, int experts, int router_width, int shared_column, bool choose) {
    static_assert(kMaxFusedExperts == 8 * 32 && kMaxExpertRows == 32);
    const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32;
    for (int e = tid; e < kMaxFusedExperts; e += kThreads) rows_of[e] = 0;
    __syncthreads();
    for (int row = warp; row < rows; row += kThreads / 32) {
      const float* logits = a.router_logits + static_cast<size_t>(row) * router_width;
      ChosenExpert mine{0, 0};
      if (choose) {
        mine = choose_experts(logits, experts);
      } else if (lane < kExpertsPerToken) {
        mine = {__ldcg(a.expert_ids + row * kExpertsPerToken + lane),
                __ldcg(a.expert_weights + row * kExpertsPerToken + lane)};
      }
      if (lane < kExpertsPerToken) {
        ids[row][lane] = mine.id;
        weights[row][lane] = mine.weight;
        atomicOr(&rows_of[mine.id], 1u << row);
      }
      if (lane == kExpertsPerToken)
        weights[row][lane] = choose ? sigmoid(__ldcg(logits + shared_column)) : __ldcg(a.shared_gate + row);
    }
    __syncthreads();
    if (warp == 0) list(rows);
    __syncthreads();
    for (int pair = tid; pair < rows * (kExpertsPerToken + 1); pair += kThreads) {
      const int row = pair / (kExpertsPerToken + 1), choice = pair % (kExpertsPerToken + 1);
      int at = row;
      if (choice < kExpertsPerToken) {
        const int id = ids[row][choice];
        at = first_entry[id] + __popc(rows_of[id] & ((1u << row) - 1));
      }
      entries[at] = static_cast<uint16_t>(row | choice << 8);
    }
    __syncthreads();
  }

  // Leaves the choice for later readers; one block does, after build().
  __device__ void publish(const Activations& a, int rows) const {
    const int row = static_cast<int>(threadIdx.x) / kExpertsPerToken,
              i = static_cast<int>(threadIdx.x) % kExpertsPerToken;
    if (row >= rows) return;
    a.expert_ids[row * kExpertsPerToken + i] = ids[row][i];
    a.expert_weights[row * kExpertsPerToken + i] = weights[row][i];
    if (i == 0) a.shared_gate[row] = weights[row][kExpertsPerToken];
  }

 private:
  // One warp: items of the shared expert, then of the chosen ones by id; a lane takes eight experts.
  __device__ void list(int rows) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    int mine_items = 0, mine_entries = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = __popc(rows_of[lane * 8 + i]);
      mine_entries += n;
      mine_items += (n + kItemColumns - 1) / kItemColumns;
    }
    int item = mine_items, entry = mine_entries;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int a = __shfl_up_sync(0xffffffffu, item, static_cast<unsigned>(offset));
      const int b = __shfl_up_sync(0xffffffffu, entry, static_cast<unsigned>(offset));
      if (lane >= offset) item += a, entry += b;
    }
    const int shared_items = (rows + kItemColumns - 1) / kItemColumns;
    if (lane == 31) count = shared_items + item;
    item += shared_items - mine_items;
    entry += rows - mine_entries;
    if (lane < shared_items) items[lane] = make_item(kSharedExpert, lane * kItemColumns, rows - lane * kItemColumns);
    for (int i = 0; i < 8; ++i) {
      const int id = lane * 8 + i, n = __popc(rows_of[id]);
      first_entry[id] = static_cast<int16_t>(entry);
      for (int done = 0; done < n; done += kItemColumns) items[item++] = make_item(id, entry + done, n - done);
      entry += n;
    }
  }
  __device__ static ExpertItem make_item(int expert, int first, int left) {
    return {static_cast<int16_t>(expert), static_cast<int16_t>(first), static_cast<int16_t>(min(left, kItemColumns))};
  }
};

}  // namespace calla::cuda
