#pragma once
// Gives the checkpoint's tensors their places in ModelWeights.
#include <string>
#include <vector>

#include "backend/weights.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/config.h"
#include "model/shape.h"

namespace calla {

struct BoundWeights {
  ModelWeights weights;               // views into the checkpoint, which must outlive them
  std::vector<std::string> warnings;  // one line each: tensors that were ignored, large ones that had to be copied
  uint64_t copied_bytes = 0;          // of tensors that could not be used where they lie
};

// Binds every matrix and vector that `shape` asks for, each tensor at most once, with dtype and shape checked; throws
// CheckpointError with the list of all that is missing or does not fit. Vision and multi-token-prediction tensors are
// skipped; other tensors that the model has no place for give one warning line.
//
// Gammas of the zero-centred RMSNorms (input, post, final, q, k) come out ready to multiply. A converted checkpoint
// stores them so; the original stores gamma - 1. The layout of conv1d.weight tells which: [C, 4, 1] or [C, 1, 4]. When
// the gammas clearly say otherwise, the checkpoint is refused. linear_attn.norm is never shifted.
//
// Reads the small vectors only; a NaN or infinity in one of them is an error. Two kinds of tensors cannot be used where
// they lie and are copied into memory, which reads them: those at addresses unfit for their dtype
// (Checkpoint::align_tensors), and the stacked experts of an original checkpoint. Large copies are warned of.
BoundWeights bind_weights(Checkpoint& checkpoint, const ModelShape& shape, const QuantConfig& quant);

// Throws what bind_weights would, but copies nothing; the stacked experts of an original checkpoint stay unchecked.
void check_weights(const Checkpoint& checkpoint, const ModelShape& shape, const QuantConfig& quant);

}  // namespace calla
