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

#include "base/error.h"
#include "model/sampling_defaults.h"
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

void refuse_insecure(const ServeOptions& options) {
  if (is_loopback(options.http.host) || !options.access.api_key.empty() || options.insecure) return;
  throw UsageError("listening on " + options.http.host +
                   " lets others use this server; protect it with --api-key, or say --insecure");
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

  if (!options.engine.warn) options.engine.warn = log;
  const std::unique_ptr<LoadedEngine> loaded = load_engine(options.engine);
  SchedulerService service(*loaded->scheduler);

  ReplayStore replay;
  ServedModel model;
  model.id = options.model_id.empty() ? loaded->name : options.model_id;
  model.created = std::time(nullptr);
  model.tokenizer = &loaded->tokenizer;
  model.service = &service;
  model.stop_tokens = loaded->stop_tokens();
  model.replay = &replay;
  model.trie = make_token_trie(loaded->tokenizer);
  model.sampling_defaults = sampling_defaults(loaded->model.config.generation);
  model.vocabulary = std::min(loaded->model.config.shape.vocab, loaded->tokenizer.vocab_size());

  options.access.host = options.http.host;
  ApiOptions api_options;
  api_options.access = options.access;
  api_options.log = log;
  ApiServer api(model, std::move(api_options));
  HttpServer http(
      options.http, [&](HttpExchange& exchange) { api.handle(exchange); },
      [&](HttpExchange& exchange, const HttpError& error) { api.handle_error(exchange, error); });

  std::jthread engine([&](const std::stop_token& stop) { loaded->scheduler->run(stop); });
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
