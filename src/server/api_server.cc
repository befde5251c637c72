#include "server/api_server.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <random>
#include <utility>

#include "base/error.h"
#include "server/anthropic.h"
#include "server/completions.h"
#include "server/next_turn.h"
#include "server/page.h"
#include "server/responses.h"
#include "server/sse.h"
#include "tokenizer/utf8.h"

namespace calla {
namespace {

constexpr const char* kJsonType = "application/json";

std::string random_id() {
  static constexpr char kHex[] = "0123456789abcdef";
  std::random_device device;
  std::string id;
  for (int i = 0; i < 4; i++) {
    for (uint32_t word = device(), n = 0; n < 8; n++, word >>= 4) id += kHex[word & 15];
  }
  return id;
}

// Both /v1/chat/completions and /chat/completions: clients disagree on where the base URL ends.
std::string_view without_version(std::string_view path) {
  constexpr std::string_view kVersion = "/v1";
  if (path.starts_with("/v1/")) path.remove_prefix(kVersion.size());
  return path;
}

bool is_anthropic(const HttpRequest& request) { return without_version(request.path).starts_with("/messages"); }

// "0.4 ms", "812 ms", "12.3 s".
std::string duration(double seconds) {
  char text[64];
  if (seconds < 1) {
    std::snprintf(text, sizeof text, "%.*f ms", seconds < 0.01 ? 1 : 0, seconds * 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.1f s", seconds);
  }
  return text;
}

}  // namespace

const ApiServer::Route ApiServer::kRoutes[] = {
    {"GET", "/", &ApiServer::page, true},
    {"GET", "/health", &ApiServer::health, true},
    {"GET", "/metrics", &ApiServer::metrics, false},
    {"GET", "/models", &ApiServer::models, false},
    {"POST", "/tokenize", &ApiServer::tokenize, false},
    {"POST", "/detokenize", &ApiServer::detokenize, false},
    {"POST", "/chat/completions", &ApiServer::chat_completions, false},
    {"POST", "/completions", &ApiServer::completions, false},
    {"POST", "/responses", &ApiServer::responses, false},
    {"POST", "/messages", &ApiServer::messages, false},
    {"POST", "/messages/count_tokens", &ApiServer::count_tokens, false},
};

ApiServer::ApiServer(const ServedModel& model, ApiOptions options) : model_(model), options_(std::move(options)) {}

void ApiServer::handle(HttpExchange& exchange) {
  try {
    check_origin(exchange.request(), options_.access);
    for (auto& [name, value] : cors_headers(exchange.request(), options_.access)) exchange.add_header(name, value);
    route(exchange);
  } catch (const RequestError& error) {
    if (exchange.started()) return;
    if (error.code() == "queue_full") {
      exchange.add_header("Retry-After", "1");
      send_error(exchange, 503, error.what(), error.field(), error.code());
    } else {
      send_error(exchange, 400, error.what(), error.field(), error.code());
    }
  } catch (const HttpError& error) {
    if (!exchange.started()) handle_error(exchange, error);
  } catch (const std::exception& error) {
    if (options_.log) options_.log(std::string("internal error: ") + error.what());
    if (!exchange.started()) send_error(exchange, 500, "internal error; the server's log says more");
  }
}

void ApiServer::handle_error(HttpExchange& exchange, const HttpError& error) {
  send_error(exchange, error.status(), error.what());
}

void ApiServer::route(HttpExchange& exchange) {
  const HttpRequest& request = exchange.request();
  const std::string_view path = without_version(request.path);
  if (request.method == "OPTIONS") {  // a browser asks whether a page may send its request
    metrics_.count(204);
    exchange.send(204, "", "");
    return;
  }
  std::string allowed;
  for (const Route& route : kRoutes) {
    if (path != route.path && !(path.starts_with("/models/") && route.handler == &ApiServer::models)) continue;
    if (request.method == route.method || (request.method == "HEAD" && std::string_view(route.method) == "GET")) {
      if (!route.is_public) check_key(request, options_.access);
      (this->*route.handler)(exchange);
      return;
    }
    allowed = route.method;
  }
  if (!allowed.empty()) {
    exchange.add_header("Allow", allowed);
    throw HttpError(405, "this path takes " + allowed + " requests");
  }
  throw HttpError(404, "there is nothing at this path; docs/api.md lists the API's paths");
}

Json ApiServer::body(const HttpExchange& exchange) const {
  if (shutting_down_) throw HttpError(503, "the server is shutting down");
  return parse_json(exchange.request().body, options_.max_json_depth);
}

void ApiServer::send_json(HttpExchange& exchange, int status, const Json& json) {
  metrics_.count(status);
  exchange.send(status, kJsonType, compact_json(json));
}

void ApiServer::send_error(HttpExchange& exchange, int status, const std::string& message, const std::string& field,
                           const std::string& code) {
  const std::string text = repair_utf8(message);  // names from the request may be cut in it
  const char* type = "invalid_request_error";
  if (status == 401) type = "authentication_error";
  if (status == 403) type = "permission_error";
  if (status == 404) type = "not_found_error";
  if (status == 429 || status == 503) type = "overloaded_error";
  if (status == 500) type = is_anthropic(exchange.request()) ? "api_error" : "server_error";
  if (is_anthropic(exchange.request())) {
    send_json(exchange, status, {{"type", "error"}, {"error", {{"type", type}, {"message", text}}}});
  } else {
    send_json(exchange, status, openai::error(text, type, field, code));
  }
}

openai::AnswerHead ApiServer::head(const std::string& prefix) const {
  return {prefix + random_id(), model_.id, std::time(nullptr)};
}

void ApiServer::stream(HttpExchange& exchange, ReplyRun& run, ReplyDialect& dialect) {
  metrics_.count(200);
  const ReplyOutcome outcome = stream_replies(exchange, run, dialect, options_.keep_alive);
  outcome.client_left ? log_left(exchange) : log_replies(exchange, outcome.summaries);
}

std::optional<std::vector<CollectedReply>> ApiServer::collect(HttpExchange& exchange, ReplyRun& run) {
  auto replies = collect_replies(exchange, run);
  if (!replies) {
    log_left(exchange);
    return replies;
  }
  std::vector<ReplySummary> summaries;
  summaries.reserve(replies->size());
  for (const CollectedReply& reply : *replies) summaries.push_back(reply.summary);
  log_replies(exchange, summaries);
  return replies;
}

// Called when the reply has been delivered, so that nobody waits for this.
void ApiServer::prepare_next_turn(const ChatRequest& request, const ReplyRun& run) {
  const CollectedReply* reply = run.only_reply();
  if (!reply || shutting_down_ || !model_.service->prepares()) return;
  Preparation preparation;
  preparation.tokens = next_turn_prefix(model_, request, *reply);
  if (preparation.tokens.empty()) return;
  preparation.on_ready = [this](const PreparationResult& result) {
    if (!options_.log) return;
    options_.log("prepared a next turn: " + std::to_string(result.tokens) + " tokens, of which " +
                 std::to_string(result.known_tokens) + " were known and " + std::to_string(result.computed_tokens) +
                 " read, " + duration(result.seconds) + "; interrupted " + std::to_string(result.interruptions) +
                 " times");
  };
  model_.service->prepare(std::move(preparation));
}

void ApiServer::log_left(const HttpExchange& exchange) {
  metrics_.disconnects++;
  if (options_.log) options_.log(exchange.request().path + ": the client left; its request is cancelled");
}

namespace {

// For the log; clients get their dialect's words.
const char* end_name(ReplyEnd end) {
  switch (end) {
    case ReplyEnd::kStop:
      return "stop";
    case ReplyEnd::kStopString:
      return "stop string";
    case ReplyEnd::kToolCalls:
      return "tool calls";
    case ReplyEnd::kLength:
      return "length";
    case ReplyEnd::kCancelled:
      return "cut by the server's end";
    case ReplyEnd::kError:
      return "error";
  }
  return "?";
}

}  // namespace

void ApiServer::log_replies(const HttpExchange& exchange, const std::vector<ReplySummary>& summaries) {
  if (!options_.log) return;
  for (const ReplySummary& summary : summaries) {
    const GenerationResult& result = summary.result;
    std::string line = exchange.request().path + ": prompt " + std::to_string(result.prompt_tokens) + " tokens, " +
                       std::to_string(result.cached_tokens) + " cached";
    if (!result.cache_note.empty()) line += " (" + result.cache_note + ")";
    line += ", " + duration(result.prefill_seconds) + "; reply " + std::to_string(result.generated_tokens) +
            " tokens, " + duration(result.decode_seconds) + "; " + end_name(summary.end);
    if (summary.end == ReplyEnd::kError) line += ": " + result.error;
    options_.log(line);
  }
}

// --- Small routes ----------------------------------------------------------------------------------------------------

void ApiServer::health(HttpExchange& exchange) {
  const SchedulerStats stats = model_.service->stats();
  Json json = {{"status", "ok"}, {"running", stats.running}, {"queued", stats.queued}};
  if (shutting_down_) {
    json["status"] = "shutting down";
  } else if (!stats.device_error.empty()) {
    json["status"] = "device fault";
    json["message"] = "the device failed: " + repair_utf8(stats.device_error) +
                      "; requests are still tried, and one that succeeds ends this state; if none does, restart";
  }
  send_json(exchange, json["status"] == "ok" ? 200 : 503, json);
}

void ApiServer::metrics(HttpExchange& exchange) {
  metrics_.count(200);
  exchange.send(200, "text/plain; version=0.0.4", prometheus_text(metrics_, model_.service->stats()));
}

void ApiServer::models(HttpExchange& exchange) {
  const Json model = {{"id", model_.id},
                      {"object", "model"},
                      {"created", model_.created},
                      {"owned_by", "calla"},
                      {"context_length", model_.service->context()}};
  const std::string_view path = without_version(exchange.request().path);
  if (path == "/models") {
    send_json(exchange, 200, {{"object", "list"}, {"data", Json::array({model})}});
  } else if (path.substr(std::string_view("/models/").size()) == model_.id) {
    send_json(exchange, 200, model);
  } else {
    send_error(exchange, 404, "there is no such model here; this server has '" + model_.id + "'", "model",
               "model_not_found");
  }
}

void ApiServer::page(HttpExchange& exchange) {
  metrics_.count(200);
  // The page holds all it needs, and may talk to this server alone.
  exchange.send(200, "text/html; charset=utf-8", chat_page(),
                {{"Content-Security-Policy",
                  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
                  "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                 {"X-Content-Type-Options", "nosniff"}});
}

void ApiServer::tokenize(HttpExchange& exchange) {
  const Json json = body(exchange);
  const Fields fields(json);
  const auto content = fields.string("content");
  if (!content) fields.refuse("content", "is missing");
  const bool special = fields.boolean("parse_special").value_or(true);
  const auto tokens = model_.tokenizer->encode(*content, special ? AddedTokens::kRecognise : AddedTokens::kPlainText);
  Json list = Json::array();
  for (const TokenId token : tokens) list.push_back(token);
  send_json(exchange, 200, {{"tokens", std::move(list)}});
}

void ApiServer::detokenize(HttpExchange& exchange) {
  const Json json = body(exchange);
  const Fields fields(json);
  const Json* list = fields.find("tokens");
  if (!list || !list->is_array()) fields.refuse("tokens", "must be a list of tokens");
  std::vector<TokenId> tokens;
  for (const Json& item : *list) {
    if (!item.is_number_integer() || item.get<int64_t>() < 0 || item.get<int64_t>() >= model_.vocabulary) {
      fields.refuse("tokens", "holds " + compact_json(item) + ", which is no token");
    }
    tokens.push_back(item.get<TokenId>());
  }
  send_json(exchange, 200, {{"content", model_.tokenizer->decode(tokens, false)}});
}

// --- OpenAI ----------------------------------------------------------------------------------------------------------

void ApiServer::chat_completions(HttpExchange& exchange) {
  const ChatRequest request = openai::parse_chat_request(body(exchange), model_.sampling_defaults);
  const auto run = start_chat(model_, request);
  if (request.settings.stream) {
    openai::ChatDialect dialect(head("chatcmpl-"), request.settings);
    stream(exchange, *run, dialect);
  } else if (const auto replies = collect(exchange, *run)) {
    send_json(exchange, 200, openai::chat_response(head("chatcmpl-"), request.settings, *replies));
  }
  prepare_next_turn(request, *run);
}

void ApiServer::completions(HttpExchange& exchange) {
  const openai::CompletionRequest request = openai::parse_completion_request(body(exchange), model_);
  ReplyPlan plan;
  plan.prompts = request.prompts;
  plan.reply.raw = true;
  plan.reply.stop = request.settings.stop;
  ReplyRun run(model_, request.settings, std::move(plan));
  if (request.settings.stream) {
    openai::CompletionDialect dialect(head("cmpl-"), request);
    stream(exchange, run, dialect);
  } else if (const auto replies = collect(exchange, run)) {
    send_json(exchange, 200, openai::completion_response(head("cmpl-"), request, *replies));
  }
}

void ApiServer::responses(HttpExchange& exchange) {
  const auto request = responses::parse_response_request(body(exchange), model_.sampling_defaults);
  const auto run = start_chat(model_, request.chat);
  const responses::AnswerHead answer{random_id(), model_.id, std::time(nullptr)};
  if (request.chat.settings.stream) {
    responses::ResponseDialect dialect(answer, request);
    stream(exchange, *run, dialect);
  } else if (const auto replies = collect(exchange, *run)) {
    send_json(exchange, 200, responses::response_json(answer, request, replies->front()));
  }
  prepare_next_turn(request.chat, *run);
}

// --- Anthropic -------------------------------------------------------------------------------------------------------

void ApiServer::messages(HttpExchange& exchange) {
  const ChatRequest request = anthropic::parse_messages_request(body(exchange), model_.sampling_defaults);
  const auto run = start_chat(model_, request);
  const anthropic::AnswerHead answer{"msg_" + random_id(), model_.id};
  if (request.settings.stream) {
    anthropic::MessageDialect dialect(answer, run->prompt_tokens());
    stream(exchange, *run, dialect);
  } else if (const auto replies = collect(exchange, *run)) {
    send_json(exchange, 200, anthropic::message_response(answer, replies->front()));
  }
  prepare_next_turn(request, *run);
}

void ApiServer::count_tokens(HttpExchange& exchange) {
  const ChatRequest request = anthropic::parse_messages_request(body(exchange), model_.sampling_defaults, false);
  send_json(exchange, 200, {{"input_tokens", chat_prompt(model_, request).tokens.size()}});
}

}  // namespace calla
