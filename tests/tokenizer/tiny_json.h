#pragma once
// A complete small tokenizer.json to change in tests: 256 bytes and a few merges.
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/qwen_words.h"
#include "tokenizer/utf8.h"

namespace calla::test {

// The character that stands for a byte in tokenizer.json.
inline std::string byte_text(int byte) {
  const auto visible = [](int b) { return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae; };
  char32_t code_point = static_cast<char32_t>(byte);
  if (!visible(byte)) {
    code_point = 0x100;
    for (int b = 0; b < byte; ++b) code_point += !visible(b);
  }
  std::string out;
  append_utf8(code_point, out);
  return out;
}

// Byte b has id b; the merges make the tokens 256, 257, ...; <|a|> (special) and <b> (not) follow.
inline nlohmann::json tiny_json(const std::vector<std::pair<std::string, std::string>>& merges) {
  nlohmann::json vocab, list = nlohmann::json::array();
  for (int byte = 0; byte < 256; ++byte) vocab[byte_text(byte)] = byte;
  for (const auto& [left, right] : merges) {
    if (!vocab.contains(left + right)) {
      const auto id = vocab.size();
      vocab[left + right] = id;
    }
    list.push_back({left, right});
  }
  const auto added = [&](const char* text, size_t id, bool special) {
    return nlohmann::json{{"id", id},        {"content", text},     {"single_word", false}, {"lstrip", false},
                          {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  const nlohmann::json bytes = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const size_t n = vocab.size();
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", {added("<|a|>", n, true), added("<b>", n + 1, false)}},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"}, {"pattern", {{"Regex", kQwenPattern}}}, {"behavior", "Isolated"}, {"invert", false}},
              bytes}}}},
          {"post_processor", bytes},
          {"decoder", bytes},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", ""},
            {"end_of_word_suffix", ""},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", list}}}};
}

}  // namespace calla::test
