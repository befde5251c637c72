#include "model/forward.h"

namespace calla {

void forward_layer(Backend& backend, const ModelShape& shape, int layer) {
  if (shape.layer_kinds[layer] == LayerKind::kGatedDeltaNet) {
    backend.project_gdn(layer);
    backend.mix_gdn(layer);
  } else {
    backend.project_attention(layer);
    backend.prepare_attention(layer);
    backend.attend(layer);
  }
  backend.project_residual(layer);
  backend.route(layer);
  backend.group_rows(layer);
  backend.experts_up(layer);
  backend.experts_down(layer);
}

StepId forward(Backend& backend, const ModelShape& shape, const Batch& batch) {
  if (backend.begin(batch)) {
    backend.embed();
    for (int layer = 0; layer < shape.layers(); ++layer) forward_layer(backend, shape, layer);
    if (!batch.heads.empty()) {
      backend.head();
      bool pick = false;
      for (const HeadRow& head : batch.heads) pick |= head.pick;
      if (pick) backend.pick();
    }
  }
  return backend.submit();
}

}  // namespace calla
