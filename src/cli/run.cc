// calla run: one prompt, one answer.
#include <cstdio>
#include <iostream>

#include "base/error.h"
#include "chat/json.h"
#include "chat/render.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/reply_printer.h"

namespace calla {
namespace {

struct RunOptions {
  ModelOptions model;
  SamplingOptions sampling;
  std::string prompt;
  std::string system;
  std::vector<std::string> stop;
  bool raw = false;
  bool json = false;
  bool no_think = false;
  bool show_thinking = false;
};

int run(const RunOptions& options) {
  const std::string text = options.prompt == "-" ? read_stdin() : options.prompt;
  check_utf8(text, "the prompt");
  check_utf8(options.system, "--system");
  for (const std::string& stop : options.stop)
    if (stop.empty()) throw UsageError("--stop: an empty text would end every answer at once");
  SchedulerOptions scheduler_options;
  scheduler_options.max_sequences = 1;
  scheduler_options.cache_snapshots = 0;
  const auto engine = load_engine(engine_options(options.model, scheduler_options));

  ReplyOptions reply;
  reply.stop = options.stop;
  reply.raw = options.raw;
  GenerationRequest request;
  if (options.raw) {
    request.prompt = engine->tokenizer.encode(text, AddedTokens::kRecognise);
  } else {
    std::vector<Message> messages;
    if (!options.system.empty()) messages.push_back({.role = Role::kSystem, .content = options.system});
    messages.push_back({.role = Role::kUser, .content = text});
    RenderOptions render;
    render.enable_thinking = !options.no_think;
    const Prompt prompt = render_prompt(messages, {}, render);
    request.prompt = encode_prompt(engine->tokenizer, prompt).tokens;
    reply.parser.starts_in_thinking = prompt.starts_in_thinking;
  }
  request.sampling = sampling_params(options.sampling, engine->model.config.generation);
  request.max_tokens = options.sampling.max_tokens;
  request.stop_tokens = engine->stop_tokens();

  const auto print = options.json            ? ReplyPrinter::Print::kNothing
                     : options.show_thinking ? ReplyPrinter::Print::kAll
                                             : ReplyPrinter::Print::kContent;
  auto printer = std::make_shared<ReplyPrinter>(engine->tokenizer, reply, print, !options.model.quiet);
  const uint64_t seed = request.sampling.seed;
  const auto generation = std::make_shared<Generation>(std::move(request), printer);
  engine->scheduler->submit(generation);
  {
    const InterruptGuard guard(generation);
    engine->scheduler->run_until_finished(generation);
  }
  const std::string finish_reason = printer->finish_reason();
  const GenerationResult& result = printer->result();
  if (options.json) {
    Json json = {{"model", engine->name},
                 {"backend", engine->backend->name()},
                 {"content", printer->content()},
                 {"reasoning", printer->reasoning()},
                 {"finish_reason", finish_reason},
                 {"seed", seed},
                 {"prompt_tokens", result.prompt_tokens},
                 {"generated_tokens", result.generated_tokens},
                 {"load_seconds", engine->load_seconds},
                 {"prefill_seconds", result.prefill_seconds},
                 {"decode_seconds", result.decode_seconds}};
    std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  } else if (!options.model.quiet) {
    std::fprintf(stderr, "%s (%s, seed %llu)\n", timing_line(result).c_str(), engine->backend->description().c_str(),
                 static_cast<unsigned long long>(seed));
    if (finish_reason == "length")
      std::fprintf(stderr, "The answer was cut: --max-tokens or the context is used up.\n");
    if (finish_reason == "stop" && printer->content().empty() && !printer->reasoning().empty())
      std::fprintf(stderr, "The model thought but did not answer; --show-thinking shows it.\n");
  }
  return finish_reason == "cancelled" ? kExitInterrupted : 0;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "Answer one prompt and end");
  auto options = std::make_shared<RunOptions>();
  command->add_option("prompt", options->prompt, "The prompt, or - to read it from stdin")->required();
  CLI::Option* system = command->add_option("-s,--system", options->system, "System message");
  command->add_option("--stop", options->stop, "End the answer before this text; repeatable")->allow_extra_args(false);
  command->add_flag("--raw", options->raw, "Continue the text as it is, without the chat format")->excludes(system);
  command->add_flag("--no-think", options->no_think, "Answer without thinking first");
  command->add_flag("--show-thinking", options->show_thinking, "Print the thinking too");
  command->add_flag("--json", options->json, "Print one JSON object: answer, reasoning, counts, seconds");
  command->footer(
      "Examples:\n"
      "  calla run \"What is a kangaroo?\"\n"
      "  echo \"What is 3 plus 4?\" | calla run --no-think --greedy -\n"
      "  calla run --json --seed 7 -n 100 - < question.txt");
  add_model_options(*command, options->model);
  add_sampling_options(*command, options->sampling);
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace calla
