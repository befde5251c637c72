#pragma once
// What the Metal kernels and their host code share: launch parameters, records in step buffers, sizes and tile
// constants. Included by both compilers, so only int, uint32_t and float members, all 4-byte aligned.
//
// Binding rule: a kernel's launch parameters are buffer(0); its buffers follow as 1, 2, 3, ... in the order in which
// the host lists them (encoder.h).
// Launch rule: a kernel states the threads that it is launched with (max_total_threads_per_threadgroup). Otherwise the
// compiler may give a thread so many registers that a pipeline takes fewer, and the launch is refused on the user's Mac.
#ifdef __METAL_VERSION__
#include <metal_stdlib>
#define CALLA_CONSTANT constant constexpr
#else
#include <cstdint>
#define CALLA_CONSTANT inline constexpr
#endif

namespace calla {
namespace mtl {

CALLA_CONSTANT int kLanes = 32;               // threads of a simdgroup
CALLA_CONSTANT int kHeadSize = 256;           // attention head_dim
CALLA_CONSTANT int kRotaryPairs = 32;         // rotary dims / 2
CALLA_CONSTANT int kStateSize = 128;          // GDN: key rows and value columns of a state
CALLA_CONSTANT int kTopExperts = 8;           // routed experts a token
CALLA_CONSTANT int kPairs = kTopExperts + 1;  // routed experts and the shared one
CALLA_CONSTANT int kPageRows = 64;            // KV rows a page
CALLA_CONSTANT int kTaps = 4;                 // causal convolution
CALLA_CONSTANT int kMaxExperts = 1024;        // router_topk keeps a register a lane for every 32 experts

// Row-parallel GEMV: two simdgroups a threadgroup, each with these many output rows.
CALLA_CONSTANT int kQmvSimdgroups = 2;
CALLA_CONSTANT int kQmvRows = 4;
CALLA_CONSTANT int kQmvGroupRows = kQmvSimdgroups * kQmvRows;
CALLA_CONSTANT int kQmvThreads = kQmvSimdgroups * kLanes;
CALLA_CONSTANT int kNormedRows = 8;  // rmsnorm_qmv
CALLA_CONSTANT int kNormedGroupRows = kQmvSimdgroups * kNormedRows;

// GEMM tile: rows 16 or 32 (two simdgroups for each 16 rows), 64 outputs, 64 inputs a step: one quantisation group.
CALLA_CONSTANT int kTileN = 64;
CALLA_CONSTANT int kTileK = 64;
CALLA_CONSTANT int kTilePitch = kTileK + 8;  // bf16; 16 bytes of padding spread the rows over the banks
CALLA_CONSTANT int kTileThreads = 128;       // of a 32-row tile; a 16-row tile has half

// Kernels that give each head, row part or element to a simdgroup or thread of its own.
CALLA_CONSTANT int kGroupHeads = 4;  // heads a threadgroup, a simdgroup each
CALLA_CONSTANT int kHeadThreads = kGroupHeads * kLanes;
CALLA_CONSTANT int kNormThreads = 128;     // rmsnorm: all for one row
CALLA_CONSTANT int kElementThreads = 256;  // an element, word or logit at a time
CALLA_CONSTANT int kGroupThreads = 1024;   // moe_group_rows

CALLA_CONSTANT int kGdnStepSimdgroups = 16;  // gdn_step: each simdgroup has 8 of the 128 columns
CALLA_CONSTANT int kGdnStepThreads = kGdnStepSimdgroups * kLanes;
CALLA_CONSTANT int kScanColumns = 4;  // gdn_scan: simdgroups, hence columns, a threadgroup
CALLA_CONSTANT int kScanThreads = kScanColumns * kLanes;

// Decode attention: simdgroups a threadgroup; keys of a fixed block; where a context is cut in blocks of that size.
CALLA_CONSTANT int kSdpaSimdgroups = 8;
CALLA_CONSTANT int kSdpaThreads = kSdpaSimdgroups * kLanes;
CALLA_CONSTANT int kMergeParts = 4;  // sdpa_merge: threads an element
CALLA_CONSTANT int kMergeThreads = kMergeParts * kHeadSize;
CALLA_CONSTANT int kFixedBlockKeys = 512;
CALLA_CONSTANT int kFixedBlockFrom = 32768;
CALLA_CONSTANT int kPackedHeads = 4;  // query heads that share each KV row load

// Prefill attention: query rows (four simdgroups of 8) and keys of a tile. 16 keys never straddle a page.
CALLA_CONSTANT int kAttnTileRows = 32;
CALLA_CONSTANT int kAttnTileKeys = 16;
CALLA_CONSTANT int kAttnThreads = kAttnTileRows / 8 * kLanes;

CALLA_CONSTANT int kLastTokenStride = 4;    // a slot's last picked token has a 16-byte word for itself
CALLA_CONSTANT int kPickThreads = 1024;     // pick_token
CALLA_CONSTANT int kPickSlice = 2048;       // logits that a threadgroup of pick_max or pick_weights looks at
CALLA_CONSTANT int kPickCandidates = 1024;  // sorted on chip by pick_token

// --- records in the step buffer ---------------------------------------------------------------------------------

struct RowInfo {
  int token;     // or -1: the last token that `slot` picked
  int slot;      // recurrent slot
  int position;  // in its sequence
  int pages;     // index of its sequence's first entry in the page table
};

struct SequenceInfo {
  int first_row;
  int rows;
  int slot;
};

// A run of rows of one sequence that one threadgroup of the prefill attention takes.
struct AttentionTile {
  int first_row;
  int rows;
};

struct HeadInfo {
  int row;
  int slot;
  int pick;  // 0: logits only
  int top_k;
  float temperature;
  float top_p;
  float min_p;
  float presence_penalty;
  float frequency_penalty;
  float repetition_penalty;
  int has_penalties;
  int mask;  // index of the head's first word in the mask buffer, or -1
  uint32_t seed_low;
  uint32_t seed_high;
  int position;  // of the token to be picked
};

// One tile of the grouped expert GEMM: rows [first, first + count) of the sorted list belong to `expert`.
struct ExpertBlock {
  int expert;  // == experts: the shared expert
  int first;
  int count;
};

// A slice's largest logit; -1 where none is allowed, -2 where one is NaN.
struct SliceMax {
  float value;
  int token;
};

// --- launch parameters ------------------------------------------------------------------------------------------

struct MatrixShape {
  int n;            // outputs
  int k;            // inputs
  int group_shift;  // log2 of the quantisation group
};

struct EmbedParams {
  MatrixShape matrix;
};

struct RmsnormQmvParams {
  MatrixShape matrix[4];  // n == 0: not there
  int float_out[4];       // fp32 output instead of bf16
  int hidden;
  float eps;
};

struct QmvParams {
  MatrixShape matrix;
  int in_stride;
  int out_stride;
};

struct RmsnormParams {
  int hidden;
  float eps;
};

struct TopkParams {
  int experts;
};

struct ExpertsParams {
  MatrixShape expert;  // of one expert
  MatrixShape shared;
  int in_stride;  // elements a row of the input
  int out_stride;
  int experts;
  int pair_stride;  // experts_qmv: elements between the inputs of a row's experts (0: all read the same)
};

struct GdnParams {
  int key_heads;
  int value_heads;
  int conv_width;
  int mixed_stride;
  int layer;  // among the GDN layers
  int layers;
  int first_row;  // gdn_scan: rows [first_row, first_row + rows) of each sequence
  int rows;
  float eps;
};

struct AttentionParams {
  int q_heads;
  int kv_heads;
  int layer;  // among the attention layers
  int layers;
  int mixed_stride;
  int splits;      // general layout: key ranges; fixed layout: blocks
  int parts;       // prepare_qkv: bit 0 q, bit 1 k, bit 2 v
  int first_tile;  // sdpa_tile: of this dispatch
  int first_row;   // sdpa_decode, sdpa_merge: of this dispatch
  float eps;
};

struct QmmParams {
  MatrixShape matrix;
  int rows;
  int in_stride;
  int out_stride;
};

struct GroupParams {
  int rows;
  int experts;
  int tile_rows;
  int up_tiles;  // tiles of outputs in experts_up
  int down_tiles;
};

struct CombineParams {
  int hidden;
};

struct SwigluParams {
  int expert_width;
  int shared_width;
};

struct PickParams {
  int vocab;
  int slices;
  int count_stride;   // token counts of a slot: vocab, rounded up to whole 16-byte words
  int weight_stride;  // weights of a head: likewise
};

struct CopyParams {
  uint32_t words;   // of a piece; a word has 16 bytes
  uint32_t stride;  // words from one piece to the next
};

struct SumParams {
  uint32_t words;
};

struct ProbeParams {
  int places;  // of the first operation; those of the second follow
};

struct FillParams {
  uint32_t words;
  uint32_t value;
};

struct DequantiseParams {
  MatrixShape matrix;
  int stack;
};

}  // namespace mtl
}  // namespace calla
