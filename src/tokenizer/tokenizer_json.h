#pragma once
// tokenizer.json, read and checked: what the file says, in the form that the rest of the folder uses.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/shape.h"
#include "tokenizer/bpe.h"
#include "tokenizer/token_table.h"

namespace calla {

struct AddedToken {
  TokenId id = 0;
  std::string text;
  bool special = false;
};

struct TokenizerSpec {
  TokenTable model_tokens;                 // bytes by id; none where the model has no token
  std::array<TokenId, 256> byte_tokens{};  // the token of each single byte
  std::vector<BpeMerge> merges;            // by rank
  std::vector<AddedToken> added_tokens;    // ids and texts differ; one may also be a token of the model
  std::string split_pattern;
  bool nfc = false;
};

// Throws CheckpointError that begins with `name` and says which field is wrong, or which feature of the
// format is not supported and what is. A returned spec is consistent; nothing in it needs to be checked
// again.
TokenizerSpec parse_tokenizer_json(std::string_view json, const std::string& name);

}  // namespace calla
