#include "cli/reply_printer.h"

#include <unistd.h>

#include <cstdio>

#include "base/error.h"

namespace calla {

ReplyPrinter::ReplyPrinter(const Tokenizer& tokenizer, ReplyOptions options, Print print, bool progress)
    : stream_(tokenizer, std::move(options)),
      print_(print),
      style_(STDOUT_FILENO),
      progress_("reading the prompt", "tokens", progress) {}

void ReplyPrinter::on_prompt_progress(int done, int total) {
  progress_.update(done, total);
  if (done >= total) progress_.clear();
}

bool ReplyPrinter::on_token(const TokenEvent& event) {
  if (event.is_stop) return true;
  std::vector<ReplyEvent> events;
  const bool go_on = stream_.push(event.token, events);
  handle(events);
  return go_on;
}

void ReplyPrinter::on_finished(const GenerationResult& result) {
  progress_.clear();
  result_ = result;
  std::vector<ReplyEvent> events;
  stream_.finish(result.reason != FinishReason::kStopToken, events);
  handle(events);
  if (dim_) std::fputs(style_.reset(), stdout);
  if (printed_) std::fputs("\n", stdout);
  std::fflush(stdout);
}

std::string ReplyPrinter::finish_reason() const {
  switch (result_.reason) {
    case FinishReason::kStopToken:
    case FinishReason::kSink:
      return "stop";
    case FinishReason::kMaxTokens:
    case FinishReason::kContextFull:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      break;
  }
  throw Error(result_.error);
}

void ReplyPrinter::handle(const std::vector<ReplyEvent>& events) {
  for (const ReplyEvent& event : events) {
    if (event.kind == ReplyEvent::Kind::kReasoning) {
      reasoning_ += event.text;
      print(event.text, true);
    } else if (event.kind == ReplyEvent::Kind::kContent) {
      content_ += event.text;
      print(event.text, false);
    }
  }
}

void ReplyPrinter::print(const std::string& text, bool dim) {
  if (print_ == Print::kNothing || text.empty() || (dim && print_ == Print::kContent)) return;
  if (dim != dim_) {
    std::fputs(dim ? style_.dim() : style_.reset(), stdout);
    if (!dim && printed_) std::fputs("\n\n", stdout);
    dim_ = dim;
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
  printed_ = true;
}

}  // namespace calla
