#pragma once
// The sampling that a checkpoint recommends in generation_config.json.
#include "backend/sampling.h"
#include "checkpoint/config.h"

namespace calla {

// What the file does not say is neutral; do_sample false means greedy. The seed is left 0.
inline SamplingParams sampling_defaults(const GenerationDefaults& defaults) {
  SamplingParams params;
  const bool sample = defaults.do_sample.value_or(defaults.temperature.has_value());
  params.temperature = sample ? defaults.temperature.value_or(1.0f) : 0.0f;
  params.top_k = defaults.top_k.value_or(0);
  params.top_p = defaults.top_p.value_or(1.0f);
  params.min_p = defaults.min_p.value_or(0.0f);
  params.presence_penalty = defaults.presence_penalty.value_or(0.0f);
  params.repetition_penalty = defaults.repetition_penalty.value_or(1.0f);
  return params;
}

}  // namespace calla
