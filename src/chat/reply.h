#pragma once
// ReplyStream: the way of a reply from token ids to events, for CLI and server alike:
//   tokens -> text (tokenizer/text_stream.h) -> reasoning, content, calls (stream_parser.h) -> stop strings
// Stop strings apply to the content alone: not to reasoning, which the user has not asked for, nor to the arguments of
// calls, which they would break.
#include <span>
#include <string>
#include <vector>

#include "chat/render.h"
#include "chat/replay.h"
#include "chat/stop_strings.h"
#include "chat/stream_parser.h"
#include "model/shape.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer.h"

namespace calla {

struct ReplyOptions {
  ParserOptions parser;
  std::vector<std::string> stop;
  bool raw = false;  // all text is content: the prompt was no chat
};

class ReplyStream {
 public:
  // `tokenizer` must outlive the stream.
  ReplyStream(const Tokenizer& tokenizer, ReplyOptions options);

  // A generated token (not the one that ends the turn). False: a stop string is complete, and no more text will come.
  bool push(TokenId token, std::vector<ReplyEvent>& out);
  // `cut`: the reply did not end by itself (see StreamParser).
  void finish(bool cut, std::vector<ReplyEvent>& out);

  // The stop string that ended the content, or null.
  const std::string* stop_string() const { return stops_.found(); }
  // What the next text will be, unless a tag comes.
  bool in_reasoning() const { return !raw_ && parser_.in_reasoning(); }
  bool in_content() const { return raw_ || (!parser_.in_reasoning() && !parser_.in_call()); }

 private:
  void parse(const std::string& text);
  void filter(std::vector<ReplyEvent>& out);

  TextStream text_;
  StreamParser parser_;
  StopStrings stops_;
  const bool raw_;
  std::vector<ReplyEvent> parsed_;
};

// A prompt as the model reads it.
struct PromptTokens {
  std::vector<TokenId> tokens;
  std::vector<int> boundaries;  // Prompt::boundaries in tokens, without the prompt's end
};

// With `replay`, replies of the model among the messages get the tokens that it wrote.
PromptTokens encode_prompt(const Tokenizer& tokenizer, const Prompt& prompt, std::span<const Message> messages = {},
                           ReplayStore* replay = nullptr);

}  // namespace calla
