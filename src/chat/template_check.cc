#include "chat/template_check.h"

namespace calla {

uint64_t template_hash(std::string_view jinja) {
  // FNV-1a over the lines, each without the white space at its end; blank lines at the end of the file do not
  // count.
  uint64_t hash = 0xcbf29ce484222325u;
  const auto mix = [&](char c) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u; };
  size_t blank_lines = 0;
  bool first = true;
  while (!jinja.empty()) {
    const size_t newline = jinja.find('\n');
    std::string_view line = jinja.substr(0, newline);
    jinja.remove_prefix(newline == std::string_view::npos ? jinja.size() : newline + 1);
    while (!line.empty() && (line.back() == ' ' || line.back() == '\t' || line.back() == '\r')) line.remove_suffix(1);
    if (line.empty()) {
      blank_lines++;
      continue;
    }
    for (size_t i = 0; i < blank_lines + (first ? 0 : 1); i++) mix('\n');
    for (const char c : line) mix(c);
    blank_lines = 0;
    first = false;
  }
  return hash;
}

std::optional<std::string> template_warning(std::string_view jinja) {
  if (template_hash(jinja) == kTemplateHash) return std::nullopt;
  return "this checkpoint carries a chat template other than Qwen3.6's, which is built in and used all the "
         "same; "
         "prompts may differ from what the model was trained on";
}

}  // namespace calla
