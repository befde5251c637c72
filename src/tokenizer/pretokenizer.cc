#include "tokenizer/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cctype>

#include "base/check.h"
#include "base/error.h"
#include "tokenizer/qwen_words.h"

namespace calla {
namespace {

template <auto* Free>
struct Deleter {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Code = std::unique_ptr<pcre2_code, Deleter<&pcre2_code_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<&pcre2_match_data_free>>;

std::string pcre2_message(int error) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(error, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

// The pattern in PCRE2's spelling. The reference's \s is Unicode's White_Space, PCRE2's also has U+180E, so \s is spelt
// out, in and outside of brackets. What the two engines read differently is refused.
std::string translate(const std::string& pattern, const std::string& name) {
  static constexpr std::string_view kSpaces =
      R"(\t-\r\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(name + ": pre_tokenizer pattern uses " + what +
                          ", which is not supported; supported are \\s, \\S outside of brackets, \\p{..}, \\P{..}, " +
                          "\\r \\n \\t \\f, escaped punctuation, and brackets without brackets or && inside");
  };
  std::string out;
  bool in_brackets = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '[') {
      if (in_brackets || pattern.compare(i, 2, "[]") == 0 || pattern.compare(i, 3, "[^]") == 0)
        refuse("a bracket at the start of, or in, brackets");
    }
    if (in_brackets && pattern.compare(i, 2, "&&") == 0) refuse("&& in brackets");
    if (c != '\\' || i + 1 == pattern.size()) {
      in_brackets = in_brackets ? c != ']' : c == '[';
      out += c;
      continue;
    }
    const char escaped = pattern[++i];
    if (escaped == 's') {
      out.append(in_brackets ? "" : "[").append(kSpaces).append(in_brackets ? "" : "]");
    } else if (escaped == 'S' && !in_brackets) {
      out.append("[^").append(kSpaces).append("]");
    } else if (std::isalnum(static_cast<unsigned char>(escaped)) == 0 ||
               std::string_view("pPrntf").find(escaped) != std::string_view::npos) {
      out.append({'\\', escaped});
    } else {
      refuse(std::string("\\") + escaped + (in_brackets ? " in brackets" : ""));
    }
  }
  return out;
}

}  // namespace

struct PreTokenizer::Regex {
  Code code;
};

struct PreTokenizer::Words::Match {
  MatchData data;
  size_t begin = 0, end = 0;  // the match found last
};

PreTokenizer::PreTokenizer(const std::string& pattern, Engine engine, const std::string& name) {
  if (engine == Engine::kAuto && pattern == kQwenPattern) return;
  const std::string translated = translate(pattern, name);
  int error = 0;
  PCRE2_SIZE offset = 0;
  Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                          PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
  if (!code) {
    throw CheckpointError(name + ": pre_tokenizer pattern is not a regex that PCRE2 understands: " +
                          pcre2_message(error) + " at offset " + std::to_string(offset) + " of " + translated);
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) throw CheckpointError(name + ": pre_tokenizer pattern can match the empty text");
  // Where the machine allows no JIT, pcre2_match interprets the pattern: slower, the same words.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  regex_ = std::make_unique<const Regex>(Regex{std::move(code)});
}

PreTokenizer::~PreTokenizer() = default;
PreTokenizer::PreTokenizer(PreTokenizer&&) noexcept = default;

PreTokenizer::Words::Words(const PreTokenizer& pretokenizer, std::string_view text)
    : pretokenizer_(pretokenizer), text_(text) {
  if (!pretokenizer.regex_) return;
  match_ = std::make_unique<Match>();
  match_->data.reset(pcre2_match_data_create(1, nullptr));
  check(match_->data != nullptr, "memory for a PCRE2 match");
}

PreTokenizer::Words::~Words() = default;

bool PreTokenizer::Words::next(std::string_view& word) {
  if (begin_ == text_.size()) return false;
  const size_t end = match_ ? regex_word_end() : qwen_word_end(text_, begin_);
  word = text_.substr(begin_, end - begin_);
  begin_ = end;
  return true;
}

size_t PreTokenizer::Words::regex_word_end() {
  Match& match = *match_;
  if (begin_ == match.begin && match.end > begin_) return match.end;  // the match after a gap
  const int rc = pcre2_match(pretokenizer_.regex_->code.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                             begin_, PCRE2_NO_UTF_CHECK, match.data.get(), nullptr);
  if (rc == PCRE2_ERROR_NOMATCH) return text_.size();
  if (rc < 0)
    throw RequestError("the text cannot be split into words: " + pcre2_message(rc) + " after byte " +
                       std::to_string(begin_));
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.data.get());
  match.begin = ends[0];
  match.end = ends[1];
  return match.begin > begin_ ? match.begin : match.end;
}

}  // namespace calla
