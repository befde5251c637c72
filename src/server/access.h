#pragma once
// Who may talk to the server. Pure functions.
#include <string>
#include <string_view>
#include <vector>

#include "server/http_message.h"

namespace calla {

struct AccessOptions {
  std::string host = "127.0.0.1";          // what the server is bound to
  std::string api_key;                     // empty: none is needed
  std::vector<std::string> allowed_hosts;  // further names under which the server may be addressed
  std::vector<std::string> cors_origins;   // web pages that may use the API; "*": all. Empty: none but our own
};

// Whether the address is reachable from this machine alone.
bool is_loopback(std::string_view host);

// In constant time for a given length of `given`.
bool equal_secrets(std::string_view given, std::string_view secret);

// Throws HttpError 403 if the request comes from a web page that may not use the server: its Host is a foreign name
// that was made to point here (DNS rebinding; not checked when an API key protects the server), or its Origin is
// another site that cors_origins does not list.
void check_origin(const HttpRequest& request, const AccessOptions& options);

// Throws HttpError 401 unless the request carries the API key, as "Authorization: Bearer KEY" or "x-api-key: KEY".
void check_key(const HttpRequest& request, const AccessOptions& options);

// The CORS headers of an answer; none if the origin is not listed.
HttpHeaders cors_headers(const HttpRequest& request, const AccessOptions& options);

}  // namespace calla
