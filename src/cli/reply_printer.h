#pragma once
// ReplyPrinter: prints an answer as it comes, thinking dimmed, and keeps its parts.
#include <string>
#include <vector>

#include "chat/reply.h"
#include "cli/terminal.h"
#include "engine/generation.h"

namespace calla {

class ReplyPrinter : public GenerationSink {
 public:
  enum class Print {
    kNothing,
    kContent,  // content only: stdout stays a result
    kAll,      // thinking too, dimmed
  };
  ReplyPrinter(const Tokenizer& tokenizer, ReplyOptions options, Print print, bool progress);

  void on_prompt_progress(int done, int total) override;
  bool on_token(const TokenEvent& event) override;
  void on_finished(const GenerationResult& result) override;

  const std::string& content() const { return content_; }
  const std::string& reasoning() const { return reasoning_; }
  const GenerationResult& result() const { return result_; }
  // "stop", "length" or "cancelled"; throws Error if the generation failed.
  std::string finish_reason() const;

 private:
  void handle(const std::vector<ReplyEvent>& events);
  void print(const std::string& text, bool dim);

  ReplyStream stream_;
  const Print print_;
  const Style style_;
  ProgressLine progress_;
  std::string content_, reasoning_;
  bool dim_ = false;
  bool printed_ = false;
  GenerationResult result_;
};

}  // namespace calla
