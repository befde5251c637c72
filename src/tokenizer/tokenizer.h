#pragma once
// Tokenizer: text to token ids and back, as a checkpoint's tokenizer.json says, equal to Hugging Face
// tokenizers id for id. The way of a text:
//   added_tokens.h   control tokens are cut out
//   nfc.h            the rest is normalised
//   pretokenizer.h   and split into words (qwen_words.h: Qwen's pattern, by hand)
//   bpe.h            whose bytes merge to tokens
// tokenizer_json.h reads and checks the file; text_stream.h turns generated tokens into text.
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/shape.h"

namespace calla {

// Whether the text of an added token stands for the token. User text must not forge control tokens.
enum class AddedTokens { kRecognise, kPlainText };

// A part of a prompt. Trusted: written by the chat template, so added tokens are recognised.
struct Piece {
  std::string_view text;
  bool trusted = false;
};

// Immutable once made; all members may be called from many threads at once.
class Tokenizer {
 public:
  // Reads tokenizer.json: `path` is the file or its directory. eos() comes from a tokenizer_config.json
  // beside it. Throws CheckpointError.
  static Tokenizer load(const std::filesystem::path& path);
  // The same from the files' contents, of which the second may be missing. `name` begins the error messages.
  static Tokenizer parse(std::string_view tokenizer_json, std::optional<std::string_view> config_json = {},
                         const std::string& name = "tokenizer.json");
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  // Throws RequestError that names the byte offset if the text is not valid UTF-8.
  std::vector<TokenId> encode(std::string_view text, AddedTokens mode) const;
  // The same for any bytes: each sequence that is not UTF-8 counts as U+FFFD.
  std::vector<TokenId> encode_lossy(std::string_view bytes, AddedTokens mode) const;
  // The ids of the pieces' texts joined to one, as if it were encoded whole: a piece's end is no token's end.
  // But an added token is recognised only where all its characters are trusted.
  std::vector<TokenId> encode_pieces(std::span<const Piece> pieces) const;

  // The text of the tokens; bytes that are not UTF-8 become U+FFFD. Ids without a token give nothing.
  std::string decode(std::span<const TokenId> tokens, bool skip_special) const;

  // One more than the highest id. (The model's own vocabulary may be larger: padding rows without a token.)
  int vocab_size() const;
  // The bytes that a token stands for, often not valid UTF-8 by themselves; empty for an id that has no
  // token. The view lives as long as the tokenizer.
  std::string_view token_bytes(TokenId id) const;
  // The token with exactly these bytes; an added token comes before one of the model.
  std::optional<TokenId> find(std::string_view bytes) const;
  bool is_added(TokenId id) const;    // control tokens and the like: <|im_end|>, <think>
  bool is_special(TokenId id) const;  // those of them that decode() can skip
  std::optional<TokenId> eos() const;

 private:
  struct Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);
  void encode_plain(std::string_view text, std::vector<TokenId>& out) const;
  void encode_trusted(std::string_view text, std::span<const std::pair<size_t, size_t>> trusted,
                      std::vector<TokenId>& out) const;

  std::unique_ptr<const Parts> parts_;
};

}  // namespace calla
