#include "server/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

namespace calla {
namespace {

using std::chrono::milliseconds;

// A client that speaks bytes.
class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    timeval limit{10, 0};
    ::setsockopt(socket_.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    EXPECT_EQ(::connect(socket_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  void send(const std::string& text) { ::send(socket_.fd(), text.data(), text.size(), MSG_NOSIGNAL); }
  // Reads until the text holds `mark`, or the connection ends.
  std::string read_until(const std::string& mark) {
    std::string text;
    char buffer[4096];
    while (mark.empty() || text.find(mark) == std::string::npos) {
      const ssize_t n = ::recv(socket_.fd(), buffer, sizeof buffer, 0);
      if (n <= 0) break;
      text.append(buffer, static_cast<size_t>(n));
    }
    return text;
  }
  std::string read_all() { return read_until(""); }
  void close() { socket_ = Socket(); }

 private:
  Socket socket_;
};

class HttpServerTest : public ::testing::Test {
 protected:
  void start(HttpServerOptions options = {}) {
    server_ = std::make_unique<HttpServer>(
        options, [this](HttpExchange& exchange) { handle(exchange); },
        [](HttpExchange& exchange, const HttpError& error) {
          exchange.send(error.status(), "text/plain", error.what());
        });
    thread_ = std::thread([this] { server_->run(milliseconds(300)); });
  }
  void stop() {
    if (!thread_.joinable()) return;
    server_->stop();
    thread_.join();
  }
  ~HttpServerTest() override { stop(); }

  void handle(HttpExchange& exchange) {
    const std::string& path = exchange.request().path;
    if (path == "/echo") exchange.send(200, "text/plain", exchange.request().body);
    if (path == "/throw") throw Error("broken");
    if (path == "/stream") {
      exchange.begin_stream(200, "text/plain");
      exchange.write("one");
      exchange.write("");
      exchange.write("two");
      exchange.end_stream();
    }
    if (path == "/wait") {
      waiting_ = true;
      while (!exchange.client_gone()) std::this_thread::sleep_for(milliseconds(5));
      left_ = true;
    }
  }

  static bool becomes_true(const std::atomic<bool>& flag) {
    for (int i = 0; i < 1000 && !flag; i++) std::this_thread::sleep_for(milliseconds(5));
    return flag;
  }

  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
  std::atomic<bool> waiting_{false}, left_{false};
};

TEST_F(HttpServerTest, AnswersSeveralRequestsOfAConnection) {
  start();
  Client client(server_->port());
  client.send(
      "POST /echo HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcPOST /echo HTTP/1.1\r\nTransfer-Encoding: "
      "chunked\r\n\r\n2\r\nde\r\n1;x\r\nf\r\n0\r\nT: t\r\n\r\n");
  client.send("GET /stream HTTP/1.1\r\nConnection: close\r\n\r\n");
  const std::string text = client.read_all();
  EXPECT_NE(text.find("\r\n\r\nabcHTTP/1.1 200"), std::string::npos) << text;
  EXPECT_NE(text.find("\r\n\r\ndefHTTP/1.1 200"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")) << text;
}

TEST_F(HttpServerTest, StreamsToOldClientsWithoutChunks) {
  start();
  Client client(server_->port());
  client.send("GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  const std::string text = client.read_all();
  EXPECT_TRUE(text.ends_with("\r\nConnection: close\r\n\r\nonetwo")) << text;
}

TEST_F(HttpServerTest, HandlersMayThrow) {
  start();
  Client client(server_->port());
  client.send("GET /throw HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(client.read_all().starts_with("HTTP/1.1 500"));
}

TEST_F(HttpServerTest, SeesThatTheClientHasLeft) {
  start();
  Client client(server_->port());
  client.send("GET /wait HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(becomes_true(waiting_));
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_FALSE(left_);
  client.close();
  EXPECT_TRUE(becomes_true(left_));
}

TEST_F(HttpServerTest, LimitsSizesAndTimes) {
  HttpServerOptions options;
  options.max_body_bytes = 10;
  options.max_head_bytes = 200;
  options.head_timeout = options.body_timeout = options.idle_timeout = milliseconds(100);
  start(options);
  const auto answer = [&](const std::string& text) {
    Client client(server_->port());
    client.send(text);
    return client.read_all().substr(0, 12);
  };
  EXPECT_EQ(answer("POST /echo HTTP/1.1\r\nContent-Length: 11\r\n\r\n"), "HTTP/1.1 413");
  EXPECT_EQ(answer("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n6\r\n"), "HTTP/1.1 413");
  EXPECT_EQ(answer("GET / HTTP/1.1\r\nX: " + std::string(300, 'a')), "HTTP/1.1 431");
  EXPECT_EQ(answer("GET / HTTP/1.1\r\nX: "), "HTTP/1.1 408");
  EXPECT_EQ(answer("POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc"), "HTTP/1.1 408");
  EXPECT_EQ(answer("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n"), "HTTP/1.1 400");
  EXPECT_EQ(answer(""), "");  // idle
}

TEST_F(HttpServerTest, LimitsConnections) {
  HttpServerOptions options;
  options.max_connections = 1;
  start(options);
  Client first(server_->port());
  first.send("POST /echo HTTP/1.1\r\nContent-Length: 1\r\n\r\na");
  first.read_until("\r\n\r\na");
  Client second(server_->port());
  EXPECT_TRUE(second.read_all().starts_with("HTTP/1.1 503"));
}

TEST_F(HttpServerTest, StopEndsWhatWaits) {
  start();
  Client idle(server_->port()), busy(server_->port());
  busy.send("GET /wait HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(becomes_true(waiting_));
  stop();  // after the grace the client counts as gone
  EXPECT_TRUE(left_);
  EXPECT_EQ(idle.read_all(), "");
}

TEST(HttpServerErrors, NameTheAddress) {
  const auto nothing = [](HttpExchange&) {};
  const auto no_error = [](HttpExchange&, const HttpError&) {};
  HttpServer first({}, nothing, no_error);
  HttpServerOptions taken;
  taken.port = first.port();
  try {
    HttpServer second(taken, nothing, no_error);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(first.port())), std::string::npos) << error.what();
  }
  HttpServerOptions nowhere;
  nowhere.host = "no.such.host.invalid";
  EXPECT_THROW(HttpServer(nowhere, nothing, no_error), Error);
}

}  // namespace
}  // namespace calla
