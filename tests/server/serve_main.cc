// A bare server for the Python suite: serve_main MODEL [--name value]...; prints its URL once it listens.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "base/error.h"
#include "server/serve.h"

int main(int argc, char** argv) {
  using namespace calla;
  ServeOptions options;
  if (argc < 2) return 2;
  options.engine.model = argv[1];
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--host") options.http.host = value;
    if (name == "--port") options.http.port = std::atoi(value.c_str());
    if (name == "--api-key") options.access.api_key = value;
    if (name == "--cors-origin") options.access.cors_origins.push_back(value);
    if (name == "--context") options.engine.scheduler.context = std::atoi(value.c_str());
    if (name == "--max-sequences") options.engine.scheduler.max_sequences = std::atoi(value.c_str());
    if (name == "--max-queue") options.engine.scheduler.max_queue = std::atoi(value.c_str());
    if (name == "--max-connections") options.http.max_connections = std::atoi(value.c_str());
    if (name == "--max-body") options.http.max_body_bytes = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "--head-timeout-ms") options.http.head_timeout = std::chrono::milliseconds(std::atoi(value.c_str()));
    if (name == "--grace-ms") options.shutdown_grace = std::chrono::milliseconds(std::atoi(value.c_str()));
    if (name == "--cache-snapshots") options.engine.scheduler.cache_snapshots = std::atoi(value.c_str());
    if (name == "--prepare") options.engine.scheduler.prepare = value != "0";
    if (name == "--cache-dir-bytes")
      options.engine.scheduler.cache_dir_bytes = std::strtoull(value.c_str(), nullptr, 10);
    if (name == "--cache-dir") options.engine.scheduler.cache_dir = value;
    if (name == "--backend") options.engine.backend = value;
    if (name == "--threads") options.engine.backend_options.threads = std::atoi(value.c_str());
  }
  try {
    serve(options, {[](const std::string& line) { std::cerr << line + "\n"; },
                    [](const std::string& url) { std::cout << url << std::endl; }});
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
