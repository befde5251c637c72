// pick_greedy: the largest logit of each head, ties to the lowest id.
//   Launch    grid (128, heads), block 256; blocks meet in an atomicMax, the last one writes the result.
//   Moves     4 vocab bytes a head. Latency-bound.
// pick_sampled: penalties, mask, temperature, top_k, min_p, top_p, draw.
//   Launch    a block of 1024 a head. No sort: candidates are ordered by weight (exp((l - max) / T)), so "the first k",
//             "the shortest prefix with mass p" and "the first whose running sum exceeds u" are each a descent through
//             the bits of a weight, with a histogram of counts and masses a level.
//   Numerics  masses are integers (weight x 2^44), so they do not depend on the order of the additions and the same seed
//             always picks the same token.
#include "backend/cuda/pick.h"
#include "backend/cuda/ptx.cuh"

namespace calla::cuda {
namespace {

constexpr int kGreedyBlocks = 128, kGreedyThreads = 256;
constexpr int kThreads = 1024;
constexpr double kMassUnit = 17592186044416.0;  // 2^44

// Value first, then the lowest id; a NaN beats everything.
__device__ __forceinline__ uint64_t logit_key(float v, int id) {
  const uint32_t value = isnan(v) ? 0xffffffffu : ordered_bits(v);
  return static_cast<uint64_t>(value) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ __forceinline__ bool key_is_nan(uint64_t key) { return static_cast<uint32_t>(key >> 32) == 0xffffffffu; }
__device__ __forceinline__ TokenId key_id(uint64_t key) {
  return static_cast<TokenId>(0xffffffffu - static_cast<uint32_t>(key));
}
__device__ __forceinline__ uint64_t max_key(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

__device__ void record(const PickParams& p, const StepHead& head, TokenId token) {
  p.results[head.result] = token;
  if (token < 0) return;
  p.last_picked[head.slot] = token;
  TokenCount& count = p.counts[static_cast<size_t>(head.slot) * p.vocab + token];
  if ((count & ~kInPrompt) != kInPrompt - 1) ++count;
}

__global__ void __launch_bounds__(kGreedyThreads) pick_greedy_kernel(PickParams p) {
  __shared__ uint64_t warp_best[kGreedyThreads / 32];
  launch_dependents();
  const StepHead& head = p.step.heads[blockIdx.y];
  grid_dependency_wait();
  if (!head.pick) return;
  const float* logits = p.logits + static_cast<size_t>(blockIdx.y) * p.vocab;
  uint64_t best = 0;
  for (int i = static_cast<int>(blockIdx.x * kGreedyThreads + threadIdx.x); i < p.vocab;
       i += kGreedyBlocks * kGreedyThreads) {
    const uint64_t key = logit_key(__ldcg(logits + i), i);
    best = key > best ? key : best;
  }
  best = max_key(best);
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const uint64_t key : warp_best) best = key > best ? key : best;
  atomicMax(reinterpret_cast<unsigned long long*>(p.best + blockIdx.y), best);
  __threadfence();
  if (atomicAdd(p.arrived + blockIdx.y, 1u) + 1 < gridDim.x) return;
  __threadfence();
  const uint64_t winner = atomicExch(reinterpret_cast<unsigned long long*>(p.best + blockIdx.y), 0);
  p.arrived[blockIdx.y] = 0;
  const bool none = key_is_nan(winner) || winner >> 32 == ordered_bits(-INFINITY);
  record(p, head, none ? -1 : key_id(winner));
}

struct Histogram {
  uint32_t count[256];
  unsigned long long mass[256];
};

// Where a descent ended: the tokens of exactly this weight hold the answer.
struct Crossing {
  uint32_t bits;         // of the weight
  uint32_t count_above;  // candidates of larger weight
  uint64_t mass_above;
  uint32_t ties;  // candidates of this weight
};

__device__ __forceinline__ uint64_t mass_of(float weight) { return static_cast<uint64_t>(weight * kMassUnit); }

// Goes down the candidates (weight bits >= `floor`, > 0) from the largest until `target` is reached, counted in tokens or
// in mass. The whole block calls it and gets the same answer.
template <bool kByMass>
__device__ Crossing descend(const float* weights, int vocab, uint32_t floor, uint64_t target, Histogram& histogram,
                            Crossing& result) {
  uint32_t prefix = 0;
  Crossing at{0, 0, 0, 0};
  for (int shift = 23; shift >= 0; shift -= shift == 7 ? 7 : 8) {
    const uint32_t bins = shift == 0 ? 128 : 256;
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += kThreads) histogram.count[i] = 0, histogram.mass[i] = 0;
    __syncthreads();
    const int above = shift == 0 ? 7 : shift + 8;
    for (int i = static_cast<int>(threadIdx.x); i < vocab; i += kThreads) {
      const float weight = weights[i];
      const uint32_t bits = __float_as_uint(weight);
      if (bits == 0 || bits < floor || (above < 31 && bits >> above != prefix)) continue;
      const uint32_t bin = (bits >> shift) & (bins - 1);
      atomicAdd(&histogram.count[bin], 1u);
      atomicAdd(&histogram.mass[bin], static_cast<unsigned long long>(mass_of(weight)));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int chosen = -1;
      for (int bin = static_cast<int>(bins) - 1; bin >= 0; --bin) {
        const uint32_t count = histogram.count[bin];
        if (count == 0) continue;
        chosen = bin;  // the last bin with anything, should rounding leave the target just out of reach
        const uint64_t reached = kByMass ? at.mass_above + histogram.mass[bin] : at.count_above + count;
        if (reached >= target) break;
        bool more = false;
        for (int lower = bin - 1; lower >= 0 && !more; --lower) more = histogram.count[lower] != 0;
        if (!more) break;
        at.count_above += count;
        at.mass_above += histogram.mass[bin];
      }
      at.bits = prefix << (shift == 0 ? 7 : 8) | static_cast<uint32_t>(chosen < 0 ? 0 : chosen);
      at.ties = chosen < 0 ? 0 : histogram.count[chosen];
      result = at;
    }
    __syncthreads();
    at = result;
    prefix = at.bits;
    __syncthreads();
  }
  return at;
}

// How many of the ties, in order of id, it takes to reach `target`.
__device__ __forceinline__ uint64_t ties_needed(const Crossing& at, uint64_t target) {
  const uint64_t each = mass_of(__uint_as_float(at.bits));
  if (target <= at.mass_above || each == 0) return 1;
  const uint64_t n = (target - at.mass_above + each - 1) / each;
  return n < at.ties ? n : at.ties;
}

__global__ void __launch_bounds__(kThreads) pick_sampled_kernel(PickParams p) {
  __shared__ Histogram histogram;
  __shared__ Crossing crossing;
  __shared__ uint64_t warp_best[kThreads / 32];
  __shared__ uint32_t warp_ties[kThreads / 32];
  __shared__ uint64_t total_mass;
  __shared__ uint32_t total_count;
  const StepHead& head = p.step.heads[blockIdx.x];
  grid_dependency_wait();
  launch_dependents();
  if (!head.pick) return;
  const SamplingParams& sampling = head.sampling;
  const float* logits = p.logits + static_cast<size_t>(blockIdx.x) * p.vocab;
  float* weights = p.weights + static_cast<size_t>(blockIdx.x) * p.vocab;
  const TokenCount* counts = p.counts + static_cast<size_t>(head.slot) * p.vocab;
  const uint32_t* mask = head.mask_offset < 0 ? nullptr : p.step.masks + head.mask_offset;
  const bool penalties =
      sampling.presence_penalty != 0 || sampling.frequency_penalty != 0 || sampling.repetition_penalty != 1;
  const int tid = static_cast<int>(threadIdx.x);

  uint64_t best = 0;
  for (int i = tid; i < p.vocab; i += kThreads) {
    float v = logits[i];
    if (penalties && counts[i] != 0) {
      const TokenCount count = counts[i];
      if (sampling.repetition_penalty != 1)
        v = v > 0 ? v / sampling.repetition_penalty : v * sampling.repetition_penalty;
      const int generated = count & ~kInPrompt;
      if (generated != 0) v -= sampling.frequency_penalty * static_cast<float>(generated) + sampling.presence_penalty;
    }
    if (mask != nullptr && !((mask[i / 32] >> (i % 32)) & 1u)) v = -INFINITY;
    weights[i] = v;
    const uint64_t key = logit_key(v, i);
    best = key > best ? key : best;
  }
  best = max_key(best);
  if (tid % 32 == 0) warp_best[tid / 32] = best;
  __syncthreads();
  for (const uint64_t key : warp_best) best = key > best ? key : best;
  const bool none = key_is_nan(best) || best >> 32 == ordered_bits(-INFINITY);
  const float largest = none ? 0.0f : weights[key_id(best)];
  if (none || sampling.temperature <= 0 || largest == INFINITY) {
    if (tid == 0) record(p, head, none ? -1 : key_id(best));
    return;
  }

  if (tid == 0) total_mass = 0, total_count = 0;
  __syncthreads();  // also: everyone has read weights[best]
  uint64_t mass = 0;
  uint32_t count = 0;
  for (int i = tid; i < p.vocab; i += kThreads) {
    float weight = expf((weights[i] - largest) / sampling.temperature);
    if (!(weight > 0) || weight < sampling.min_p) weight = 0;
    weights[i] = weight;
    mass += mass_of(weight);
    count += weight > 0;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&total_mass), mass);
  atomicAdd(&total_count, count);
  __syncthreads();
  mass = total_mass;
  count = total_count;

  uint32_t floor = 1;
  if (sampling.top_k > 0 && static_cast<uint32_t>(sampling.top_k) < count) {
    const auto k = static_cast<uint64_t>(sampling.top_k);
    const Crossing at = descend<false>(weights, p.vocab, floor, k, histogram, crossing);
    floor = at.bits;
    mass = at.mass_above + (k - at.count_above) * mass_of(__uint_as_float(at.bits));
  }
  if (sampling.top_p < 1) {
    const auto target = static_cast<uint64_t>(ceil(static_cast<double>(sampling.top_p) * static_cast<double>(mass)));
    const Crossing at = descend<true>(weights, p.vocab, floor, target, histogram, crossing);
    floor = at.bits;
    mass = at.mass_above + ties_needed(at, target) * mass_of(__uint_as_float(at.bits));
  }
  // The first running sum > u mass.
  const auto target = static_cast<uint64_t>(static_cast<double>(head.uniform) * static_cast<double>(mass)) + 1;
  const Crossing at = descend<true>(weights, p.vocab, floor, target, histogram, crossing);
  const auto wanted = static_cast<uint32_t>(ties_needed(at, target) - 1);  // index among the ties

  // The wanted tie in order of id: each warp owns a run of ids, counts its ties, and the owner of the answer finds it.
  const int run = (p.vocab + kThreads - 1) / kThreads * 32, lane = tid % 32, begin = tid / 32 * run;
  const int end = min(begin + run, p.vocab);
  uint32_t mine = 0;
  for (int i = begin; i < end; i += 32)
    mine += __popc(__ballot_sync(0xffffffffu, i + lane < end && __float_as_uint(weights[i + lane]) == at.bits));
  if (lane == 0) warp_ties[tid / 32] = mine;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < tid / 32; ++w) before += warp_ties[w];
  if (wanted < before || wanted >= before + mine) return;
  for (int i = begin; i < end; i += 32) {
    const uint32_t ties = __ballot_sync(0xffffffffu, i + lane < end && __float_as_uint(weights[i + lane]) == at.bits);
    const auto n = static_cast<uint32_t>(__popc(ties));
    if (wanted < before + n) {
      if ((ties >> lane & 1u) && static_cast<uint32_t>(__popc(ties & ((1u << lane) - 1))) == wanted - before)
        record(p, head, i + lane);
      return;
    }
    before += n;
  }
}

}  // namespace

void pick_greedy(const Launch& launch, const PickParams& p) {
  launch_kernel(launch, pick_greedy_kernel, dim3(kGreedyBlocks, static_cast<unsigned>(p.step.head_count)),
                kGreedyThreads, 0, 1, p);
}

void pick_sampled(const Launch& launch, const PickParams& p) {
  launch_kernel(launch, pick_sampled_kernel, dim3(static_cast<unsigned>(p.step.head_count)), kThreads, 0, 1, p);
}

}  // namespace calla::cuda
