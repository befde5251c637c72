// calla serve: the model behind an OpenAI-compatible API, for agents and SDKs on this machine.
#include "server/serve.h"

#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/terminal.h"

namespace calla {
namespace {

struct ServeCommand {
  ModelOptions model;
  ServeOptions serve;
  double cache_gb = 4;
  double cache_dir_gb = 20;
};

int serve(const ServeCommand& command) {
  ServeOptions options = command.serve;
  set_cache(options.engine.scheduler, command.cache_gb);
  if (command.cache_gb == 0 && !options.engine.scheduler.cache_dir.empty())
    throw UsageError("--cache-dir keeps what the cache in memory has, which --cache-gb 0 switches off; leave one out");
  options.engine.scheduler.cache_dir_bytes = static_cast<uint64_t>(command.cache_dir_gb * 1e9);
  options.engine = engine_options(command.model, options.engine.scheduler);
  if (options.access.api_key.empty())
    if (const char* key = std::getenv("CALLA_API_KEY")) options.access.api_key = key;
  const bool quiet = command.model.quiet;
  ServeEvents events;
  if (!quiet) events.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  events.on_listening = [quiet](const std::string& url) {
    std::printf("%s\n", url.c_str());
    std::fflush(stdout);
    if (!quiet)
      std::fprintf(stderr, "Listening. A chat page: %s/   OpenAI clients: base_url=%s/v1   Ctrl-C ends.\n", url.c_str(),
                   url.c_str());
  };
  serve(options, events);
  return 0;
}

}  // namespace

void add_serve_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("serve", "Answer OpenAI- and Anthropic-style requests over HTTP");
  auto options = std::make_shared<ServeCommand>();
  ServeOptions& serve_options = options->serve;
  SchedulerOptions& scheduler = serve_options.engine.scheduler;
  serve_options.http.port = 8080;
  command->add_option("--host", serve_options.http.host, "Address to listen on")
      ->check(not_empty())
      ->capture_default_str();
  command->add_option("-p,--port", serve_options.http.port, "Port; 0: any free one")
      ->check(between(0, 65535))
      ->capture_default_str();
  command
      ->add_option("--api-key", serve_options.access.api_key,
                   "Ask for this key (better in $CALLA_API_KEY, which other users cannot see)")
      ->check(not_empty());
  command->add_flag("--insecure", serve_options.insecure, "Allow an address that others reach without an API key");
  command->add_option("--cors-origin", serve_options.access.cors_origins, "Web page that may use the API; repeatable")
      ->check(not_empty())
      ->allow_extra_args(false);
  command->add_option("--allowed-host", serve_options.access.allowed_hosts, "Further name of this server; repeatable")
      ->check(not_empty())
      ->allow_extra_args(false);
  command->add_option("--model-name", serve_options.model_id, "Name in the API (default: the directory's)")
      ->check(not_empty());
  command->add_option("--max-sequences", scheduler.max_sequences, "Requests answered at once")
      ->check(between(1, 256))
      ->capture_default_str();
  command->add_option("--max-queue", scheduler.max_queue, "Requests that may wait; more are refused")
      ->check(between(0, 65536))
      ->capture_default_str();
  command->add_option("--cache-gb", options->cache_gb, "Memory for the prefix cache; 0: none")
      ->check(between(0.0, 10000.0))
      ->capture_default_str();
  command->add_flag("!--no-prepare", scheduler.prepare,
                    "Do not read an answered chat ahead while nothing else is to do");
  command->add_option("--cache-dir", scheduler.cache_dir, "Keep the prefix cache here too, for after a restart")
      ->check(not_empty())
      ->type_name("DIR");
  command->add_option("--cache-dir-gb", options->cache_dir_gb, "Size limit of --cache-dir")
      ->check(between(0.0, 100000.0))
      ->capture_default_str();
  command->footer(
      "stdout gets one line, the URL, once requests are answered. SIGTERM and Ctrl-C end it:\n"
      "running replies get ten seconds; a second signal cuts them at once.");
  add_model_options(*command, options->model);
  command->callback([options, &exit_code] { exit_code = serve(*options); });
}

}  // namespace calla
