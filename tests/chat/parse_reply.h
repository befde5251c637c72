#pragma once
// A reply put together from the parser's events, in one line of text that tests can compare.
#include <cstdlib>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "chat/stream_parser.h"

namespace calla {

struct ParsedReply {
  std::string reasoning;
  std::string content;
  struct Call {
    std::string id, name, arguments;
    bool complete = false;
    bool operator==(const Call&) const = default;
  };
  std::vector<Call> calls;

  bool operator==(const ParsedReply&) const = default;
};

inline void PrintTo(const ParsedReply& reply, std::ostream* out) {
  *out << "reasoning " << Json(reply.reasoning).dump(-1, ' ', false, Json::error_handler_t::replace) << ", content "
       << Json(reply.content).dump(-1, ' ', false, Json::error_handler_t::replace);
  for (const auto& call : reply.calls) {
    *out << ", " << call.id << ' ' << call.name << ' ' << call.arguments << (call.complete ? "" : " (unfinished)");
  }
}

inline void add_events(ParsedReply& reply, const std::vector<ReplyEvent>& events) {
  for (const ReplyEvent& event : events) {
    switch (event.kind) {
      case ReplyEvent::Kind::kReasoning:
        reply.reasoning += event.text;
        break;
      case ReplyEvent::Kind::kContent:
        reply.content += event.text;
        break;
      case ReplyEvent::Kind::kCallStart:
        if (event.call != static_cast<int>(reply.calls.size())) std::abort();  // indices count up from 0
        reply.calls.push_back({event.id, event.name, "", false});
        break;
      case ReplyEvent::Kind::kCallArguments:
        reply.calls.at(static_cast<size_t>(event.call)).arguments += event.text;
        break;
      case ReplyEvent::Kind::kCallEnd:
        reply.calls.at(static_cast<size_t>(event.call)).complete = true;
        break;
    }
  }
}

struct ParseRequest {
  bool thinking = false;
  std::string tools;  // JSON
  bool cut = false;
};

inline ParsedReply parse_chunks(const std::vector<std::string_view>& chunks, const ParseRequest& request) {
  ParserOptions options;
  options.starts_in_thinking = request.thinking;
  if (!request.tools.empty()) options.tools = parse_tools(parse_json(request.tools));
  options.make_call_id = [n = 0]() mutable { return "id" + std::to_string(n++); };
  StreamParser parser(std::move(options));
  ParsedReply reply;
  std::vector<ReplyEvent> events;
  for (const std::string_view chunk : chunks) parser.push(chunk, events);
  parser.finish(request.cut, events);
  add_events(reply, events);
  return reply;
}

}  // namespace calla
