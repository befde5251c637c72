// config.json and generation_config.json: any text is either refused with a CheckpointError, or the sizes keep what the
// kernels rely on.
#include <string_view>

#include "base/check.h"
#include "base/error.h"
#include "checkpoint/config.h"
#include "checkpoint/synthetic.h"
#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace calla;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    ModelConfig config = parse_config(text, "fuzz");
    const ModelShape& shape = config.shape;
    check(shape.hidden > 0 && shape.hidden % 64 == 0, "hidden size");
    check(shape.layers() > 0 && shape.vocab > 0 && shape.max_context > 0, "counts");
    check(shape.q_heads == kGqaFactor * shape.kv_heads && shape.kv_heads > 0, "attention heads");
    check(shape.gdn_key_heads > 0 && shape.gdn_value_heads % shape.gdn_key_heads == 0, "delta net heads");
    check(shape.rotary_dim >= 2 && shape.rotary_dim <= kHeadDim && shape.rotary_dim % 2 == 0, "rotary_dim");
    check(shape.experts >= kExpertsPerToken && shape.rms_eps > 0 && shape.rope_theta > 1, "experts, constants");
    for (const TokenId id : config.eos) check(id >= 0 && id < shape.vocab, "end token");
  } catch (const CheckpointError&) {
  }
  try {
    ModelConfig config;
    config.shape.vocab = 100;
    parse_generation_config(text, "fuzz", config);
    for (const TokenId id : config.eos) check(id >= 0 && id < 100, "end token");
    check(config.generation.top_p.value_or(1) > 0 && config.generation.top_p.value_or(1) <= 1, "top_p");
    check(config.generation.temperature.value_or(0) >= 0 && config.generation.top_k.value_or(0) >= 0,
          "temperature, top_k");
  } catch (const CheckpointError&) {
  }
  return 0;
}

std::vector<std::string> calla::fuzz_seeds() {
  SyntheticOptions options;
  options.shape = named_shape("calla-tiny", 2);
  return {synthetic_config(options), synthetic_generation_config(options),
          R"({"top_k":20,"top_p":0.95,"temperature":1,"min_p":0,"eos_token_id":[1,2],"presence_penalty":1.5})"};
}
