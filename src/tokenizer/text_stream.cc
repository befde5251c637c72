#include "tokenizer/text_stream.h"

#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace calla {

std::string Utf8Joiner::push(std::string_view bytes) {
  held_.append(bytes);
  std::string_view rest = held_;
  std::string text;
  while (!rest.empty()) {
    const size_t valid = utf8_error_offset(rest);
    text.append(rest.substr(0, valid));
    rest.remove_prefix(valid);
    if (rest.empty()) break;
    const Utf8Unit unit = next_utf8(rest);
    if (unit.kind == Utf8Kind::kCut) break;
    text.append(kReplacement);
    rest.remove_prefix(static_cast<size_t>(unit.length));
  }
  held_.erase(0, held_.size() - rest.size());
  return text;
}

std::string Utf8Joiner::finish() {
  std::string text(held_.empty() ? std::string_view() : kReplacement);
  held_.clear();
  return text;
}

std::string TextStream::push(TokenId token) {
  if (skip_special_ && tokenizer_->is_special(token)) return {};
  return joiner_.push(tokenizer_->token_bytes(token));
}

}  // namespace calla
