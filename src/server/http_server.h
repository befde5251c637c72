#pragma once
// A small HTTP/1.1 server for a few local clients with long requests: one thread a connection, blocking handlers.
//
// It is our own because a handler here waits minutes for a model, and must see that its client has hung up
// meanwhile; because the time to send a whole head and body is limited, not only the time between two bytes; and
// because the size and number of headers are limited. Libraries for small servers do not offer these.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "server/http_message.h"

namespace calla {

struct HttpServerOptions {
  std::string host = "127.0.0.1";  // an address, or a name of one
  int port = 0;                    // 0: any free one, see HttpServer::port()
  int max_connections = 256;
  size_t max_head_bytes = 32 << 10;
  size_t max_body_bytes = 32 << 20;
  std::chrono::milliseconds head_timeout{10'000};   // for a whole head, from its first byte
  std::chrono::milliseconds body_timeout{60'000};   // for a whole body
  std::chrono::milliseconds idle_timeout{30'000};   // between two requests of a connection
  std::chrono::milliseconds write_timeout{30'000};  // while the client reads nothing
};

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }

 private:
  int fd_;
};

// One request being answered: either send(), or begin_stream(), write() as often as needed and end_stream().
class HttpExchange {
 public:
  HttpExchange(int fd, const HttpRequest& request, std::chrono::milliseconds write_timeout)
      : fd_(fd), request_(request), write_timeout_(write_timeout) {}

  const HttpRequest& request() const { return request_; }

  // Added to the response's head, whoever sends it.
  void add_header(std::string name, std::string value) { extra_.emplace_back(std::move(name), std::move(value)); }

  void send(int status, std::string_view content_type, std::string_view body, HttpHeaders headers = {});

  void begin_stream(int status, std::string_view content_type, HttpHeaders headers = {});
  // False: the client is gone, and nothing more need be written.
  bool write(std::string_view data);
  void end_stream();

  // Whether the client has hung up. Does not block.
  bool client_gone();

  bool started() const { return started_; }
  // Whether the connection may serve another request.
  bool reusable() const { return !broken_ && finished_ && keep_alive(); }

 private:
  bool keep_alive() const { return request_.keep_alive; }
  bool send_all(std::string_view data);

  const int fd_;
  const HttpRequest& request_;
  const std::chrono::milliseconds write_timeout_;
  HttpHeaders extra_;
  bool started_ = false;
  bool finished_ = false;  // and the connection may serve another request
  bool ends_with_connection_ = false;
  bool broken_ = false;
};

class HttpServer {
 public:
  // Answers requests that came whole and well-formed; called on many threads. What it throws becomes a plain 500.
  using Handler = std::function<void(HttpExchange&)>;
  // Answers what is no proper request (too large, too slow, malformed).
  using ErrorHandler = std::function<void(HttpExchange&, const HttpError&)>;

  // Binds and listens, so that clients can connect, but accepts only in run(). Throws Error naming the address.
  HttpServer(HttpServerOptions options, Handler handler, ErrorHandler error_handler);
  ~HttpServer();

  int port() const { return port_; }
  int connections() const;

  // Serves until stop(). Requests being answered then have `grace` to finish. After that `on_overdue` is called, which
  // should make them end, and two seconds later their clients count as gone, which handlers must notice. Returns when all
  // connections are closed.
  void run(std::chrono::milliseconds grace, const std::function<void()>& on_overdue = {});
  // From any thread, also from a signal handler.
  void stop();

 private:
  struct Connection {
    Socket socket;
    std::thread thread;
    bool busy = false;      // a request is being answered
    bool finished = false;  // the thread is done
  };

  void accept_one();
  void refuse(Socket socket);
  void serve(Connection& connection);
  bool serve_request(Connection& connection, std::string& received);
  void set_busy(Connection& connection, bool busy);
  void reap(bool all);

  const HttpServerOptions options_;
  const Handler handler_;
  const ErrorHandler error_handler_;
  Socket listener_;
  Socket wake_read_, wake_write_;  // a pipe; stop() writes to it
  int port_ = 0;

  mutable std::mutex mutex_;  // guards connections_ and stopping_
  std::condition_variable finished_;
  std::list<Connection> connections_;
  bool stopping_ = false;

  // Of refused clients, the oldest first. They are closed a little later: at once, what the client has sent and nobody
  // read would reset the connection before the client sees the answer. Used by run() alone.
  std::deque<std::pair<std::chrono::steady_clock::time_point, Socket>> refused_;
};

}  // namespace calla
