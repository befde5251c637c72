#pragma once
// A token as one kernel: runs of stages of one row, from layer to layer, without a launch between them (token_program.cu).
#include "backend/cuda/gdn.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/state_log.h"
#include "backend/cuda/step.h"
#include "backend/cuda/weights.h"

namespace calla::cuda {

// The one shape that the kernel is written for: the real model's.
namespace token {
inline constexpr int kBlocks = 128;  // all on the card at once, one a multiprocessor
inline constexpr int kHidden = 2048, kMixed = 4096, kKeyHeads = 16, kValueHeads = 32;
inline constexpr int kExperts = 256, kExpertWidth = 512;
inline constexpr int kUnits = kExpertsPerToken * kExpertWidth;  // hidden units of the chosen experts
inline constexpr int kBlocksPerKeyHead = kBlocks / kKeyHeads;
inline constexpr int kMostProjectTiles = 5;  // of a block, in an attention layer's projection
}  // namespace token

enum class TokenPhaseKind : int32_t {
  kGdn,      // RMSNorm, input projections and recurrence of a GDN layer
  kProject,  // RMSNorm and input projections of an attention layer
  kOut,      // output projection, added to the residual row
  kExperts,  // RMSNorm, router, experts, added to the residual row
};

struct TokenMatrix {
  const uint4* codes = nullptr;
  const uint2* scales = nullptr;
};

struct TokenPhase {
  TokenPhaseKind kind = TokenPhaseKind::kGdn;
  int32_t tiles = 0;            // kProject
  const float* norm = nullptr;  // of the RMSNorm in front
  TokenMatrix weights;          // the projection; kExperts: gate and up, interleaved
  // kExperts
  TokenMatrix down, shared_up, shared_down, router;
  // kGdn: as in GdnParams
  const float* conv = nullptr;
  const float* decay_rate = nullptr;
  const float* dt_bias = nullptr;
  const float* gdn_norm = nullptr;
  float* state = nullptr;
  StateLog* log = nullptr;
};

// What the blocks tell each other, through L2. A word carries its generation beside its contents, so a reader needs neither
// fence nor flag. Words of 128 bits are read and written as one.
struct alignas(16) WideWord {
  uint32_t part[4];
};
struct TokenWords {
  // Rows, in the order in which the readers' threads stage them (token_exchange.cuh).
  WideWord residual[token::kHidden / 4];  // four numbers
  WideWord mixed[token::kMixed / 8];      // eight numbers
  WideWord units[token::kUnits / 8];      // eight hidden units of the chosen experts
  // From here on: 32 bits of generation, 32 of contents.
  uint64_t
      squares[token::kBlocks];  // of a block's 32 numbers of `mixed` before the gated RMSNorm; negative: it is done
  uint64_t qk[token::kKeyHeads][2 * kGdnHeadDim];
  uint64_t gates[token::kKeyHeads][token::kBlocksPerKeyHead][4];  // parts of a of both value heads, of b of both
  uint64_t logits[token::kExperts];
  uint64_t shared_units[token::kExpertWidth / 2];  // two fp16
  uint32_t generation;                             // of the next launch's first words
};

inline constexpr int kMostTokenPhases = 16;

struct TokenProgram {
  TokenPhase phases[kMostTokenPhases];
  int32_t count = 0;
  int32_t z_column = 0, a_column = 0, b_column = 0;  // of a GDN layer's projections
  int32_t projected_width = 0;                       // of a GDN layer
  const StepSequence* sequence = nullptr;
  size_t slot_floats = 0;
  size_t log_parts = 0;
  bool keeps_logs = false;  // of the states; else the phases' logs and the sequences' places of them mean nothing
  float eps = 0;
  Activations a;
  TokenWords* words = nullptr;
};
static_assert(sizeof(TokenProgram) <= 4096, "kernel parameters");

// True if all blocks of the kernel run at once, without which it would not end.
bool token_program_runs(const DeviceInfo& device);
// True if the layer has the shape that the kernel is written for.
bool token_program_fits(const LayerOnDevice& layer);
// Runs the phases in order. Reads and leaves slots as the stages do, except those that only a later stage of the same
// program reads. A layer's states and their logs may be read before the kernels in front have ended: so a layer runs once in
// a step, and something that is no kernel (the copy of the step's parameters) lies between steps.
void run_token_program(const Launch& launch, const TokenProgram& program);

}  // namespace calla::cuda
