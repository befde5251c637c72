// calla chat: a conversation in the terminal.
#include <editline/readline.h>
#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "chat/json.h"
#include "chat/render.h"
#include "chat/text.h"
#include "checkpoint/writer.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/reply_printer.h"

namespace calla {
namespace {

constexpr const char* kHelp =
    "  /help            this list\n"
    "  /reset           forget the conversation\n"
    "  /system TEXT     set the system message (and forget the conversation); without TEXT: show it\n"
    "  /think on|off    think before answering, or not\n"
    "  /save FILE       write the conversation as JSON messages; /save! replaces a file that exists\n"
    "  /stats           speeds of the last answer, and the cache\n"
    "  /quit, /exit     end (also Ctrl-D, or Ctrl-C twice)\n"
    "  //TEXT           say /TEXT, a message that begins with a slash\n"
    "  Ctrl-C           stop the answer, or clear the line\n";

struct ChatOptions {
  ModelOptions model;
  SamplingOptions sampling;
  std::string system;
  bool no_think = false;
  bool show_thinking = false;
  double cache_gb = 4;
};

// Set while a line is read and Ctrl-C is pressed; a handler cannot reach more. The signal may come just before the read
// begins, which then would wait for a key: the alarm ends it a second later.
volatile std::sig_atomic_t prompt_interrupted = 0;

extern "C" void note_prompt_interrupt(int signal_number) {
  if (signal_number == SIGINT) prompt_interrupted = 1;
  ::alarm(1);
}

// While it lives, SIGINT only makes a read fail; between reads it does nothing (an answer has a guard of its own).
class PromptInterrupt {
 public:
  PromptInterrupt() {
    struct sigaction action = {};
    action.sa_handler = note_prompt_interrupt;  // no SA_RESTART: the read ends
    ::sigaction(SIGALRM, &action, &alarm_before_);
    ::sigaction(SIGINT, &action, &before_);
  }
  ~PromptInterrupt() {
    ::sigaction(SIGINT, &before_, nullptr);
    ::alarm(0);
    ::sigaction(SIGALRM, &alarm_before_, nullptr);
  }
  PromptInterrupt(const PromptInterrupt&) = delete;
  PromptInterrupt& operator=(const PromptInterrupt&) = delete;
  void clear() const {
    ::alarm(0);
    prompt_interrupted = 0;
  }
  bool happened() const { return prompt_interrupted != 0; }

 private:
  struct sigaction before_ = {}, alarm_before_ = {};
};

// Reads lines with editing and history on a terminal, plainly otherwise.
class LineReader {
 public:
  LineReader() : interactive_(::isatty(STDIN_FILENO)) {
    if (interactive_) {
      ::using_history();
      ::stifle_history(1000);
      interrupt_.emplace();
    }
  }
  bool interactive() const { return interactive_; }
  // False at the end of the input, or after Ctrl-C twice in a row.
  bool read(std::string& line) {
    if (!interactive_) return static_cast<bool>(std::getline(std::cin, line));
    for (bool again = false;; again = true) {
      interrupt_->clear();
      const std::unique_ptr<char, decltype(&std::free)> text(::readline("> "), &std::free);
      const bool interrupted = interrupt_->happened();
      interrupt_->clear();
      if (interrupted) {
        if (again) return false;
        std::fputs("\nCtrl-C again, or Ctrl-D, ends; the conversation is still there.\n", stderr);
        continue;
      }
      if (!text) return false;
      line = text.get();
      if (!line.empty()) ::add_history(line.c_str());
      return true;
    }
  }

 private:
  const bool interactive_;
  std::optional<PromptInterrupt> interrupt_;
};

class Conversation {
 public:
  Conversation(const ChatOptions& options, LoadedEngine& engine)
      : options_(options),
        engine_(engine),
        thinking_(!options.no_think),
        // A file or another program wants the answer; a person may like to watch the thinking.
        print_(options.show_thinking || ::isatty(STDOUT_FILENO) != 0 ? ReplyPrinter::Print::kAll
                                                                     : ReplyPrinter::Print::kContent),
        system_(options.system) {}

  // A line of the user's. False: end.
  bool handle(const std::string& line) {
    const std::string text(strip(line));
    if (text.empty()) return true;
    try {
      check_utf8(text, "the line");
    } catch (const UsageError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return true;
    }
    if (text[0] == '/' && !text.starts_with("//")) return command(text);
    messages_.push_back({.role = Role::kUser, .content = text.starts_with("//") ? text.substr(1) : text});
    answer();
    return true;
  }

 private:
  bool command(const std::string& text) {
    std::istringstream words(text);
    std::string name;
    words >> name;
    const std::string argument(strip(text.substr(name.size())));
    if (name == "/quit" || name == "/exit" || name == "/bye") return false;
    if (name == "/help") {
      std::fputs(kHelp, stderr);
    } else if (name == "/reset" && argument.empty()) {
      messages_.clear();
      std::fputs("The conversation is forgotten.\n", stderr);
    } else if (name == "/system") {
      if (argument.empty()) {
        std::fprintf(stderr, "%s\n", system_.empty() ? "There is no system message." : system_.c_str());
      } else {
        system_ = argument;
        messages_.clear();
        std::fputs("The system message is set; the conversation starts anew.\n", stderr);
      }
    } else if (name == "/think") {
      if (argument == "on" || argument == "off")
        thinking_ = argument == "on";
      else if (!argument.empty())
        std::fprintf(stderr, "/think on or /think off, not \"%s\".\n", argument.c_str());
      std::fprintf(stderr, "Thinking is %s.\n", thinking_ ? "on" : "off");
    } else if (name == "/save" || name == "/save!") {
      save(argument, name == "/save!");
    } else if (name == "/stats") {
      stats();
    } else {
      std::fprintf(stderr, "There is no command %s; /help lists them.\n", text.c_str());
    }
    return true;
  }

  void answer() {
    std::vector<Message> messages;
    if (!system_.empty()) messages.push_back({.role = Role::kSystem, .content = system_});
    messages.insert(messages.end(), messages_.begin(), messages_.end());
    RenderOptions render;
    render.enable_thinking = thinking_;
    try {
      const Prompt prompt = render_prompt(messages, {}, render);
      PromptTokens tokens = encode_prompt(engine_.tokenizer, prompt);
      GenerationRequest request;
      request.prompt = std::move(tokens.tokens);
      request.boundaries = std::move(tokens.boundaries);
      request.sampling = sampling_params(options_.sampling, engine_.model.config.generation);
      request.max_tokens = options_.sampling.max_tokens;
      request.stop_tokens = engine_.stop_tokens();
      ReplyOptions reply;
      reply.parser.starts_in_thinking = prompt.starts_in_thinking;
      auto printer = std::make_shared<ReplyPrinter>(engine_.tokenizer, reply, print_, !options_.model.quiet);
      const auto generation = std::make_shared<Generation>(std::move(request), printer);
      engine_.scheduler->submit(generation);
      {
        const InterruptGuard guard(generation);
        engine_.scheduler->run_until_finished(generation);
      }
      const std::string reason = printer->finish_reason();
      last_ = printer->result();
      if (reason == "cancelled") std::fputs("(stopped)\n", stderr);
      if (reason == "length") std::fputs("(cut: --max-tokens or the context is used up)\n", stderr);
      messages_.push_back({.role = Role::kAssistant, .content = printer->content(), .reasoning = printer->reasoning()});
      if (!options_.model.quiet) {
        const Style style(STDERR_FILENO);
        std::fprintf(stderr, "%s%s%s\n", style.dim(), timing_line(last_).c_str(), style.reset());
      }
    } catch (const RequestError& e) {
      messages_.pop_back();  // the question that cannot be asked
      std::fprintf(stderr, "%s\n", e.what());
      if (e.code() == "context_length_exceeded") std::fputs("/reset makes room.\n", stderr);
    }
  }

  void save(const std::string& file, bool replace) {
    if (file.empty()) {
      std::fputs("/save FILE: which file?\n", stderr);
      return;
    }
    if (messages_.empty()) {
      std::fputs("There is nothing to save yet.\n", stderr);
      return;
    }
    std::error_code error;
    const auto status = std::filesystem::status(file, error);
    if (std::filesystem::exists(status) && (!replace || !std::filesystem::is_regular_file(status))) {
      std::fprintf(stderr, replace ? "%s is no file.\n" : "%s exists; /save! replaces it.\n", file.c_str());
      return;
    }
    Json json = Json::array();
    if (!system_.empty()) json.push_back({{"role", "system"}, {"content", system_}});
    for (const Message& message : messages_) {
      Json entry = {{"role", message.role == Role::kUser ? "user" : "assistant"}, {"content", message.content}};
      if (message.reasoning && !message.reasoning->empty()) entry["reasoning_content"] = *message.reasoning;
      json.push_back(entry);
    }
    try {
      write_text_file(file, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
      std::fprintf(stderr, "%zu messages written to %s.\n", json.size(), file.c_str());
    } catch (const CheckpointError& failure) {
      std::fprintf(stderr, "%s\n", failure.what());
    }
  }

  void stats() {
    const SchedulerStats stats = engine_.scheduler->stats();
    if (last_.prompt_tokens > 0)
      std::fprintf(stderr, "last: %s\ncache: %s\n", timing_line(last_).c_str(), last_.cache_note.c_str());
    std::fprintf(stderr,
                 "all: %llu prompt tokens, %llu of them from the cache; %llu generated\n"
                 "%zu snapshots; context %d tokens; %s\n",
                 static_cast<unsigned long long>(stats.prompt_tokens),
                 static_cast<unsigned long long>(stats.cached_tokens),
                 static_cast<unsigned long long>(stats.generated_tokens), engine_.scheduler->cache().size(),
                 engine_.scheduler->context(), engine_.backend->description().c_str());
  }

  const ChatOptions& options_;
  LoadedEngine& engine_;
  bool thinking_;
  const ReplyPrinter::Print print_;
  std::string system_;
  std::vector<Message> messages_;
  GenerationResult last_;
};

int chat(const ChatOptions& options) {
  check_utf8(options.system, "--system");
  SchedulerOptions scheduler_options;
  scheduler_options.max_sequences = 1;
  set_cache(scheduler_options, options.cache_gb);
  const auto engine = load_engine(engine_options(options.model, scheduler_options));
  LineReader reader;
  if (reader.interactive() && !options.model.quiet) {
    const Style style(STDERR_FILENO);
    std::fprintf(stderr, "%s%s%s, loaded in %s; %s\n/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.\n",
                 style.bold(), engine->name.c_str(), style.reset(), human_seconds(engine->load_seconds).c_str(),
                 engine->backend->description().c_str());
    if (engine->name == "calla-tiny")
      std::fputs("calla-tiny is a toy: it knows dictionary words. Try: What is a kangaroo?\n", stderr);
  }
  Conversation conversation(options, *engine);
  std::string line;
  while (reader.read(line))
    if (!conversation.handle(line)) break;
  if (reader.interactive()) std::fputs("\n", stderr);
  return 0;
}

}  // namespace

void add_chat_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("chat", "Talk to the model in the terminal");
  auto options = std::make_shared<ChatOptions>();
  command->add_option("-s,--system", options->system, "System message");
  command->add_flag("--no-think", options->no_think, "Answer without thinking first (/think on|off changes it)");
  command->add_flag("--show-thinking", options->show_thinking, "Print the thinking also where stdout is no terminal");
  command
      ->add_option("--cache-gb", options->cache_gb,
                   "Memory for what earlier turns left, so that a turn reads only what is new; 0: none")
      ->check(between(0.0, 10000.0))
      ->capture_default_str();
  command->footer(std::string("While chatting:\n") + kHelp);
  add_model_options(*command, options->model);
  add_sampling_options(*command, options->sampling);
  command->callback([options, &exit_code] { exit_code = chat(*options); });
}

}  // namespace calla
