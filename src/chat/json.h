#pragma once
// JSON as the chat format needs it: key order as received, integers of any size exact, and the two ways in
// which values are printed (as Python prints them, for the prompt; compact, for the API).
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace calla {

using Json = nlohmann::ordered_json;

// Parses one JSON text. An integer beyond 64 bits is kept as its digits (see is_big_integer). Throws
// RequestError with the place when the text is not JSON, not UTF-8, or nested deeper than `max_depth`.
Json parse_json(std::string_view text, int max_depth = 256);

// As parse_json, but returns a discarded value instead of throwing; for text that the model wrote.
Json try_parse_json(std::string_view text, int max_depth = 256);

// True for an integer that fits neither int64 nor uint64; nlohmann has no type for it, so parse_json stores
// its digits.
bool is_big_integer(const Json& value);
// "number", "string" and so on, for messages.
std::string json_type(const Json& value);

// Appends `text` between quotes, escaped as Python and nlohmann do (non-ASCII as it is), or without the
// quotes.
void append_json_string(std::string& out, std::string_view text);
void append_json_escaped(std::string& out, std::string_view text);

// As Python's json.dumps(value, ensure_ascii=False): ", " and ": ", floats in Python's shortest form.
std::string python_json(const Json& value);

// Without spaces; numbers as python_json.
std::string compact_json(const Json& value);

}  // namespace calla
