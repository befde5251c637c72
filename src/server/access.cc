#include "server/access.h"

#include <arpa/inet.h>

#include <algorithm>

namespace calla {
namespace {

// "name:port", "[::1]:port" or "name" to the name, in lower case. What is neither stays as it is, and no known name.
std::string host_name(std::string_view authority) {
  if (!authority.starts_with('[')) return lower(authority.substr(0, authority.find(':')));
  const size_t end = authority.find(']');
  const bool whole = end != std::string_view::npos && (end + 1 == authority.size() || authority[end + 1] == ':');
  return whole && end > 1 ? lower(authority.substr(1, end - 1)) : lower(authority);
}

bool is_address(const std::string& name) {
  in6_addr buffer{};
  return ::inet_pton(AF_INET, name.c_str(), &buffer) == 1 || ::inet_pton(AF_INET6, name.c_str(), &buffer) == 1;
}

bool contains(const std::vector<std::string>& list, std::string_view item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

bool is_listed(std::string_view origin, const AccessOptions& options) {
  return contains(options.cors_origins, origin) || contains(options.cors_origins, "*");
}

}  // namespace

bool is_loopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host == "127.0.0.1" ||
         (host.starts_with("127.") && is_address(std::string(host)));
}

bool equal_secrets(std::string_view given, std::string_view secret) {
  unsigned difference = given.size() == secret.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); i++) {
    const char expected = secret.empty() ? '\0' : secret[i % secret.size()];
    difference |= static_cast<unsigned>(static_cast<unsigned char>(given[i] ^ expected));
  }
  return difference == 0;
}

void check_origin(const HttpRequest& request, const AccessOptions& options) {
  const std::string_view authority = request.header("host").value_or("");
  const std::string name = host_name(authority);
  // A page can only be made to reach us under its own name, never under an address or localhost.
  const bool known = name.empty() || is_address(name) || name == "localhost" || name == lower(options.host) ||
                     contains(options.allowed_hosts, name);
  if (!known && options.api_key.empty()) {
    throw HttpError(
        403, "this server is not known as '" + name.substr(0, 100) + "'; start it with --allowed-host to allow this");
  }
  const auto origin = request.header("origin");
  if (!origin || is_listed(*origin, options)) return;
  if (*origin == "http://" + std::string(authority) || *origin == "https://" + std::string(authority)) return;
  throw HttpError(403, "web pages of other sites may not use this server; start it with --cors-origin to allow one");
}

void check_key(const HttpRequest& request, const AccessOptions& options) {
  if (options.api_key.empty()) return;
  std::string_view given = request.header("x-api-key").value_or("");
  if (const auto authorization = request.header("authorization")) {
    constexpr std::string_view kBearer = "bearer ";
    if (lower(authorization->substr(0, kBearer.size())) == kBearer) given = authorization->substr(kBearer.size());
  }
  if (equal_secrets(given, options.api_key)) return;
  throw HttpError(401, given.empty() ? "this server needs an API key; send it as 'Authorization: Bearer KEY'"
                                     : "the API key is wrong");
}

HttpHeaders cors_headers(const HttpRequest& request, const AccessOptions& options) {
  const auto origin = request.header("origin");
  if (!origin || !is_listed(*origin, options)) return {};
  return {
      {"Access-Control-Allow-Origin", std::string(*origin)},
      {"Vary", "Origin"},
      {"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
      {"Access-Control-Allow-Headers", "authorization, content-type, x-api-key, anthropic-version, anthropic-beta"}};
}

}  // namespace calla
