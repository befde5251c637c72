// Any bytes as text: the first one steers, the rest is encoded and decoded in several ways that must agree.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "tokenizer/nfc.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

using namespace calla;

namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(CALLA_SOURCE_DIR "/models/calla-tiny");
  return loaded;
}

std::string stream(const std::vector<TokenId>& ids) {
  TextStream stream(tokenizer(), false);
  std::string text;
  for (const TokenId id : ids) {
    const std::string part = stream.push(id);
    check(utf8_error_offset(part) == part.size(), "each streamed part is valid UTF-8");
    text += part;
  }
  return text + stream.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t step = 1 + data[0] % 16;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string text = repair_utf8(bytes);
  check(utf8_error_offset(text) == text.size(), "repaired text is valid UTF-8");

  bool refused = false;
  try {
    tokenizer().encode(bytes, AddedTokens::kPlainText);
  } catch (const RequestError&) {
    refused = true;
  }
  check(refused == (text != bytes), "strict encoding refuses exactly what needs repair");

  const auto plain = tokenizer().encode_lossy(bytes, AddedTokens::kPlainText);
  std::string buffer, buffer2;
  const std::string_view normal = to_nfc(text, buffer);
  check(to_nfc(normal, buffer2) == normal, "normalising twice changes nothing");
  check(tokenizer().decode(plain, false) == normal, "decode(encode(x)) is the NFC of x");
  check(stream(plain) == normal, "so is the stream");
  for (const TokenId id : plain) check(!tokenizer().is_added(id), "no control token from plain text");

  const auto recognised = tokenizer().encode(text, AddedTokens::kRecognise);
  check(stream(recognised) == tokenizer().decode(recognised, false), "stream and decode agree");
  std::vector<Piece> trusted, untrusted;
  for (size_t at = 0; at < text.size(); at += step) {
    trusted.push_back({std::string_view(text).substr(at, step), true});
    untrusted.push_back({std::string_view(text).substr(at, step), false});
  }
  check(tokenizer().encode_pieces(trusted) == recognised, "trusted pieces are one text");
  check(tokenizer().encode_pieces(untrusted) == plain, "so are untrusted ones");

  std::vector<TokenId> ids;  // the bytes as ids, also such as no model would give
  for (size_t i = 0; i + 1 < bytes.size(); i += 2)
    ids.push_back(
        static_cast<TokenId>(static_cast<unsigned char>(bytes[i]) * 256 + static_cast<unsigned char>(bytes[i + 1])) %
            (tokenizer().vocab_size() + 9) -
        4);
  check(stream(ids) == tokenizer().decode(ids, false), "stream and decode agree on any ids");
  return 0;
}
