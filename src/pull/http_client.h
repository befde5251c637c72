#pragma once
// HttpClient: GET over HTTP(S) with libcurl, as downloading needs it. Redirects are followed here and not by libcurl, so
// that the token goes to the host that it is for and to no other. One client per thread; it keeps its connection open.
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace calla {

struct HttpOptions {
  std::string token{};  // sent as "Authorization: Bearer", never logged; empty: none
  int connect_timeout_s = 20;
  int stall_timeout_s = 30;                 // no byte for so long: the connection counts as lost
  const std::atomic<bool>* stop = nullptr;  // once true, transfers end soon
};

struct HttpResponse {
  int status = 0;                              // 0: no answer; see `error`
  std::map<std::string, std::string> headers;  // names in lower case; of the last hop, and x-linked-* of any
  std::string body;                            // if there was no sink, or the status was none of 200 and 206
  std::string error;                           // the connection failed or was cut, or the transfer was stopped
  bool is_complete() const { return error.empty(); }
  std::string header(const std::string& name) const;
};

class HttpClient {
 public:
  // Called with pieces of the body of a 200 or 206; false ends the transfer.
  using Sink = std::function<bool(const HttpResponse& head, const char* data, size_t bytes)>;

  explicit HttpClient(HttpOptions options);
  ~HttpClient();

  // `headers` are lines ("Range: bytes=5-"). Never throws for what the network does; throws PullError for a redirect
  // that must not be followed.
  HttpResponse get(const std::string& url, const std::vector<std::string>& headers = {}, const Sink& sink = nullptr);

 private:
  struct Handle;
  HttpResponse get_one(const std::string& url, const std::vector<std::string>& headers, bool with_token,
                       const Sink& sink, std::string& redirect);

  HttpOptions options_;
  std::unique_ptr<Handle> handle_;
};

// "https://host:port/path?..." -> "https://host:port", lower case; empty if it is no http(s) URL.
std::string url_origin(std::string_view url);
// Without the query, which may be signed; for messages.
std::string printable_url(std::string_view url);
// Percent-encodes all but letters, digits and "-._~/".
std::string encode_path(std::string_view path);

}  // namespace calla
