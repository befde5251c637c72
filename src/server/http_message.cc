#include "server/http_message.h"

#include <algorithm>
#include <charconv>

namespace calla {
namespace {

constexpr size_t kMaxHeaders = 100;
constexpr size_t kMaxTarget = 8192;

bool is_token_char(char c) {
  if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return true;
  return std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool is_token(std::string_view text) { return !text.empty() && std::all_of(text.begin(), text.end(), is_token_char); }

std::string_view trim(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::string_view take_line(std::string_view& text) {
  const size_t end = text.find("\r\n");
  if (end == std::string_view::npos) throw HttpError(400, "a line of the request's head does not end in CR LF");
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end + 2);
  return line;
}

void parse_request_line(std::string_view line, HttpRequest& request) {
  const size_t first = line.find(' ');
  const size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) throw HttpError(400, "the request line is malformed");
  request.method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!is_token(request.method)) throw HttpError(400, "the request's method is malformed");
  if (version != "HTTP/1.1" && version != "HTTP/1.0") {
    throw HttpError(version.starts_with("HTTP/") ? 505 : 400, "only HTTP/1.1 is spoken here");
  }
  if (target.size() > kMaxTarget) throw HttpError(414, "the request's URL is too long");
  if (target.empty() || target[0] != '/' ||
      std::any_of(target.begin(), target.end(), [](char c) { return c <= ' ' || c == 0x7f; })) {
    throw HttpError(400, "the request's URL is malformed");
  }
  request.keep_alive = request.knows_chunks = version == "HTTP/1.1";
  const size_t question = target.find('?');
  request.path = target.substr(0, question);
  if (question != std::string_view::npos) request.query = target.substr(question + 1);
}

void parse_content_length(std::string_view value, const HttpRequest& request, HttpRequest& out) {
  uint64_t length = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), length);
  if (error != std::errc() || end != value.data() + value.size() || value.empty()) {
    throw HttpError(400, "Content-Length is not a number");
  }
  const auto before = request.header("content-length");
  if (before && *before != value) throw HttpError(400, "Content-Length is given twice");
  out.content_length = length;
}

}  // namespace

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

std::optional<std::string_view> HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return std::nullopt;
}

HttpRequest parse_http_head(std::string_view head) {
  HttpRequest request;
  parse_request_line(take_line(head), request);
  while (true) {
    const std::string_view line = take_line(head);
    if (line.empty()) break;
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) {
      throw HttpError(400, "a header of the request is malformed");
    }
    if (request.headers.size() >= kMaxHeaders) throw HttpError(431, "the request has too many headers");
    std::string name = lower(line.substr(0, colon));
    const std::string_view value = trim(line.substr(colon + 1));
    if (std::any_of(value.begin(), value.end(), [](char c) { return (c >= 0 && c < ' ' && c != '\t') || c == 0x7f; })) {
      throw HttpError(400, "a header of the request holds a control character");
    }
    if (name == "content-length") parse_content_length(value, request, request);
    if (name == "transfer-encoding") {
      if (request.chunked || lower(value) != "chunked") throw HttpError(501, "of transfer encodings, chunked is known");
      request.chunked = true;
    }
    if (name == "connection") {
      const std::string options = lower(value);
      if (options.find("close") != std::string::npos) request.keep_alive = false;
      if (options.find("keep-alive") != std::string::npos) request.keep_alive = true;
    }
    if (name == "expect") {
      if (lower(value) != "100-continue") throw HttpError(417, "of expectations, 100-continue is known");
      request.expects_continue = true;
    }
    // Both decide who may use the server; readers of different copies must not disagree.
    if (name == "host" && request.header("host")) throw HttpError(400, "Host is given twice");
    if (name == "origin" && request.header("origin")) throw HttpError(400, "Origin is given twice");
    request.headers.emplace_back(std::move(name), value);
  }
  if (request.chunked && request.header("content-length")) {
    throw HttpError(400, "Content-Length and Transfer-Encoding exclude each other");
  }
  return request;
}

uint64_t parse_chunk_size(std::string_view line) {
  const std::string_view digits = trim(line.substr(0, line.find(';')));
  uint64_t size = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size, 16);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) {
    throw HttpError(400, "a chunk's size is malformed");
  }
  return size;
}

std::string_view status_text(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 417:
      return "Expectation Failed";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return status < 500 ? "Error" : "Internal Server Error";
  }
}

std::string response_head(int status, const HttpHeaders& headers, BodyLength length, bool keep_alive) {
  std::string head = "HTTP/1.1 " + std::to_string(status) + " ";
  head += status_text(status);
  head += "\r\n";
  for (const auto& [name, value] : headers) {
    head += name;
    head += ": ";
    head += value;
    head += "\r\n";
  }
  if (length.kind == BodyLength::Kind::kBytes) head += "Content-Length: " + std::to_string(length.bytes) + "\r\n";
  if (length.kind == BodyLength::Kind::kChunks) head += "Transfer-Encoding: chunked\r\n";
  head += keep_alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
  return head;
}

}  // namespace calla
