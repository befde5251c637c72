#include "pull/http_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pull/pull_error.h"
#include "tests/pull/fake_hub.h"

namespace calla {
namespace {

TEST(Urls, Origins) {
  EXPECT_EQ(url_origin("https://Hub.co/a/b?c"), "https://hub.co");
  EXPECT_EQ(url_origin("http://hub.co:80"), "http://hub.co:80");
  EXPECT_EQ(url_origin("HTTP://[::1]:5/x"), "http://[::1]:5");
  for (const char* url :
       {"", "hub.co", "ftp://hub.co", "file:///etc/passwd", "https://", "https:///x", "https://hub.co@evil.co/x"})
    EXPECT_EQ(url_origin(url), "") << url;
}

TEST(Urls, PrintsNoQuery) { EXPECT_EQ(printable_url("https://a/b?Signature=x#y"), "https://a/b"); }

TEST(Urls, EncodesPaths) { EXPECT_EQ(encode_path("a b/ü?&.txt"), "a%20b/%C3%BC%3F%26.txt"); }

TEST(HttpClient, FollowsRelativeRedirectsWithTheToken) {
  std::vector<std::string> authorizations;
  TestServer server([&](const TestServer::Request& request) -> TestServer::Response {
    authorizations.push_back(request.header("authorization"));
    if (request.path == "/a") return {.status = 307, .headers = {"Location: /b", "X-Linked-Size: 5"}, .body = ""};
    return {.headers = {"ETag: \"t\""}, .body = "there"};
  });
  HttpClient client({.token = "secret"});
  const HttpResponse response = client.get(server.origin() + "/a");
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.body, "there");
  EXPECT_EQ(response.header("etag"), "\"t\"");
  EXPECT_EQ(response.header("x-linked-size"), "5");
  EXPECT_THAT(authorizations, testing::ElementsAre("Bearer secret", "Bearer secret"));
}

TEST(HttpClient, AnotherPortIsAnotherHost) {
  std::string seen = "nothing";
  TestServer other([&](const TestServer::Request& request) -> TestServer::Response {
    seen = request.header("authorization");
    return {.headers = {}, .body = "ok"};
  });
  TestServer server([&](const TestServer::Request&) -> TestServer::Response {
    return {.status = 302, .headers = {"Location: " + other.origin() + "/x"}, .body = ""};
  });
  HttpClient client({.token = "secret"});
  EXPECT_EQ(client.get(server.origin() + "/").body, "ok");
  EXPECT_EQ(seen, "");
}

TEST(HttpClient, RefusesToSendATokenUnencrypted) {
  HttpClient client({.token = "secret"});
  try {
    client.get("http://hub.example/x");
    FAIL() << "the request was made";
  } catch (const PullError& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::HasSubstr("HF_TOKEN"), testing::Not(testing::HasSubstr("secret"))));
  }
}

TEST(HttpClient, RefusesLoopsAndOtherSchemes) {
  TestServer server([&](const TestServer::Request& request) -> TestServer::Response {
    return {.status = 302,
            .headers = {request.path == "/loop" ? "Location: /loop" : "Location: file:///etc/passwd"},
            .body = ""};
  });
  HttpClient client({});
  EXPECT_THROW(client.get(server.origin() + "/loop"), PullError);
  EXPECT_THROW(client.get(server.origin() + "/file"), PullError);
  EXPECT_THROW(client.get("ftp://127.0.0.1/"), PullError);
}

TEST(HttpClient, ReportsWhatTheNetworkDoes) {
  std::string origin;
  {
    TestServer server([](const TestServer::Request&) -> TestServer::Response {
      return {.headers = {}, .body = std::string(1000, 'x'), .cut_after = 100};
    });
    HttpClient client({});
    origin = server.origin();
    size_t received = 0;
    const HttpResponse response =
        client.get(origin + "/", {}, [&](const HttpResponse& head, const char*, size_t bytes) {
          EXPECT_EQ(head.status, 200);
          received += bytes;
          return true;
        });
    EXPECT_FALSE(response.is_complete());
    EXPECT_EQ(received, 100u);
  }
  HttpClient client({});
  const HttpResponse gone = client.get(origin + "/");
  EXPECT_EQ(gone.status, 0);
  EXPECT_NE(gone.error, "");
}

TEST(HttpClient, StopsWhenTold) {
  TestServer server([](const TestServer::Request&) -> TestServer::Response {
    return {.headers = {}, .body = std::string(1000, 'x'), .stall_ms = 5000};
  });
  std::atomic<bool> stop{false};
  HttpClient client({.stop = &stop});
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop = true;
  });
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(client.get(server.origin() + "/").is_complete());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  later.join();
}

}  // namespace
}  // namespace calla
