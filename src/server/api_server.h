#pragma once
// ApiServer: the routes of `calla serve`.
//
// Reading order of this folder: http_message.h, http_server.h (HTTP), access.h (who may), service.h (the engine seen
// from here), chat_request.h, reply_run.h and sse.h (one request's replies), then a dialect each: openai.h,
// completions.h, anthropic.h, responses.h; serve.h puts all together.
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/access.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/openai.h"
#include "server/service.h"

namespace calla {

struct ApiOptions {
  AccessOptions access;
  std::chrono::milliseconds keep_alive{5'000};  // between comments in a silent stream
  int max_json_depth = 128;
  // One line for each request; never with text of messages. May be called from many threads at once.
  std::function<void(const std::string&)> log;
};

class ApiServer {
 public:
  // `model`, and what it points to, must outlive the server.
  ApiServer(const ServedModel& model, ApiOptions options);

  void handle(HttpExchange& exchange);
  void handle_error(HttpExchange& exchange, const HttpError& error);

  // From now on /health says that the server is shutting down, and nothing new is begun.
  void begin_shutdown() { shutting_down_ = true; }

 private:
  using Handler = void (ApiServer::*)(HttpExchange&);
  struct Route {
    const char* method;
    const char* path;
    Handler handler;
    bool is_public;  // needs no API key
  };
  static const Route kRoutes[];

  void route(HttpExchange& exchange);
  Json body(const HttpExchange& exchange) const;
  void send_json(HttpExchange& exchange, int status, const Json& json);
  void send_error(HttpExchange& exchange, int status, const std::string& message, const std::string& field = "",
                  const std::string& code = "");
  openai::AnswerHead head(const std::string& prefix) const;
  // Streams the replies, counts, and logs a line.
  void stream(HttpExchange& exchange, ReplyRun& run, ReplyDialect& dialect);
  std::optional<std::vector<CollectedReply>> collect(HttpExchange& exchange, ReplyRun& run);
  void prepare_next_turn(const ChatRequest& request, const ReplyRun& run);
  void log_replies(const HttpExchange& exchange, const std::vector<ReplySummary>& summaries);
  void log_left(const HttpExchange& exchange);

  void health(HttpExchange& exchange);
  void metrics(HttpExchange& exchange);
  void models(HttpExchange& exchange);
  void page(HttpExchange& exchange);
  void tokenize(HttpExchange& exchange);
  void detokenize(HttpExchange& exchange);
  void chat_completions(HttpExchange& exchange);
  void completions(HttpExchange& exchange);
  void responses(HttpExchange& exchange);
  void messages(HttpExchange& exchange);
  void count_tokens(HttpExchange& exchange);

  const ServedModel& model_;
  const ApiOptions options_;
  HttpMetrics metrics_;
  std::atomic<bool> shutting_down_{false};
};

}  // namespace calla
