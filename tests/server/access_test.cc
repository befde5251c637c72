#include "server/access.h"

#include <gtest/gtest.h>

#include <string>

namespace calla {
namespace {

HttpRequest with(HttpHeaders headers) {
  HttpRequest request;
  request.headers = std::move(headers);
  return request;
}

template <typename Check>
int status_of(Check check, const HttpRequest& request, const AccessOptions& options) {
  try {
    check(request, options);
    return 200;
  } catch (const HttpError& error) {
    return error.status();
  }
}

int origin_status(HttpHeaders headers, const AccessOptions& options = {}) {
  return status_of(check_origin, with(std::move(headers)), options);
}

TEST(Access, Loopback) {
  for (const char* host : {"localhost", "127.0.0.1", "127.1.2.3", "::1"}) EXPECT_TRUE(is_loopback(host)) << host;
  for (const char* host : {"0.0.0.0", "192.168.1.2", "::", "127.evil.example", "127.", "example.org", ""}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
}

TEST(Access, Secrets) {
  EXPECT_TRUE(equal_secrets("abc", "abc"));
  for (const char* given : {"", "ab", "abd", "abcd", "abcabc", "ABC"})
    EXPECT_FALSE(equal_secrets(given, "abc")) << given;
  EXPECT_FALSE(equal_secrets("a", ""));
}

TEST(Access, HostsAgainstRebinding) {
  for (const char* host : {"localhost", "LocalHost:1", "127.0.0.1:8080", "[::1]:8080", "10.0.0.1", ""}) {
    EXPECT_EQ(origin_status({{"host", host}}), 200) << host;
  }
  EXPECT_EQ(origin_status({}), 200);
  for (const char* host :
       {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80", "[::1].evil.example",
        "[]evil.example", "[]", "[::1", "[evil.example]", "localhost@evil.example"}) {
    EXPECT_EQ(origin_status({{"host", host}}), 403) << host;
  }
  AccessOptions options;
  options.allowed_hosts = {"box.lan"};
  EXPECT_EQ(origin_status({{"host", "Box.lan:99"}}, options), 200);
  EXPECT_EQ(origin_status({{"host", "other.lan"}}, options), 403);
  options.api_key = "k";  // a foreign page does not know it
  EXPECT_EQ(origin_status({{"host", "other.lan"}}, options), 200);
}

TEST(Access, Origins) {
  AccessOptions options;
  const auto status = [&](const char* origin) {
    return origin_status({{"host", "localhost:8080"}, {"origin", origin}}, options);
  };
  EXPECT_EQ(status("http://localhost:8080"), 200);
  for (const char* origin : {"http://localhost:3000", "https://evil.example", "null", ""})
    EXPECT_EQ(status(origin), 403) << origin;
  options.cors_origins = {"http://localhost:3000"};
  EXPECT_EQ(status("http://localhost:3000"), 200);
  EXPECT_EQ(status("http://localhost:3001"), 403);
  EXPECT_TRUE(cors_headers(with({{"origin", "http://localhost:3001"}}), options).empty());
  EXPECT_FALSE(cors_headers(with({{"origin", "http://localhost:3000"}}), options).empty());
  options.cors_origins = {"*"};
  EXPECT_EQ(status("https://any.example"), 200);
}

TEST(Access, Keys) {
  AccessOptions options;
  EXPECT_EQ(status_of(check_key, with({}), options), 200);
  options.api_key = "secret";
  EXPECT_EQ(status_of(check_key, with({}), options), 401);
  EXPECT_EQ(status_of(check_key, with({{"authorization", "Bearer secret"}}), options), 200);
  EXPECT_EQ(status_of(check_key, with({{"authorization", "bearer secret"}}), options), 200);
  EXPECT_EQ(status_of(check_key, with({{"authorization", "Basic secret"}}), options), 401);
  EXPECT_EQ(status_of(check_key, with({{"authorization", "secret"}}), options), 401);
  EXPECT_EQ(status_of(check_key, with({{"x-api-key", "secret"}}), options), 200);
  EXPECT_EQ(status_of(check_key, with({{"x-api-key", "secre"}}), options), 401);
}

}  // namespace
}  // namespace calla
