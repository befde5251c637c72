#pragma once
// HTTP/1.1 messages as text: parsing a request's head strictly, printing a response's. Pure functions.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace calla {

// A request that cannot be served, with its HTTP status.
class HttpError : public Error {
 public:
  HttpError(int status, const std::string& message) : Error(message), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;  // without the query
  std::string query;
  HttpHeaders headers;  // names in lower case
  std::string body;

  bool keep_alive = true;
  bool knows_chunks = true;  // false: HTTP/1.0
  bool expects_continue = false;
  bool chunked = false;         // the body comes in chunks
  uint64_t content_length = 0;  // if it does not

  // The value of the header (name in lower case), or nothing.
  std::optional<std::string_view> header(std::string_view name) const;
};

// Parses everything up to the blank line, which is included. Throws HttpError: 400 for anything that is not plain
// HTTP/1.x (so that no proxy in front can read it differently), 431, 501, 505.
HttpRequest parse_http_head(std::string_view head);

// The size on a chunk's first line (without its line end). Throws HttpError.
uint64_t parse_chunk_size(std::string_view line);

std::string_view status_text(int status);

// How a response's body ends: after so many bytes, with an empty chunk, or with the connection.
struct BodyLength {
  enum class Kind { kBytes, kChunks, kConnection };
  Kind kind = Kind::kBytes;
  uint64_t bytes = 0;
};

// The head of a response, blank line included.
std::string response_head(int status, const HttpHeaders& headers, BodyLength length, bool keep_alive);

// Lower-case ASCII.
std::string lower(std::string_view text);

}  // namespace calla
