#include "tests/grammar/vocabulary.h"

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

#include "grammar/characters.h"

namespace calla {
namespace {

// Byte-level BPE writes each byte as a printable character: printable Latin-1 as itself, the others from
// U+0100 on.
std::string undo_byte_alphabet(const std::string& text) {
  std::array<int, 512> byte_of{};
  byte_of.fill(-1);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    byte_of[static_cast<size_t>(printable ? byte : next++)] = byte;
  }
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = decode_character(text, at);
    if (c >= byte_of.size() || byte_of[c] < 0) throw std::runtime_error("not a byte-level token: " + text);
    bytes.push_back(static_cast<char>(byte_of[c]));
  }
  return bytes;
}

}  // namespace

std::string read_repository_file(const std::string& path) {
  std::ifstream file(std::string(CALLA_SOURCE_DIR "/") + path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TestVocabulary calla_tiny_vocabulary() {
  const auto json = nlohmann::json::parse(read_repository_file("models/calla-tiny/tokenizer.json"));
  TestVocabulary vocabulary;
  const auto put = [&](size_t id, std::string text) {
    if (vocabulary.texts.size() <= id) vocabulary.texts.resize(id + 1);
    vocabulary.texts[id] = std::move(text);
  };
  for (const auto& [text, id] : json.at("model").at("vocab").items()) put(id.get<size_t>(), undo_byte_alphabet(text));
  for (const auto& token : json.at("added_tokens")) {
    const auto id = token.at("id").get<TokenId>();
    const bool is_control = token.at("special").get<bool>();
    put(static_cast<size_t>(id), is_control ? "" : token.at("content").get<std::string>());
    if (!is_control) vocabulary.markup.push_back(id);
    if (token.at("content") == "<|im_end|>") vocabulary.stop = id;
  }
  return vocabulary;
}

TestVocabulary made_up_vocabulary(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::set<std::string> seen;
  TestVocabulary vocabulary;
  const auto put = [&](const std::string& text) {
    if (seen.insert(text).second) vocabulary.texts.push_back(text);
  };
  for (int byte = 0; byte < 256; ++byte) put(std::string(1, static_cast<char>(byte)));
  for (const char* text : {"{\"",     "\":",       "\": ", "\":\"", "\": \"",     "\",",   "\", \"",
                           "\"}",     "},{",       "}]",   "[]",    "{}",         "[[",    "]]",
                           "{\n  \"", "\n  ",      "\n}",  ",\n",   "null",       "true",  "false",
                           "name",    "value",     "\\n",  "\\\"",  "\\u",        "\\u00", "\\ud83d",
                           "00",      "10",        "123",  "0.",    ".5",         "e+",    "-1",
                           "</",      "parameter", ">\n",  "=",     "<function=", "\n</",  "</think>\n\n{",
                           "</thi",   "nk>",       "k>{\""})
    put(text);
  for (const char* text :
       {"é", "日本", "😀", "\xf0\x9f", "\x98\x80", "\xe6\x97", "\xa5", "a\xe6", "\xed\xa0\x80", "\xc0\x80"})
    put(text);
  const std::string letters = "abcdefghijklmnopqrstuvwxyz    ABCDEFG0123456789\"\\{}[]:,\n\t-._";
  while (vocabulary.texts.size() + 5 < size) {
    std::string text;
    const size_t length = 1 + random() % 12;
    // Mostly words, some with marks inside.
    const size_t alphabet = random() % 8 == 0 ? letters.size() : 26;
    if (random() % 2 == 0) text.push_back(' ');
    while (text.size() < length) text.push_back(letters[random() % alphabet]);
    if (random() % 16 == 0) text += "é";
    put(text);
  }
  for (const char* text : {"<think>", "</think>", "<tool_call>", "</tool_call>"}) {
    vocabulary.markup.push_back(static_cast<TokenId>(vocabulary.texts.size()));
    vocabulary.texts.emplace_back(text);
  }
  vocabulary.stop = static_cast<TokenId>(vocabulary.texts.size());
  vocabulary.texts.emplace_back();
  return vocabulary;
}

}  // namespace calla
