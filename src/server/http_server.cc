#include "server/http_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace calla {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

#ifdef MSG_NOSIGNAL
constexpr int kSendFlags = MSG_NOSIGNAL;
#else
constexpr int kSendFlags = 0;  // macOS: SO_NOSIGPIPE, set on the socket
#endif

std::string system_error() { return std::strerror(errno); }

void set_option(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

void prepare_socket(int fd) {
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
#ifdef SO_NOSIGPIPE
  set_option(fd, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
}

// Waits until `fd` can be read (POLLIN) or written (POLLOUT). False: the time is over.
bool wait_for(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

// Appends what has come. False: the client has closed, or the time is over.
bool receive(int fd, std::string& into, Clock::time_point deadline) {
  char buffer[16384];
  while (true) {
    const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
    if (n > 0) {
      into.append(buffer, static_cast<size_t>(n));
      return true;
    }
    if (n == 0) return false;
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
    if (!wait_for(fd, POLLIN, deadline)) return false;
  }
}

class BodyReader {
 public:
  BodyReader(int fd, std::string& received, size_t max_bytes, Clock::time_point deadline)
      : fd_(fd), received_(received), max_bytes_(max_bytes), deadline_(deadline) {}

  std::string read(const HttpRequest& request) {
    std::string body;
    if (!request.chunked) {
      check_size(request.content_length);
      take(static_cast<size_t>(request.content_length), body);
      return body;
    }
    while (true) {
      const uint64_t size = parse_chunk_size(line());
      if (size == 0) break;
      check_size(size);
      check_size(body.size() + size);
      take(static_cast<size_t>(size), body);
      if (!line().empty()) throw HttpError(400, "a chunk is longer than it says");
    }
    while (!line().empty()) {  // trailers
    }
    return body;
  }

 private:
  void check_size(uint64_t size) const {
    if (size <= max_bytes_) return;
    throw HttpError(413, "the request's body is larger than " + std::to_string(max_bytes_) + " bytes");
  }

  void more() {
    if (!receive(fd_, received_, deadline_)) throw HttpError(408, "the request's body did not come in time");
  }

  void take(size_t size, std::string& into) {
    while (received_.size() < size) more();
    into.append(received_, 0, size);
    received_.erase(0, size);
  }

  std::string line() {
    constexpr size_t kMaxLine = 4096;
    size_t end = 0;
    while ((end = received_.find("\r\n")) == std::string::npos) {
      if (received_.size() > kMaxLine) throw HttpError(400, "a line of the chunked body is too long");
      more();
    }
    std::string text = received_.substr(0, end);
    received_.erase(0, end + 2);
    return text;
  }

  const int fd_;
  std::string& received_;
  const size_t max_bytes_;
  const Clock::time_point deadline_;
};

// After a refusal: what the client is still sending is read and dropped for a moment. Closing at once would reset the
// connection, and the client would not see the answer.
void drain(int fd) {
  ::shutdown(fd, SHUT_WR);
  const auto deadline = Clock::now() + milliseconds(1000);
  std::string dropped;
  while (Clock::now() < deadline && receive(fd, dropped, deadline)) dropped.clear();
}

Socket listen_on(const HttpServerOptions& options) {
  const std::string place = options.host + " port " + std::to_string(options.port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(options.host.c_str(), std::to_string(options.port).c_str(), &hints, &found)) {
    throw Error("cannot listen on " + place + ": " + ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  std::string why;
  for (const addrinfo* address = found; address; address = address->ai_next) {
    Socket socket(::socket(address->ai_family, address->ai_socktype, address->ai_protocol));
    if (socket.fd() >= 0) {
      prepare_socket(socket.fd());
      set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (::bind(socket.fd(), address->ai_addr, address->ai_addrlen) == 0 && ::listen(socket.fd(), 128) == 0) {
        return socket;
      }
    }
    why = system_error();
  }
  throw Error("cannot listen on " + place + ": " + why + "; is another server running? choose another with --port");
}

int bound_port(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

// --- HttpExchange ----------------------------------------------------------------------------------------------------

bool HttpExchange::send_all(std::string_view data) {
  auto deadline = Clock::now() + write_timeout_;
  while (!broken_ && !data.empty()) {
    const ssize_t n = ::send(fd_, data.data(), data.size(), kSendFlags);
    if (n > 0) {
      data.remove_prefix(static_cast<size_t>(n));
      deadline = Clock::now() + write_timeout_;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
      broken_ = !wait_for(fd_, POLLOUT, deadline);
    } else {
      broken_ = true;
    }
  }
  return !broken_;
}

void HttpExchange::send(int status, std::string_view content_type, std::string_view body, HttpHeaders headers) {
  started_ = finished_ = true;
  if (!content_type.empty()) headers.emplace_back("Content-Type", content_type);
  headers.insert(headers.end(), extra_.begin(), extra_.end());
  std::string message = response_head(status, headers, {BodyLength::Kind::kBytes, body.size()}, keep_alive());
  if (request_.method != "HEAD") message += body;
  send_all(message);
}

void HttpExchange::begin_stream(int status, std::string_view content_type, HttpHeaders headers) {
  started_ = true;
  headers.emplace_back("Content-Type", content_type);
  headers.emplace_back("Cache-Control", "no-cache");
  headers.insert(headers.end(), extra_.begin(), extra_.end());
  // A client of HTTP/1.0 (some proxies) knows no chunks: its stream ends with the connection.
  ends_with_connection_ = !request_.knows_chunks;
  const auto kind = ends_with_connection_ ? BodyLength::Kind::kConnection : BodyLength::Kind::kChunks;
  send_all(response_head(status, headers, {kind, 0}, keep_alive() && !ends_with_connection_));
}

bool HttpExchange::write(std::string_view data) {
  if (data.empty()) return !broken_;
  if (ends_with_connection_) return send_all(data);
  char size[24];
  const int n = std::snprintf(size, sizeof size, "%zx\r\n", data.size());
  std::string chunk(size, static_cast<size_t>(n));
  chunk += data;
  chunk += "\r\n";
  return send_all(chunk);
}

void HttpExchange::end_stream() { finished_ = !ends_with_connection_ && send_all("0\r\n\r\n"); }

bool HttpExchange::client_gone() {
  if (broken_) return true;
  char byte;
  const ssize_t n = ::recv(fd_, &byte, 1, MSG_PEEK);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) broken_ = true;
  return broken_;
}

// --- HttpServer ------------------------------------------------------------------------------------------------------

HttpServer::HttpServer(HttpServerOptions options, Handler handler, ErrorHandler error_handler)
    : options_(std::move(options)),
      handler_(std::move(handler)),
      error_handler_(std::move(error_handler)),
      listener_(listen_on(options_)),
      port_(bound_port(listener_.fd())) {
  int ends[2];
  if (::pipe(ends) != 0) throw Error("cannot make a pipe: " + system_error());
  wake_read_ = Socket(ends[0]);
  wake_write_ = Socket(ends[1]);
  for (const int end : ends) {
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
    ::fcntl(end, F_SETFL, O_NONBLOCK);
  }
}

HttpServer::~HttpServer() { reap(true); }

int HttpServer::connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(connections_.size());
}

void HttpServer::stop() {
  const char byte = 0;
  [[maybe_unused]] const ssize_t n = ::write(wake_write_.fd(), &byte, 1);
}

void HttpServer::run(milliseconds grace, const std::function<void()>& on_overdue) {
  while (true) {
    pollfd entries[2] = {{listener_.fd(), POLLIN, 0}, {wake_read_.fd(), POLLIN, 0}};
    const int n = ::poll(entries, 2, 1000);
    reap(false);
    while (!refused_.empty() && Clock::now() - refused_.front().first > milliseconds(500)) refused_.pop_front();
    if (n > 0 && entries[1].revents != 0) break;
    if (n > 0 && entries[0].revents != 0) accept_one();
  }
  listener_ = Socket();
  refused_.clear();
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    for (const Connection& connection : connections_) {
      if (!connection.busy) ::shutdown(connection.socket.fd(), SHUT_RDWR);
    }
    const auto all_finished = [&] {
      return std::all_of(connections_.begin(), connections_.end(), [](const auto& item) { return item.finished; });
    };
    if (!finished_.wait_for(lock, grace, all_finished) && on_overdue) {
      lock.unlock();
      on_overdue();
      lock.lock();
      finished_.wait_for(lock, milliseconds(2000), all_finished);
    }
    for (const Connection& connection : connections_) ::shutdown(connection.socket.fd(), SHUT_RDWR);
  }
  reap(true);
}

void HttpServer::accept_one() {
  Socket socket(::accept(listener_.fd(), nullptr, nullptr));
  if (socket.fd() < 0) {
    // Out of descriptors: let some connections end first.
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(milliseconds(50));
    return;
  }
  prepare_socket(socket.fd());
  if (connections() >= options_.max_connections) {  // only this thread adds some
    refuse(std::move(socket));
    return;
  }
  const std::lock_guard lock(mutex_);
  Connection& connection = connections_.emplace_back();
  connection.socket = std::move(socket);
  connection.thread = std::thread([this, &connection] { serve(connection); });
}

void HttpServer::refuse(Socket socket) {
  HttpRequest nobody;
  nobody.keep_alive = false;
  HttpExchange exchange(socket.fd(), nobody, milliseconds(100));
  exchange.add_header("Retry-After", "1");
  error_handler_(exchange, HttpError(503, "too many connections"));
  ::shutdown(socket.fd(), SHUT_WR);
  constexpr size_t kMaxRefused = 64;
  if (refused_.size() >= kMaxRefused) refused_.pop_front();
  refused_.emplace_back(Clock::now(), std::move(socket));
}

void HttpServer::serve(Connection& connection) {
  std::string received;  // not yet used bytes; those of the next request may be among them
  while (serve_request(connection, received)) {
  }
  ::shutdown(connection.socket.fd(), SHUT_RDWR);
  const std::lock_guard lock(mutex_);
  connection.finished = true;
  finished_.notify_all();
}

// False: the connection is to be closed.
bool HttpServer::serve_request(Connection& connection, std::string& received) {
  const int fd = connection.socket.fd();
  if (received.empty() && !receive(fd, received, Clock::now() + options_.idle_timeout)) return false;
  set_busy(connection, true);
  HttpRequest request;
  HttpExchange exchange(fd, request, options_.write_timeout);
  try {
    const auto head_deadline = Clock::now() + options_.head_timeout;
    size_t end = 0;
    while ((end = received.find("\r\n\r\n")) == std::string::npos) {
      if (received.size() > options_.max_head_bytes) throw HttpError(431, "the request's head is too large");
      if (!receive(fd, received, head_deadline)) throw HttpError(408, "the request's head did not come in time");
    }
    if (end > options_.max_head_bytes) throw HttpError(431, "the request's head is too large");
    request = parse_http_head(std::string_view(received).substr(0, end + 4));
    received.erase(0, end + 4);
    if (request.expects_continue && (request.chunked || request.content_length <= options_.max_body_bytes)) {
      constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      ::send(fd, kContinue.data(), kContinue.size(), kSendFlags);
    }
    BodyReader body(fd, received, options_.max_body_bytes, Clock::now() + options_.body_timeout);
    request.body = body.read(request);
  } catch (const HttpError& error) {
    request.keep_alive = false;
    error_handler_(exchange, error);
    drain(fd);
    return false;
  }
  try {
    handler_(exchange);
  } catch (const std::exception& error) {
    if (!exchange.started()) {
      request.keep_alive = false;
      error_handler_(exchange, HttpError(500, error.what()));
    }
  }
  set_busy(connection, false);
  return exchange.reusable();
}

void HttpServer::set_busy(Connection& connection, bool busy) {
  const std::lock_guard lock(mutex_);
  connection.busy = busy;
  if (!busy && stopping_) ::shutdown(connection.socket.fd(), SHUT_RDWR);
}

// Joins the threads that are done, or all.
void HttpServer::reap(bool all) {
  std::list<Connection> finished;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = connections_.begin(); it != connections_.end();) {
      const auto next = std::next(it);
      if (all || it->finished) finished.splice(finished.end(), connections_, it);
      it = next;
    }
  }
  for (Connection& connection : finished) connection.thread.join();
}

}  // namespace calla
