#include "tokenizer/qwen_words.h"

#include "tokenizer/char_class.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

// A place in the text: what stands there and how long it is. At the end of the text, `bytes` is 0.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text), classes_(char_classes()) {}

  struct Char {
    CharClass kind = CharClass::kOther;
    char32_t value = 0;
    size_t bytes = 0;
    bool is(CharClass k) const { return bytes != 0 && kind == k; }
    bool is_word() const { return is(CharClass::kLetter) || is(CharClass::kMark); }
    bool is_newline() const { return value == '\n' || value == '\r'; }
  };

  Char at(size_t i) const {
    if (i >= text_.size()) return {};
    const CodePoint c = decode_valid(text_.data() + i);
    return {classes_[c.value], c.value, static_cast<size_t>(c.bytes)};
  }

  // 's 't 're 've 'm 'll 'd in either case: its end, or `begin` if there is none.
  size_t contraction_end(size_t begin) const {
    const auto lower = [this](size_t i) { return i < text_.size() ? text_[i] | 0x20 : 0; };
    const int first = lower(begin + 1), second = lower(begin + 2);
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return begin + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
      return begin + 3;
    if (text_.substr(begin + 1, 2) == "\u017f") return begin + 3;  // long s, which folds to s
    return begin;
  }

  template <class Predicate>
  size_t skip(size_t i, Predicate&& wanted) const {
    for (Char c = at(i); c.bytes != 0 && wanted(c); c = at(i)) i += c.bytes;
    return i;
  }
  // [\p{L}\p{M}]*
  size_t skip_word(size_t i) const {
    return skip(i, [](const Char& c) { return c.kind == CharClass::kLetter || c.kind == CharClass::kMark; });
  }
  // [^\s\p{L}\p{M}\p{N}]* [\r\n]*
  size_t skip_symbols(size_t i) const {
    i = skip(i, [](const Char& c) { return c.kind == CharClass::kOther; });
    while (i < text_.size() && (text_[i] == '\n' || text_[i] == '\r')) ++i;
    return i;
  }

  // A run of white space: to its last line end if it has one; else without its last character, which goes
  // with what follows; all of it at the end of the text.
  size_t space_end(size_t begin) const {
    size_t after_newline = begin, last = begin, end = begin;
    for (Char c = at(end); c.is(CharClass::kSpace); c = at(end)) {
      last = end;
      end += c.bytes;
      if (c.is_newline()) after_newline = end;
    }
    if (after_newline != begin) return after_newline;
    return end == text_.size() || last == begin ? end : last;
  }

 private:
  std::string_view text_;
  const CharClassTable& classes_;
};

}  // namespace

// The alternatives in the order of the pattern; each line that returns is one of them.
size_t qwen_word_end(std::string_view text, size_t begin) {
  const Scanner scan(text);
  const Scanner::Char first = scan.at(begin);
  const size_t next = begin + first.bytes;
  if (first.value == '\'') {
    if (const size_t end = scan.contraction_end(begin); end != begin) return end;
  }
  if (first.is_word()) return scan.skip_word(next);
  if (first.kind == CharClass::kNumber) return next;
  const Scanner::Char second = scan.at(next);
  if (!first.is_newline() && second.is_word()) return scan.skip_word(next);
  if (first.kind == CharClass::kOther) return scan.skip_symbols(next);
  if (first.value == ' ' && second.is(CharClass::kOther)) return scan.skip_symbols(next);
  return scan.space_end(begin);
}

}  // namespace calla
