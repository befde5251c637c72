// Fuzz target of the renderer and the reply parser. The input is a reply's text, or a request as JSON.
// What must hold: no crash, and the parser's result does not depend on the chunks.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/error.h"
#include "chat/render.h"
#include "tests/chat/parse_reply.h"

namespace {

using namespace calla;

constexpr const char* kTools =
    R"([{"type":"function","function":{"name":"f","parameters":{"properties":{"s":{"type":"string"},"i":{"type":"integer"},
       "n":{"type":["string","null"]},"o":{"type":"object"}}}}}])";

void parse_both_ways(std::string_view text, uint8_t flags) {
  const ParseRequest request{(flags & 1) != 0, (flags & 2) != 0 ? kTools : "", (flags & 4) != 0};
  const size_t step = 1 + (flags >> 4);
  std::vector<std::string_view> chunks;
  for (size_t i = 0; i < text.size(); i += step) chunks.push_back(text.substr(i, step));
  const ParsedReply whole = parse_chunks({text}, request);
  check(parse_chunks(chunks, request) == whole, "the result depends on the chunks");
  for (const auto& call : whole.calls) {
    // Bytes that are not UTF-8 pass through, but the JSON around them is sound.
    if (call.complete) check(call.arguments.front() == '{' && call.arguments.back() == '}', "arguments are an object");
  }
}

void render_request(std::string_view text) {
  try {
    const Json request = parse_json(text);
    if (!request.is_object()) return;
    const auto messages = parse_messages(request.value("messages", Json()));
    const auto tools = parse_tools(request.value("tools", Json()));
    for (const bool thinking : {false, true}) render_prompt(messages, tools, {thinking, !thinking, true});
  } catch (const RequestError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  parse_both_ways(text, data[0]);
  render_request(text);
  return 0;
}
