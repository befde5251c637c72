#include "chat/reply.h"

#include <span>
#include <utility>

namespace calla {

using Kind = ReplyEvent::Kind;

ReplyStream::ReplyStream(const Tokenizer& tokenizer, ReplyOptions options)
    : text_(tokenizer), parser_(std::move(options.parser)), stops_(std::move(options.stop)), raw_(options.raw) {}

bool ReplyStream::push(TokenId token, std::vector<ReplyEvent>& out) {
  parse(text_.push(token));
  filter(out);
  return !stops_.found();
}

void ReplyStream::finish(bool cut, std::vector<ReplyEvent>& out) {
  if (stops_.found()) return;
  parse(text_.finish());
  if (!raw_) parser_.finish(cut, parsed_);
  filter(out);
  if (stops_.found()) return;
  if (std::string held = stops_.finish(); !held.empty()) out.push_back({Kind::kContent, std::move(held), -1, "", ""});
}

void ReplyStream::parse(const std::string& text) {
  if (text.empty()) return;
  if (raw_) {
    parsed_.push_back({Kind::kContent, text, -1, "", ""});
  } else {
    parser_.push(text, parsed_);
  }
}

// Passes the parsed events on, the content through the stop strings.
void ReplyStream::filter(std::vector<ReplyEvent>& out) {
  for (ReplyEvent& event : parsed_) {
    if (stops_.found()) break;
    if (event.kind == Kind::kContent) {
      event.text = stops_.push(event.text);
      if (event.text.empty()) continue;
    } else if (event.kind == Kind::kCallStart) {
      // The content before the call is over.
      if (std::string held = stops_.finish(); !held.empty()) {
        out.push_back({Kind::kContent, std::move(held), -1, "", ""});
      }
    }
    out.push_back(std::move(event));
  }
  parsed_.clear();
}

PromptTokens encode_prompt(const Tokenizer& tokenizer, const Prompt& prompt, std::span<const Message> messages,
                           ReplayStore* replay) {
  PromptTokens result;
  std::vector<Piece> pieces;
  pieces.reserve(prompt.pieces.size());
  for (const PromptPiece& piece : prompt.pieces) pieces.push_back({piece.text, piece.trusted});

  // A control token begins at each boundary and at both ends of a reply, so the parts between can be encoded alone.
  size_t begin = 0;
  const auto append = [&](const std::vector<TokenId>& tokens) {
    result.tokens.insert(result.tokens.end(), tokens.begin(), tokens.end());
  };
  const auto encode_to = [&](size_t end) {
    append(tokenizer.encode_pieces(std::span(pieces).subspan(begin, end - begin)));
    begin = end;
  };
  auto reply = prompt.replies.begin();
  for (const size_t boundary : prompt.boundaries) {
    if (reply != prompt.replies.end() && reply->end < boundary) {  // the turn that ends here
      if (const auto body = replay ? replay->find(messages[reply->message]) : std::vector<TokenId>(); !body.empty()) {
        encode_to(reply->begin);
        append(body);
        begin = reply->end;
      }
      ++reply;
    }
    encode_to(boundary);
    if (boundary < pieces.size()) result.boundaries.push_back(static_cast<int>(result.tokens.size()));
  }
  encode_to(pieces.size());
  return result;
}

}  // namespace calla
