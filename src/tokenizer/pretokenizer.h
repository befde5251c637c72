#pragma once
// The pre-tokeniser: cuts text into the words within which BPE merges, by the regex of tokenizer.json.
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace calla {

class PreTokenizer {
 public:
  // How the pattern is applied. kAuto takes the hand-written scanner if the pattern is Qwen's, else PCRE2, whose
  // character classes are those of the Unicode version it was built with.
  enum class Engine { kAuto, kPcre2 };

  // Throws CheckpointError, beginning with `name`, if the pattern is not a regex, can match the empty text, or uses
  // what cannot be translated.
  explicit PreTokenizer(const std::string& pattern, Engine engine = Engine::kAuto,
                        const std::string& name = "tokenizer.json");
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;

  // A walk over the words of one text (valid UTF-8, which must outlive the walk); every byte is part of one
  // word: text between two matches is a word too. Several walks may go on at once, in any threads.
  class Words {
   public:
    Words(const PreTokenizer& pretokenizer, std::string_view text);
    ~Words();
    Words(const Words&) = delete;
    Words& operator=(const Words&) = delete;
    // False at the end. Throws RequestError if the regex engine gives up on the text.
    bool next(std::string_view& word);

   private:
    size_t regex_word_end();

    struct Match;
    const PreTokenizer& pretokenizer_;
    std::string_view text_;
    size_t begin_ = 0;
    std::unique_ptr<Match> match_;  // PCRE2 only
  };

 private:
  struct Regex;
  std::unique_ptr<const Regex> regex_;  // null: the scanner
};

}  // namespace calla
