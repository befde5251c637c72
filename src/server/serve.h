#pragma once
// `calla serve`: loads a model and serves it until SIGINT or SIGTERM.
#include <chrono>
#include <functional>
#include <string>

#include "runtime/loaded_engine.h"
#include "server/access.h"
#include "server/http_server.h"

namespace calla {

struct ServeOptions {
  EngineOptions engine;
  std::string model_id;  // the name in the API; empty: the directory's
  HttpServerOptions http;
  AccessOptions access;                              // its `host` is set from http.host
  bool insecure = false;                             // allow a public address without an API key
  std::chrono::milliseconds shutdown_grace{10'000};  // for replies that are not finished when a signal comes
};

// What the user is told while the server runs.
struct ServeEvents {
  std::function<void(const std::string&)> log;               // a line; from any thread
  std::function<void(const std::string& url)> on_listening;  // once: requests are answered from now on
};

// Returns after SIGINT or SIGTERM: running replies get `shutdown_grace`, then all is cancelled; a second signal cancels
// at once. Throws UsageError for an insecure combination of options, CheckpointError, DeviceError.
void serve(ServeOptions options, const ServeEvents& events);

}  // namespace calla
