#include "pull/http_client.h"

#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <chrono>

#include "base/check.h"
#include "pull/pull_error.h"

namespace calla {
namespace {

constexpr int kMaxRedirects = 5;
constexpr size_t kMaxCollectedBody = 32u << 20;
constexpr size_t kMaxHeaders = 200;

// libcurl's global state lives as long as the process; the first client starts it.
void start_curl() {
  static const CURLcode code = curl_global_init(CURL_GLOBAL_DEFAULT);
  check(code == CURLE_OK, "libcurl cannot start");
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

struct Transfer {
  CURL* curl = nullptr;
  HttpResponse* response = nullptr;
  const HttpClient::Sink* sink = nullptr;
  const std::atomic<bool>* stop = nullptr;
  std::chrono::seconds stall_timeout{0};
  curl_off_t last_count = 0;
  std::chrono::steady_clock::time_point last_byte = std::chrono::steady_clock::now();
  bool has_stalled = false;
};

size_t on_header(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::string_view line = trim({data, size * count});
  if (line.starts_with("HTTP/")) {  // a new head, after "100 Continue" for one
    transfer.response->headers.clear();
  } else if (const size_t colon = line.find(':'); colon != std::string_view::npos) {
    if (transfer.response->headers.size() < kMaxHeaders)
      transfer.response->headers[lower(line.substr(0, colon))] = std::string(trim(line.substr(colon + 1)));
  }
  return size * count;
}

size_t on_body(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  const size_t bytes = size * count;
  long status = 0;
  curl_easy_getinfo(transfer.curl, CURLINFO_RESPONSE_CODE, &status);
  transfer.response->status = static_cast<int>(status);
  if (*transfer.sink && (status == 200 || status == 206))
    return (*transfer.sink)(*transfer.response, data, bytes) ? bytes : CURL_WRITEFUNC_ERROR;
  if (transfer.response->body.size() + bytes > kMaxCollectedBody) return CURL_WRITEFUNC_ERROR;
  transfer.response->body.append(data, bytes);
  return bytes;
}

// Called often while bytes flow, about once a second otherwise. (libcurl's own limit on slow transfers looks at an average
// over several seconds.)
int on_progress(void* user, curl_off_t, curl_off_t received, curl_off_t, curl_off_t) {
  auto& transfer = *static_cast<Transfer*>(user);
  const auto now = std::chrono::steady_clock::now();
  if (received != transfer.last_count) {
    transfer.last_count = received;
    transfer.last_byte = now;
  }
  transfer.has_stalled = now - transfer.last_byte >= transfer.stall_timeout;
  const bool is_stopped = transfer.stop != nullptr && transfer.stop->load(std::memory_order_relaxed);
  return is_stopped || transfer.has_stalled ? 1 : 0;
}

bool is_loopback(std::string_view origin) {
  const size_t host = origin.find("://") + 3;
  const std::string_view rest = origin.substr(host);
  for (const std::string_view name : {"localhost", "127.0.0.1", "[::1]"})
    if (rest == name || rest.starts_with(std::string(name) + ":")) return true;
  return false;
}

}  // namespace

struct HttpClient::Handle {
  struct Free {
    void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
  };
  std::unique_ptr<CURL, Free> curl;
};

HttpClient::HttpClient(HttpOptions options) : options_(std::move(options)), handle_(std::make_unique<Handle>()) {
  start_curl();
  handle_->curl.reset(curl_easy_init());
  check(handle_->curl != nullptr, "libcurl cannot make a handle");
}

HttpClient::~HttpClient() = default;

std::string HttpResponse::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

HttpResponse HttpClient::get_one(const std::string& url, const std::vector<std::string>& headers, bool with_token,
                                 const Sink& sink, std::string& redirect) {
  CURL* curl = handle_->curl.get();
  curl_easy_reset(curl);  // keeps the connection
  HttpResponse response;
  Transfer transfer{.curl = curl, .response = &response, .sink = &sink, .stop = options_.stop};
  transfer.stall_timeout = std::chrono::seconds(options_.stall_timeout_s);
  struct FreeList {
    void operator()(curl_slist* list) const { curl_slist_free_all(list); }
  };
  std::unique_ptr<curl_slist, FreeList> list;
  const auto add = [&](const std::string& line) {
    curl_slist* longer = curl_slist_append(list.get(), line.c_str());
    check(longer != nullptr, "out of memory");
    (void)list.release();
    list.reset(longer);
  };
  for (const std::string& line : headers) add(line);
  if (with_token) add("Authorization: Bearer " + options_.token);

  char message[CURL_ERROR_SIZE] = "";
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 0L);
  curl_easy_setopt(curl, CURLOPT_USERAGENT, "calla");
  curl_easy_setopt(curl, CURLOPT_HTTPHEADER, list.get());
  curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, on_header);
  curl_easy_setopt(curl, CURLOPT_HEADERDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, on_progress);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &transfer);
  curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
  curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, message);
  curl_easy_setopt(curl, CURLOPT_BUFFERSIZE, 256L * 1024);
  curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, static_cast<long>(options_.connect_timeout_s));

  const CURLcode code = curl_easy_perform(curl);
  long status = 0;
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
  response.status = static_cast<int>(status);
  if (transfer.has_stalled)
    response.error = "no byte came for " + std::to_string(options_.stall_timeout_s) + " seconds";
  else if (code != CURLE_OK)
    response.error = message[0] != '\0' ? message : curl_easy_strerror(code);
  char* target = nullptr;
  if (code == CURLE_OK && curl_easy_getinfo(curl, CURLINFO_REDIRECT_URL, &target) == CURLE_OK && target != nullptr)
    redirect = target;
  curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, nullptr);
  return response;
}

HttpResponse HttpClient::get(const std::string& url, const std::vector<std::string>& headers, const Sink& sink) {
  const std::string home = url_origin(url);
  if (home.empty()) throw PullError("\"" + printable_url(url) + "\" is no http or https address; check HF_ENDPOINT");
  const bool has_token = !options_.token.empty();
  if (has_token && !home.starts_with("https://") && !is_loopback(home))
    throw PullError("HF_TOKEN would travel unencrypted to " + home +
                    "; use an https address as HF_ENDPOINT, or unset HF_TOKEN");
  std::string at = url;
  std::map<std::string, std::string> linked;
  for (int hop = 0;; ++hop) {
    const std::string origin = url_origin(at);
    std::string redirect;
    HttpResponse response = get_one(at, headers, has_token && origin == home, sink, redirect);
    for (const auto& [name, value] : response.headers)
      if (name.starts_with("x-linked-")) linked.try_emplace(name, value);
    if (redirect.empty() || response.status < 300 || response.status > 399) {
      response.headers.insert(linked.begin(), linked.end());
      return response;
    }
    if (hop == kMaxRedirects) throw PullError("too many redirects from " + printable_url(url));
    const std::string next = url_origin(redirect);
    if (next.empty()) throw PullError("a redirect to something other than http or https: " + printable_url(redirect));
    if (origin.starts_with("https://") && next.starts_with("http://"))
      throw PullError("a redirect from https to plain http was refused: " + printable_url(redirect));
    at = redirect;
  }
}

std::string url_origin(std::string_view url) {
  const std::string text = lower(url.substr(0, url.find_first_of("?#")));
  size_t begin = 0;
  if (text.starts_with("https://"))
    begin = 8;
  else if (text.starts_with("http://"))
    begin = 7;
  else
    return "";
  const size_t end = std::min(text.find('/', begin), text.size());
  const std::string_view host = std::string_view(text).substr(begin, end - begin);
  if (host.empty() || host.find('@') != std::string_view::npos) return "";
  return text.substr(0, end);
}

std::string printable_url(std::string_view url) { return std::string(url.substr(0, url.find_first_of("?#"))); }

std::string encode_path(std::string_view path) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain =
        (byte < 0x80 && std::isalnum(byte) != 0) || std::string_view("-._~/").find(c) != std::string_view::npos;
    if (is_plain) {
      out.push_back(c);
    } else {
      out.push_back('%');
      out.push_back(kDigits[byte >> 4]);
      out.push_back(kDigits[byte & 15]);
    }
  }
  return out;
}

}  // namespace calla
