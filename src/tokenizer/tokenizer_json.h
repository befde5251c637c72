#pragma once
// tokenizer.json, and the one field that Calla needs of tokenizer_config.json, read and checked: what the files say, in
// the form that the rest of the folder uses.
#include <array>
#include <cstdint>
#include <optional>
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

// eos_token of tokenizer_config.json; nothing if it is absent or null. Throws CheckpointError in the same way.
std::optional<std::string> parse_eos_token(std::string_view json, const std::string& name);

// A text of a file for a message: quoted, escaped, cut if long.
std::string shown(const std::string& text);

}  // namespace calla
