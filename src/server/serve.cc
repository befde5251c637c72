#include "server/serve.h"

#include <pthread.h>
#include <csignal>
#include <ctime>

#include <algorithm>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stop_token>
#include <thread>
#include <utility>

#include "backend/create.h"
#include "base/error.h"
#include "chat/template_check.h"
#include "model/load_model.h"
#include "server/api_server.h"
#include "server/constraints.h"
#include "server/service.h"
#include "tokenizer/tokenizer.h"

namespace calla {
namespace {

// Turns SIGINT and SIGTERM into calls on a thread of its own. Make it before other threads, so that they inherit the mask.
class SignalWatch {
 public:
  SignalWatch() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals_, &previous_);
  }

  void start(std::function<void()> on_signal) {
    thread_ = std::thread([this, on_signal = std::move(on_signal)] {
      int signal = 0;
      while (sigwait(&signals_, &signal) == 0 && !finished_) on_signal();
    });
  }

  ~SignalWatch() {
    if (thread_.joinable()) {
      finished_ = true;
      pthread_kill(thread_.native_handle(), SIGTERM);
      thread_.join();
    }
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }

 private:
  sigset_t signals_{};
  sigset_t previous_{};
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

SamplingParams sampling_defaults(const GenerationDefaults& file) {
  SamplingParams params;
  params.temperature = file.do_sample.value_or(true) ? file.temperature.value_or(1) : 0;
  params.top_k = file.top_k.value_or(0);
  params.top_p = file.top_p.value_or(1);
  params.min_p = file.min_p.value_or(0);
  params.presence_penalty = file.presence_penalty.value_or(0);
  params.repetition_penalty = file.repetition_penalty.value_or(1);
  return params;
}

// End tokens by config, generation_config and tokenizer together: a checkpoint often names only some of them in each.
std::vector<TokenId> stop_tokens(const ModelConfig& config, const Tokenizer& tokenizer) {
  std::vector<TokenId> tokens = config.eos;
  if (const auto eos = tokenizer.eos()) tokens.push_back(*eos);
  for (const char* text : {"<|im_end|>", "<|endoftext|>"}) {
    if (const auto token = tokenizer.find(text)) tokens.push_back(*token);
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

void refuse_insecure(const ServeOptions& options) {
  if (is_loopback(options.http.host) || !options.access.api_key.empty() || options.insecure) return;
  throw UsageError("listening on " + options.http.host +
                   " lets others use this server; protect it with --api-key, or say --insecure");
}

std::optional<std::string> check_template(const std::filesystem::path& directory) {
  std::ifstream file(directory / "chat_template.jinja", std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  return template_warning(text.str());
}

std::string url(const ServeOptions& options, int port) {
  const bool is_v6 = options.http.host.find(':') != std::string::npos;
  return "http://" + (is_v6 ? "[" + options.http.host + "]" : options.http.host) + ":" + std::to_string(port);
}

}  // namespace

void serve(ServeOptions options, const ServeEvents& events) {
  refuse_insecure(options);
  const auto log = [&events](const std::string& line) {
    if (events.log) events.log(line);
  };
  SignalWatch signals;

  const LoadedModel loaded = load_model(options.model);
  for (const std::string& warning : loaded.warnings) log(warning);
  if (const auto warning = check_template(options.model)) log(*warning);
  const Tokenizer tokenizer = Tokenizer::load(options.model);
  BackendOptions backend_options;
  if (options.threads > 0) backend_options.threads = options.threads;
  const auto backend = create_backend(options.backend, loaded.config.shape, loaded.weights, backend_options);
  Scheduler scheduler(*backend, loaded.config.shape, options.scheduler);
  SchedulerService service(scheduler);

  ReplayStore replay;
  ServedModel model;
  model.id = options.model_id;
  if (model.id.empty()) model.id = std::filesystem::canonical(options.model).filename().string();
  model.created = std::time(nullptr);
  model.tokenizer = &tokenizer;
  model.service = &service;
  model.stop_tokens = stop_tokens(loaded.config, tokenizer);
  model.replay = &replay;
  model.trie = make_token_trie(tokenizer);
  model.sampling_defaults = sampling_defaults(loaded.config.generation);
  model.vocabulary = std::min(loaded.config.shape.vocab, tokenizer.vocab_size());

  options.access.host = options.http.host;
  ApiOptions api_options;
  api_options.access = options.access;
  api_options.log = log;
  ApiServer api(model, std::move(api_options));
  HttpServer http(
      options.http, [&](HttpExchange& exchange) { api.handle(exchange); },
      [&](HttpExchange& exchange, const HttpError& error) { api.handle_error(exchange, error); });

  std::jthread engine([&](const std::stop_token& stop) { scheduler.run(stop); });
  int n_signals = 0;
  signals.start([&] {
    api.begin_shutdown();
    log(n_signals == 0 ? "stopping; a second signal stops at once" : "stopping at once");
    if (n_signals++ > 0) engine.request_stop();  // cancels what runs
    http.stop();
  });
  if (events.on_listening) events.on_listening(url(options, http.port()));
  http.run(options.shutdown_grace);
  engine.request_stop();
}

}  // namespace calla
