// calla tokenize: a text's token ids, and each token's text.
#include <cstdio>
#include <iostream>
#include <iterator>

#include "chat/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "tokenizer/tokenizer.h"

namespace calla {
namespace {

struct TokenizeOptions {
  std::string model;
  std::string text;
  bool plain = false;
  bool ids = false;
  bool count = false;
};

int tokenize(const TokenizeOptions& options) {
  std::string text = options.text;
  if (text == "-") text.assign(std::istreambuf_iterator<char>(std::cin), {});
  const Tokenizer tokenizer = Tokenizer::load(find_model(options.model));
  const std::vector<TokenId> tokens =
      tokenizer.encode_lossy(text, options.plain ? AddedTokens::kPlainText : AddedTokens::kRecognise);
  if (options.count) {
    std::printf("%zu\n", tokens.size());
  } else if (options.ids) {
    std::cout << Json(tokens).dump() << "\n";
  } else {
    for (TokenId token : tokens) {
      const Json quoted = std::string(tokenizer.token_bytes(token));
      std::printf("%7d  %s\n", token, quoted.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
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
      ->type_name("DIR");
  command->add_flag("--plain", options->plain, "Treat control tokens such as <|im_end|> as plain text");
  command->add_flag("--ids", options->ids, "Print the ids only, as a JSON list");
  command->add_flag("--count", options->count, "Print the number of tokens only");
  command->callback([options, &exit_code] { exit_code = tokenize(*options); });
}

}  // namespace calla
