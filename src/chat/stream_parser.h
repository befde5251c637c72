#pragma once
// The inverse of the chat template for the reply: the model's text, in chunks cut anywhere, to reasoning,
// content and tool calls. The joined events depend on the text alone, not on its chunks. Never throws on what
// the model wrote: markup that makes no call is content. Text is passed on as soon as it can no longer be
// markup.
//
//   - Blank text around reasoning, blank lines before content, and white space before a call belong to the
//     format and are dropped. Text after a call is content again.
//   - In reasoning, <tool_call> counts only with a newline and the beginning of a call after it; it then ends
//   the reasoning.
//   - Arguments get the types of the tool's schema (argument_types.h). A repeated parameter is ignored.
//   - Tolerated: closing tags left out or repeated, no <tool_call>, several functions in one, undeclared
//   parameters or
//     functions, a call written as a JSON object.
//   - A call is complete at </function> (or where a tolerated form ends). A call that was cut off gets no
//   kCallEnd, its
//     arguments stay an unfinished prefix.
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "chat/argument_types.h"
#include "chat/messages.h"

namespace calla {

struct ReplyEvent {
  enum class Kind {
    kReasoning,      // text
    kContent,        // text
    kCallStart,      // call, id, name
    kCallArguments,  // call, text: the next piece of the arguments' JSON
    kCallEnd,        // call: the arguments are complete
  };
  Kind kind = Kind::kContent;
  std::string text;
  int call = -1;  // 0 for the reply's first call
  std::string id;
  std::string name;
};

struct ParserOptions {
  bool starts_in_thinking = false;            // Prompt::starts_in_thinking
  std::vector<ToolDefinition> tools;          // none: there are no calls, their markup is content
  std::function<std::string()> make_call_id;  // default: random
};

class StreamParser {
 public:
  explicit StreamParser(ParserOptions options);

  void push(std::string_view text, std::vector<ReplyEvent>& out);
  // No more text. `cut`: the model was stopped (token limit) rather than done, so what is open stays
  // unfinished.
  void finish(bool cut, std::vector<ReplyEvent>& out);

  bool in_reasoning() const { return state_ == State::kReasoning; }
  bool in_call() const { return state_ != State::kReasoning && state_ != State::kContent; }

 private:
  enum class State {
    kReasoning,
    kContent,
    kArguments,   // in a function, between parameters
    kValueStart,  // after <parameter=KEY>, before the newline that belongs to the tag
    kValue,
    kJsonCall,  // in <tool_call>{...
  };

  bool step();  // false: more text is needed
  bool step_reasoning();
  bool step_content();
  bool step_arguments();
  bool step_value_start();
  bool step_value();
  bool step_json_call();

  std::string_view rest() const { return std::string_view(pending_).substr(position_); }
  size_t take_plain_text(std::string_view stops);
  void emit_text(std::string_view text);
  void begin_call(const std::string& name);
  void begin_value(const std::string& name);
  void add_to_value(std::string_view text);
  void end_value();
  void end_call();
  bool deliver_json_call(std::string_view body);
  void write_arguments(std::string_view json);
  ReplyEvent& event(ReplyEvent::Kind kind);
  void drop_unfinished_markup();

  const ParserOptions options_;
  State state_;
  std::string pending_;  // text not yet understood, from position_ on
  size_t position_ = 0;
  bool at_end_ = false;
  std::vector<ReplyEvent>* out_ = nullptr;  // during push and finish

  std::string space_;        // white space that may turn out to be part of the format
  std::string gap_;          // the white space between the content before a call and what follows the call
  bool at_start_ = true;     // nothing but white space since the last change of kind
  bool after_call_ = false;  // ditto since a call
  bool has_reasoning_ = false;
  bool has_content_ = false;

  int n_calls_ = 0;
  Json parameters_;                              // schema of the current call
  std::unordered_set<std::string> names_given_;  // parameters of the current call
  bool has_arguments_ = false;                   // something was written to the current call's arguments
  std::string value_name_;
  ArgumentTypes value_types_;
  bool value_ignored_ = false;
  bool value_streams_ = false;  // a string, passed on while it comes
  std::string value_;           // what is held of the current value, or the JSON call so far
};

}  // namespace calla
