// Fuzz target of what comes over the network: HTTP heads, and the requests of the three dialects up to their prompts.
// Nothing but the documented errors may come out.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "server/anthropic.h"
#include "server/http_message.h"
#include "server/openai.h"
#include "server/responses.h"

namespace {

using namespace calla;

void parse_http(std::string_view text) {
  try {
    parse_http_head(text);
  } catch (const HttpError&) {
  }
  try {
    parse_chunk_size(text.substr(0, text.find('\n')));
  } catch (const HttpError&) {
  }
}

template <typename Parse>
void parse_request(std::string_view text, Parse parse) {
  try {
    const ChatRequest request = parse(parse_json(text, 128));
    render_prompt(request.messages, request.tools, request.render);
  } catch (const RequestError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  parse_http(text);
  parse_request(text, [](const Json& json) { return openai::parse_chat_request(json, {}); });
  parse_request(text, [](const Json& json) { return anthropic::parse_messages_request(json, {}); });
  parse_request(text, [](const Json& json) { return responses::parse_response_request(json, {}).chat; });
  return 0;
}
