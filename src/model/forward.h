#pragma once
// The model's forward pass: the one place that knows the order of the layers and of their stages.
#include "backend/backend.h"

namespace calla {

// Runs one step over `batch` and returns its id; results are read with backend.wait / logits / picked.
// Serves prefill (one sequence, many rows) and decode (many sequences, one row each) alike.
StepId forward(Backend& backend, const ModelShape& shape, const Batch& batch);

// The stages of one layer of a step, for whoever looks between layers.
void forward_layer(Backend& backend, const ModelShape& shape, int layer);

}  // namespace calla
