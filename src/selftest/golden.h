#pragma once
// Golden files: outputs of an independent implementation (fp32, on the de-quantised weights), and how close a backend
// comes to them. A golden file is a safetensors file whose tensors are named CASE/WHAT:
//   CASE/input_ids [T]             the tokens of a case; with any of
//     logits [T, vocab], logits_last8 [8, vocab], argmax [T], next_logprob [T-1] (of token t+1 after tokens 0..t),
//     logprob_w512 (the text in windows of 512 tokens, each from an empty state, the first of each not scored),
//     gdnL/state, gdnL/conv_state, attnL/k_cache, attnL/v_cache (state of layer L after the last token)
//   CASE/prompt_ids, output_ids, logprob, margin     a greedy answer; margin = best minus second-best logit
//   greedyN/output_ids, logprob, margin              the same, continuing lenN/input_ids
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace calla {

struct GoldenTolerance {
  double logits = 0;         // RMS logit error relative to the RMS of the centred logits; 0: not judged
  double perplexity = 1e-3;  // |relative difference|
  double top1 = 0.99;        // share of positions with the same best token
  double state = 2e-2;       // ||difference|| / ||golden|| of recurrent state and caches
  double margin = 0.05;      // greedy: a token may differ where the golden margin is below this
};

// For the default path, and for full precision.
GoldenTolerance fast_tolerance();
GoldenTolerance full_precision_tolerance();
// For bf16 activations on random weights. They leave close ranks everywhere: experts and tokens that differ by less
// than bf16's last bit change places, and what follows is another sequence. Trained weights need fast_tolerance().
// metal_golden_test shows that the fp32 reference with its activations rounded to bf16 is as far off.
GoldenTolerance bf16_random_tolerance();

struct GoldenResult {
  std::string name;  // "len64"
  std::string kind;  // "logits", "perplexity", "greedy", "state", ...
  int positions = 0;
  double max_error = 0;  // of logits, or of log-probabilities
  double mean_error = 0;
  double relative = 0;         // RMS error relative to the RMS of the (centred) golden values
  std::optional<double> top1;  // where it applies
  double perplexity = 0;       // relative difference, where it applies
  bool ok = false;
  std::string note;
};

struct GoldenOptions {
  GoldenTolerance tolerance;
  int chunk = 64;                                    // rows of a prefill step
  int max_heads = 32;                                // rows whose logits are taken at once
  std::vector<std::string> cases;                    // names; empty: all
  int longest_prompt = 0;                            // leave out answers to longer prompts; 0: none is too long
  int prefix = 0;                                    // only so many tokens of each text and answer; 0: all of them
  std::function<void(const std::string&)> progress;  // gets the name of each case as it starts
};

// Runs the cases of a file. Throws CheckpointError for a malformed one, or for a case that it does not have.
std::vector<GoldenResult> run_golden(Backend& backend, const ModelShape& shape, const std::filesystem::path& file,
                                     const GoldenOptions& options);

}  // namespace calla
