#include "server/sse.h"

#include <utility>

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;

// How soon a client that hangs up is noticed.
constexpr std::chrono::milliseconds kPoll{50};

std::string failure_message(const ReplySummary& summary) {
  if (summary.end == ReplyEnd::kCancelled) return "the server is shutting down";
  return summary.result.error.empty() ? "the engine failed" : summary.result.error;
}

bool failed(const ReplyUpdate& update) {
  return update.kind == ReplyUpdate::Kind::kFinished &&
         (update.summary.end == ReplyEnd::kCancelled || update.summary.end == ReplyEnd::kError);
}

}  // namespace

std::string sse_event(std::string_view data, std::string_view name) {
  std::string text;
  if (!name.empty()) text.append("event: ").append(name).append("\n");
  return text.append("data: ").append(data).append("\n\n");
}

ReplyOutcome stream_replies(HttpExchange& exchange, ReplyRun& run, ReplyDialect& dialect,
                            std::chrono::milliseconds keep_alive) {
  ReplyOutcome outcome;
  exchange.begin_stream(200, "text/event-stream");
  bool alive = exchange.write(dialect.begin(run.choices()));
  auto last_write = Clock::now();
  while (alive && !run.finished()) {
    const auto update = run.wait(kPoll);
    if (exchange.client_gone()) {
      alive = false;
      break;
    }
    std::string text;
    if (update) {
      text = dialect.update(*update);
      if (update->kind == ReplyUpdate::Kind::kFinished) outcome.summaries.push_back(update->summary);
      if (failed(*update)) {
        run.cancel();
        exchange.write(dialect.failure(failure_message(update->summary)));
        exchange.end_stream();
        return outcome;
      }
      if (text.empty() && update->kind == ReplyUpdate::Kind::kProgress) {
        text = ": prompt " + std::to_string(update->done) + "/" + std::to_string(update->total) + "\n\n";
      }
    } else if (Clock::now() - last_write > keep_alive) {
      text = dialect.keep_alive();
    }
    if (text.empty()) continue;
    alive = exchange.write(text);
    last_write = Clock::now();
  }
  if (alive) {
    alive = exchange.write(dialect.end());
    exchange.end_stream();
  }
  if (!alive) run.cancel();
  outcome.client_left = !alive;
  return outcome;
}

std::optional<std::vector<CollectedReply>> collect_replies(HttpExchange& exchange, ReplyRun& run) {
  std::vector<CollectedReply> replies(static_cast<size_t>(run.choices()));
  while (!run.finished()) {
    const auto update = run.wait(kPoll);
    if (exchange.client_gone()) {
      run.cancel();
      return std::nullopt;
    }
    if (!update) continue;
    if (failed(*update)) {
      run.cancel();
      throw HttpError(update->summary.end == ReplyEnd::kCancelled ? 503 : 500, failure_message(update->summary));
    }
    replies[static_cast<size_t>(update->choice)].add(*update);
  }
  for (CollectedReply& reply : replies) reply.drop_unfinished_calls();
  return replies;
}

}  // namespace calla
