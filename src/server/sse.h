#pragma once
// Server-sent events, and the two ways of waiting for replies: stream them to the client, or collect them.
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http_server.h"
#include "server/reply_run.h"

namespace calla {

// One event; `name` may be empty.
std::string sse_event(std::string_view data, std::string_view name = "");

// How a dialect of the API streams replies. Each function returns events, possibly none.
class ReplyDialect {
 public:
  virtual ~ReplyDialect() = default;
  virtual std::string begin(int choices) = 0;
  virtual std::string update(const ReplyUpdate& update) = 0;
  virtual std::string end() = 0;
  // In place of end(), when the engine has failed.
  virtual std::string failure(const std::string& message) = 0;
  // While nothing comes; by default a comment.
  virtual std::string keep_alive() { return ": keep-alive\n\n"; }
};

struct ReplyOutcome {
  bool client_left = false;
  std::vector<ReplySummary> summaries;  // of the finished replies
};

// Writes until all replies are finished or the client is gone, in which case they are cancelled.
ReplyOutcome stream_replies(HttpExchange& exchange, ReplyRun& run, ReplyDialect& dialect,
                            std::chrono::milliseconds keep_alive);

// Waits for all replies; nothing if the client is gone (they are cancelled then). Unfinished calls are left out. Throws
// HttpError if the engine fails or the server shuts down.
std::optional<std::vector<CollectedReply>> collect_replies(HttpExchange& exchange, ReplyRun& run);

}  // namespace calla
