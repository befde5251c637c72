// calla tokenize: a text's token ids, and each token's text.
#include <array>
#include <cstdio>
#include <iostream>

#include "chat/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

struct TokenizeOptions {
  std::string model;
  std::string text;
  bool plain = false;
  bool ids = false;
  bool count = false;
};

// A token's bytes in quotes, as JSON where they are UTF-8; a byte of a cut character as \xNN.
std::string quote(std::string_view bytes) {
  std::string out = "\"";
  while (!bytes.empty()) {
    const Utf8Unit unit = next_utf8(bytes);
    const auto part = bytes.substr(0, static_cast<size_t>(unit.length));
    if (unit.kind == Utf8Kind::kCharacter) {
      const std::string quoted = Json(part).dump();
      out += quoted.substr(1, quoted.size() - 2);
    } else {
      for (const char byte : part) {
        std::array<char, 8> text{};
        std::snprintf(text.data(), text.size(), "\\x%02x", static_cast<unsigned char>(byte));
        out += text.data();
      }
    }
    bytes.remove_prefix(part.size());
  }
  return out + '"';
}

int tokenize(const TokenizeOptions& options) {
  const std::string text = options.text == "-" ? read_stdin() : options.text;
  const Tokenizer tokenizer = Tokenizer::load(find_model(options.model));
  check_utf8(text, "the text");
  const std::vector<TokenId> tokens =
      tokenizer.encode(text, options.plain ? AddedTokens::kPlainText : AddedTokens::kRecognise);
  if (options.count) {
    std::printf("%zu\n", tokens.size());
  } else if (options.ids) {
    std::cout << Json(tokens).dump() << "\n";
  } else {
    for (TokenId token : tokens) {
      std::printf("%7d  %s\n", token, quote(tokenizer.token_bytes(token)).c_str());
    }
  }
  return 0;
}

}  // namespace

void add_tokenize_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("tokenize", "Show the tokens of a text");
  auto options = std::make_shared<TokenizeOptions>();
  command->add_option("text", options->text, "The text, or - to read it from stdin")->required();
  command->add_option("-m,--model", options->model, "Directory with tokenizer.json (default as for chat)")
      ->check(not_empty())
      ->type_name("DIR");
  command->add_flag("--plain", options->plain, "Treat control tokens such as <|im_end|> as plain text");
  CLI::Option* ids = command->add_flag("--ids", options->ids, "Print the ids only, as a JSON list");
  command->add_flag("--count", options->count, "Print the number of tokens only")->excludes(ids);
  command->callback([options, &exit_code] { exit_code = tokenize(*options); });
}

}  // namespace calla
