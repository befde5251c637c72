#pragma once
// ModelShape: every size of the model, read from config.json and checked there. A leaf header: all layers may read it.
// The checkpoint's own word for each size stands in the comment.
#include <cstdint>
#include <vector>

namespace calla {

// Tokens that a sequence may have, unless told otherwise and where the model allows as many.
inline constexpr int kDefaultContext = 32768;

using TokenId = int32_t;

// Sizes that kernels are specialised for at compile time; config.json is refused when it disagrees.
inline constexpr int kHeadDim = 256;        // head_dim of the full-attention layers
inline constexpr int kGdnHeadDim = 128;     // linear_key_head_dim and linear_value_head_dim
inline constexpr int kGqaFactor = 8;        // query heads per KV head
inline constexpr int kExpertsPerToken = 8;  // num_experts_per_tok
inline constexpr int kConvWidth = 4;        // linear_conv_kernel_dim
inline constexpr int kQuantGroup = 64;      // the quantisation group of the fast paths (32 and 128 work, slower)

enum class LayerKind : uint8_t { kGatedDeltaNet, kAttention };

struct ModelShape {
  int hidden = 0;                      // hidden_size
  std::vector<LayerKind> layer_kinds;  // layer_types ("linear_attention" / "full_attention")
  int vocab = 0;                       // vocab_size: rows of the embedding and of lm_head
  int q_heads = 0;                     // num_attention_heads
  int kv_heads = 0;                    // num_key_value_heads; q_heads == kGqaFactor * kv_heads
  int rotary_dim = 0;                  // head_dim * partial_rotary_factor
  float rope_theta = 0;                // rope_parameters.rope_theta
  int gdn_key_heads = 0;               // linear_num_key_heads
  int gdn_value_heads = 0;             // linear_num_value_heads; a multiple of gdn_key_heads
  int experts = 0;                     // num_experts
  int expert_width = 0;                // moe_intermediate_size
  int shared_expert_width = 0;         // shared_expert_intermediate_size
  float rms_eps = 1e-6f;               // rms_norm_eps
  int max_context = 0;                 // max_position_embeddings, in tokens

  int layers() const { return static_cast<int>(layer_kinds.size()); }
  int attention_layers() const {
    int n = 0;
    for (LayerKind kind : layer_kinds) n += kind == LayerKind::kAttention;
    return n;
  }
  int gdn_layers() const { return layers() - attention_layers(); }
  int gdn_key_width() const { return gdn_key_heads * kGdnHeadDim; }               // all key heads side by side
  int gdn_value_width() const { return gdn_value_heads * kGdnHeadDim; }           // all value heads side by side
  int gdn_conv_width() const { return 2 * gdn_key_width() + gdn_value_width(); }  // channels of q, k and v
  int q_width() const { return q_heads * kHeadDim; }
  int kv_width() const { return kv_heads * kHeadDim; }
  int mixer_width() const {  // widest mixer output: the K of gdn.out_proj and attention.o_proj
    return gdn_value_width() > q_width() ? gdn_value_width() : q_width();
  }
};

}  // namespace calla
