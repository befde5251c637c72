#include "server/serve.h"

#include <pthread.h>
#include <csignal>
#include <ctime>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/error.h"
#include "model/sampling_defaults.h"
#include "server/api_server.h"
#include "server/constraints.h"
#include "server/service.h"

namespace calla {
namespace {

// Keeps SIGINT and SIGTERM from the threads made meanwhile, so that one thread can wait for them; and SIGUSR1, which
// wakes that thread when there is nothing left to wait for.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &signals_, &previous_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  const sigset_t& set() const { return signals_; }

 private:
  sigset_t signals_{};
  sigset_t previous_{};
};

// Calls `on_signal` on a thread of its own for each SIGINT and SIGTERM.
class SignalThread {
 public:
  SignalThread(const BlockedSignals& signals, std::function<void()> on_signal)
      : thread_([this, &signals, on_signal = std::move(on_signal)] {
          int signal = 0;
          while (sigwait(&signals.set(), &signal) == 0 && !finished_) {
            if (signal != SIGUSR1) on_signal();
          }
        }) {}
  ~SignalThread() {
    finished_ = true;
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  SignalThread(const SignalThread&) = delete;
  SignalThread& operator=(const SignalThread&) = delete;

 private:
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
  const BlockedSignals signals;

  // Listening comes first: a port that is taken should not cost the loading of a model. Clients wait until run().
  std::optional<ApiServer> api;
  HttpServer http(
      options.http, [&](HttpExchange& exchange) { api->handle(exchange); },
      [&](HttpExchange& exchange, const HttpError& error) { api->handle_error(exchange, error); });

  if (!options.engine.warn) options.engine.warn = log;
  const auto engine = load_engine(options.engine);
  SchedulerService service(*engine->scheduler);
  ReplayStore replay;
  ServedModel model;
  model.id = options.model_id.empty() ? engine->name : options.model_id;
  model.created = std::time(nullptr);
  model.tokenizer = &engine->tokenizer;
  model.service = &service;
  model.stop_tokens = engine->stop_tokens();
  model.trie = make_token_trie(engine->tokenizer);
  model.replay = &replay;
  model.sampling_defaults = sampling_defaults(engine->model.config.generation);
  model.vocabulary = std::min(engine->model.config.shape.vocab, engine->tokenizer.vocab_size());
  options.access.host = options.http.host;
  api.emplace(model, ApiOptions{.access = options.access, .log = log});

  std::jthread token_loop([&](const std::stop_token& stop) { engine->scheduler->run(stop); });
  int n_signals = 0;
  const SignalThread on_signal(signals, [&] {
    api->begin_shutdown();
    log(n_signals == 0 ? "stopping; a second signal stops at once" : "stopping at once");
    if (n_signals++ > 0) token_loop.request_stop();  // cancels what runs
    http.stop();
  });
  if (events.on_listening) events.on_listening(url(options, http.port()));
  http.run(options.shutdown_grace, [&] { token_loop.request_stop(); });  // so that clients are told
}

}  // namespace calla
