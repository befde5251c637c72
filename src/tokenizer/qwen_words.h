#pragma once
// The split pattern of Qwen3.5 and Qwen3.6, by hand: the same words as the regex gives, several times faster,
// and with the reference's character classes instead of those of the installed PCRE2.
#include <cstddef>
#include <string_view>

namespace calla {

// The pattern, as tokenizer.json spells it.
inline constexpr std::string_view kQwenPattern =
    R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re";

// Where the word that begins at `begin` (< text.size()) ends. Every character belongs to a word.
size_t qwen_word_end(std::string_view text, size_t begin);

}  // namespace calla
