#include "server/http_message.h"

#include <gtest/gtest.h>

#include <string>

namespace calla {
namespace {

int status_of(const std::string& head) {
  try {
    parse_http_head(head);
    return 200;
  } catch (const HttpError& error) {
    return error.status();
  }
}

TEST(HttpHead, ReadsARequest) {
  const HttpRequest request = parse_http_head(
      "POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: localhost:8080\r\nContent-LENGTH: 12\r\nX-Empty:\r\nExpect: "
      "100-continue\r\n\r\n");
  EXPECT_EQ(request.method, "POST");
  EXPECT_EQ(request.path, "/v1/chat/completions");
  EXPECT_EQ(request.query, "x=1");
  EXPECT_EQ(request.header("host"), "localhost:8080");
  EXPECT_EQ(request.header("x-empty"), "");
  EXPECT_FALSE(request.header("x-absent"));
  EXPECT_EQ(request.content_length, 12u);
  EXPECT_TRUE(request.keep_alive && request.expects_continue && !request.chunked);
}

TEST(HttpHead, KeepsOrClosesTheConnection) {
  const auto keeps = [](const std::string& version, const std::string& header) {
    return parse_http_head("GET / " + version + "\r\n" + header + "\r\n").keep_alive;
  };
  EXPECT_TRUE(keeps("HTTP/1.1", ""));
  EXPECT_FALSE(keeps("HTTP/1.0", ""));
  EXPECT_FALSE(keeps("HTTP/1.1", "Connection: Close\r\n"));
  EXPECT_TRUE(keeps("HTTP/1.0", "Connection: Keep-Alive\r\n"));
}

TEST(HttpHead, RefusesWhatOthersMightReadDifferently) {
  const std::string line = "GET / HTTP/1.1\r\n";
  EXPECT_EQ(status_of(line + "\r\n"), 200);
  for (const char* headers :
       {"A : b\r\n", ": b\r\n", "A\r\n", " folded\r\n", "A: b\nC: d\r\n", "A: \x01\r\n", "Content-Length: 1, 1\r\n",
        "Content-Length: +1\r\n", "Content-Length: 0x1\r\n", "Content-Length: \r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n", "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Host: a\r\nHost: b\r\n", "Origin: http://a\r\nOrigin: http://b\r\n"}) {
    EXPECT_EQ(status_of(line + headers + "\r\n"), 400) << headers;
  }
  EXPECT_EQ(status_of(line + "Content-Length: 1\r\nContent-Length: 1\r\n\r\n"), 200);
  EXPECT_EQ(status_of(line + "Transfer-Encoding: gzip, chunked\r\n\r\n"), 501);
  EXPECT_EQ(status_of(line + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n"), 501);
  EXPECT_EQ(status_of(line + "Expect: magic\r\n\r\n"), 417);
  for (const char* first : {"GET /", "GET  HTTP/1.1", "/ HTTP/1.1", "GET / x HTTP/1.1", "G@T / HTTP/1.1",
                            "GET / FTP/1.1", "GET x HTTP/1.1", "GET /\tx HTTP/1.1", ""}) {
    EXPECT_EQ(status_of(std::string(first) + "\r\n\r\n"), 400) << first;
  }
  EXPECT_EQ(status_of("GET / HTTP/3\r\n\r\n"), 505);
  EXPECT_EQ(status_of("GET /" + std::string(9000, 'a') + " HTTP/1.1\r\n\r\n"), 414);
  std::string many = line;
  for (int i = 0; i < 101; i++) many += "A: b\r\n";
  EXPECT_EQ(status_of(many + "\r\n"), 431);
}

TEST(HttpChunks, Sizes) {
  EXPECT_EQ(parse_chunk_size("0"), 0u);
  EXPECT_EQ(parse_chunk_size("1aF"), 0x1afu);
  EXPECT_EQ(parse_chunk_size("10 ; name=value"), 16u);
  for (const char* line : {"", ";", "x", "-1", "+1", "0x1", "1 2", "11111111111111111"}) {
    EXPECT_THROW(parse_chunk_size(line), HttpError) << line;
  }
}

TEST(HttpResponse, Head) {
  using Kind = BodyLength::Kind;
  EXPECT_EQ(response_head(200, {{"A", "b"}}, {Kind::kBytes, 5}, true),
            "HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_EQ(response_head(503, {}, {Kind::kChunks, 0}, false),
            "HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(response_head(200, {}, {Kind::kConnection, 0}, false), "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n");
}

}  // namespace
}  // namespace calla
