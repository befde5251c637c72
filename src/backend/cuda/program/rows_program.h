#pragma once
// A step of two to eight sequences as one kernel between attentions (rows_program.cu): the token program's sister, of the
// same phases.
#include "backend/cuda/program/token_program.h"

namespace calla::cuda {

namespace rows {
inline constexpr int kMost = 8;  // rows: the columns of the tensor cores' product
inline constexpr int kChoices = kExpertsPerToken + 1;
}  // namespace rows

// What the blocks tell each other, through L2. The lowest bit of a word's last part is a tag, which every new contents of
// the word turns over: so a reader needs neither fence nor flag. Words that are not of 32 bits are read and written as one.
struct RowsWords {
  WideWord residual[rows::kMost][token::kHidden / 8];  // eight fp16: the row times the next norm's weights / kRowScale
  WideWord mixed[rows::kMost][token::kMixed / 8];      // eight fp16
  WideWord qk[token::kKeyHeads][rows::kMost][2 * kGdnHeadDim / 4];  // four fp32
  // Sums over one group of inputs: of outputs 2 r and 2 r + 1 of a tile of a and b, rows 2 q and 2 q + 1.
  WideWord gates[4][kTileRows / 2][4][token::kHidden / kGroup];            // [tile][r][q][group]
  WideWord logits[token::kExperts][2];                                     // of four rows
  WideWord hidden[rows::kMost * rows::kChoices][token::kExpertWidth / 8];  // eight fp16
  // 32 bits, a row's from each block.
  uint32_t squares[rows::kMost][token::kBlocks];        // of its part of the residual row
  uint32_t mixed_squares[rows::kMost][token::kBlocks];  // of 32 of `mixed` before the gated RMSNorm
  uint32_t tags;                                        // of the words as they are: a bit each kind (RowsTags)
  // Which of a phase's up tiles the next block takes (UpTiles), counted on from phase to phase; and where the next launch's
  // first phase starts to count.
  uint32_t next_tile, first_tile;
};

// True if all blocks of the kernel run at once, without which it would not end. (What fits the token program fits this one.)
bool rows_program_runs(const DeviceInfo& device);
// As run_token_program, for rows [first_row, first_row + rows) of the step, 2 <= rows <= rows::kMost. `words` serve programs
// of this many rows only, because their tags count on from launch to launch.
void run_rows_program(const Launch& launch, const TokenProgram& program, int first_row, int rows, RowsWords* words);

}  // namespace calla::cuda
