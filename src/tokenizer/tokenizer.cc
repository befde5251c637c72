#include "tokenizer/tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <unordered_map>

#include "base/error.h"
#include "base/is_there.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/nfc.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer_json.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

constexpr uintmax_t kMaxFileBytes = uintmax_t{1} << 29;

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory)
    throw CheckpointError(path.string() +
                          ": missing; a model's directory must hold its tokenizer (a checkpoint made by "
                          "`calla make-checkpoint` has one only with --tokenizer-from DIR)");
  if (error) throw CheckpointError(path.string() + ": " + error.message());
  if (size > kMaxFileBytes)
    throw CheckpointError(path.string() + ": " + std::to_string(size) + " bytes, which no tokenizer file has");
  std::ifstream in(path, std::ios::binary);
  std::string content(static_cast<size_t>(size), '\0');
  if (!in.read(content.data(), static_cast<std::streamsize>(size)))
    throw CheckpointError(path.string() + ": cannot be read");
  return content;
}

std::vector<std::pair<std::string, TokenId>> texts_and_ids(const std::vector<AddedToken>& tokens) {
  std::vector<std::pair<std::string, TokenId>> out;
  for (const AddedToken& token : tokens) out.emplace_back(token.text, token.id);
  return out;
}

}  // namespace

struct Tokenizer::Parts {
  Parts(TokenizerSpec spec, const std::string& name)
      : nfc(spec.nfc),
        model_tokens(std::move(spec.model_tokens)),
        bpe(model_tokens, spec.byte_tokens, spec.merges),
        pretokenizer(spec.split_pattern, PreTokenizer::Engine::kAuto, name),
        added_finder(texts_and_ids(spec.added_tokens)) {
    TokenId highest = model_tokens.size() - 1;
    for (const AddedToken& token : spec.added_tokens) highest = std::max(highest, token.id);
    kinds.resize(static_cast<size_t>(highest) + 1, Kind::kModel);
    for (AddedToken& token : spec.added_tokens) {
      kinds[token.id] = token.special ? Kind::kSpecial : Kind::kAdded;
      added_texts.emplace(token.id, std::move(token.text));
    }
  }

  enum class Kind : uint8_t { kModel, kAdded, kSpecial };
  Kind kind(TokenId id) const { return id >= 0 && static_cast<size_t>(id) < kinds.size() ? kinds[id] : Kind::kModel; }

  bool nfc;
  TokenTable model_tokens;
  Bpe bpe;
  PreTokenizer pretokenizer;
  AddedTokenFinder added_finder;
  std::vector<Kind> kinds;  // by id
  std::unordered_map<TokenId, std::string> added_texts;
  std::optional<TokenId> eos;
};

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code error;  // a path that cannot be looked at fails when it is read
  const auto file = std::filesystem::is_directory(path, error) ? path / "tokenizer.json" : path;
  const auto config = file.parent_path() / "tokenizer_config.json";
  std::optional<std::string> config_json;
  if (is_there(config)) config_json = read_file(config);
  return parse(read_file(file), config_json, file.string());
}

Tokenizer Tokenizer::parse(std::string_view tokenizer_json, std::optional<std::string_view> config_json,
                           const std::string& name) {
  auto parts = std::make_unique<Parts>(parse_tokenizer_json(tokenizer_json, name), name);
  const std::string config_name = (std::filesystem::path(name).parent_path() / "tokenizer_config.json").string();
  const auto eos = config_json ? parse_eos_token(*config_json, config_name) : std::nullopt;
  Parts& made = *parts;
  Tokenizer tokenizer(std::move(parts));
  if (eos) {
    made.eos = tokenizer.find(*eos);
    if (!made.eos)
      throw CheckpointError(config_name + ": eos_token: expected a token of " + name + ", found " + shown(*eos) +
                            "; do the two files belong together?");
  }
  return tokenizer;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, AddedTokens mode) const {
  const Piece piece{text, mode == AddedTokens::kRecognise};
  return encode_pieces({&piece, 1});
}

std::vector<TokenId> Tokenizer::encode_lossy(std::string_view bytes, AddedTokens mode) const {
  if (utf8_error_offset(bytes) == bytes.size()) return encode(bytes, mode);
  return encode(repair_utf8(bytes), mode);
}

std::vector<TokenId> Tokenizer::encode_pieces(std::span<const Piece> pieces) const {
  std::string joined;
  std::string_view text;
  if (pieces.size() == 1) {
    text = pieces[0].text;
  } else {
    for (const Piece& piece : pieces) joined.append(piece.text);
    text = joined;
  }
  if (const size_t bad = utf8_error_offset(text); bad != text.size()) {
    char where[64];
    std::snprintf(where, sizeof(where), "byte 0x%02x at offset %zu", static_cast<unsigned char>(text[bad]), bad);
    throw RequestError(std::string("the text is not valid UTF-8: ") + where);
  }
  std::vector<std::pair<size_t, size_t>> trusted;  // neighbours joined
  size_t at = 0;
  for (const Piece& piece : pieces) {
    if (piece.trusted && !trusted.empty() && trusted.back().second == at) {
      trusted.back().second += piece.text.size();
    } else if (piece.trusted) {
      trusted.emplace_back(at, at + piece.text.size());
    }
    at += piece.text.size();
  }
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + 8);
  encode_trusted(text, trusted, ids);
  return ids;
}

void Tokenizer::encode_trusted(std::string_view text, std::span<const std::pair<size_t, size_t>> trusted,
                               std::vector<TokenId>& out) const {
  size_t done = 0;
  for (const auto& [begin, end] : trusted) {
    size_t at = begin;
    while (const auto hit = parts_->added_finder.find(text, at, end)) {
      encode_plain(text.substr(done, hit->begin - done), out);
      out.push_back(hit->id);
      at = done = hit->end;
    }
  }
  encode_plain(text.substr(done), out);
}

void Tokenizer::encode_plain(std::string_view text, std::vector<TokenId>& out) const {
  std::string buffer;
  PreTokenizer::Words words(parts_->pretokenizer, parts_->nfc ? to_nfc(text, buffer) : text);
  for (std::string_view word; words.next(word);) parts_->bpe.encode(word, out);
}

std::string Tokenizer::decode(std::span<const TokenId> tokens, bool skip_special) const {
  std::string bytes;
  for (const TokenId token : tokens) {
    if (!(skip_special && is_special(token))) bytes.append(token_bytes(token));
  }
  return utf8_error_offset(bytes) == bytes.size() ? bytes : repair_utf8(bytes);
}

int Tokenizer::vocab_size() const { return static_cast<int>(parts_->kinds.size()); }

std::string_view Tokenizer::token_bytes(TokenId id) const {
  if (is_added(id)) return parts_->added_texts.at(id);
  return parts_->model_tokens.bytes(id);
}

std::optional<TokenId> Tokenizer::find(std::string_view bytes) const {
  const auto hit = parts_->added_finder.find(bytes, 0, bytes.size());
  if (hit && hit->begin == 0 && hit->end == bytes.size()) return hit->id;
  return parts_->model_tokens.find(bytes);
}

bool Tokenizer::is_added(TokenId id) const { return parts_->kind(id) != Parts::Kind::kModel; }
bool Tokenizer::is_special(TokenId id) const { return parts_->kind(id) == Parts::Kind::kSpecial; }
std::optional<TokenId> Tokenizer::eos() const { return parts_->eos; }

}  // namespace calla
