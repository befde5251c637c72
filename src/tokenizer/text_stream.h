#pragma once
// TextStream: tokens in, text out, where a character's bytes may be spread over several tokens.
#include <string>
#include <string_view>

#include "model/shape.h"

namespace calla {

class Tokenizer;

// Joins raw bytes to valid UTF-8. Holds back at most three bytes: the beginning of a character whose end may
// follow.
class Utf8Joiner {
 public:
  // The text that is complete now and was not returned before; often all of it, sometimes nothing. Bytes that
  // cannot become a character turn into U+FFFD at once.
  std::string push(std::string_view bytes);
  // The end: a character that was cut becomes one U+FFFD. The joiner is then as new.
  std::string finish();

 private:
  std::string held_;
};

// Streaming decode. All text returned by push() and finish() together equals Tokenizer::decode of the tokens.
class TextStream {
 public:
  // `tokenizer` must outlive the stream. `skip_special`: special tokens (such as <|im_end|>) give no text.
  explicit TextStream(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  std::string push(TokenId token);
  std::string finish() { return joiner_.finish(); }

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Joiner joiner_;
};

}  // namespace calla
