// The small routes, asked without a network.
#include "server/api_server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <string>
#include <tuple>
#include <utility>

#include "tests/server/fake_service.h"

namespace calla {
namespace {

class ApiServerTest : public ::testing::Test {
 protected:
  // The status and the JSON that a GET of this path gets.
  std::pair<int, Json> get(const std::string& path) {
    HttpRequest request;
    request.method = "GET";
    request.path = path;
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const Socket ours(ends[0]), theirs(ends[1]);
    HttpExchange exchange(theirs.fd(), request, std::chrono::seconds(5));
    api_.handle(exchange);
    ::shutdown(theirs.fd(), SHUT_WR);
    std::string text;
    char buffer[4096];
    for (ssize_t n = 0; (n = ::recv(ours.fd(), buffer, sizeof buffer, 0)) > 0;)
      text.append(buffer, static_cast<size_t>(n));
    const size_t body = text.find("\r\n\r\n");
    if (!text.starts_with("HTTP/1.1 ") || body == std::string::npos) return {0, text};
    return {std::stoi(text.substr(9)), parse_json(text.substr(body + 4))};
  }

  FakeService service_;
  const ServedModel model_ = fake_model(service_);
  ApiServer api_{model_, {}};
};

TEST_F(ApiServerTest, HealthTellsOfAFailedDeviceUntilItWorksAgain) {
  EXPECT_EQ(get("/health"), std::pair(200, Json({{"status", "ok"}, {"running", 0}, {"queued", 0}})));
  service_.current.device_error = "the card is gone";
  auto [status, health] = get("/health");
  EXPECT_EQ(status, 503);
  EXPECT_EQ(health["status"], "device fault");
  EXPECT_NE(health["message"].get<std::string>().find("the card is gone"), std::string::npos) << health;
  service_.current.device_error = "";
  EXPECT_EQ(get("/health").first, 200);
  service_.current.device_error = "the card is gone";
  api_.begin_shutdown();
  std::tie(status, health) = get("/health");
  EXPECT_EQ(status, 503);
  EXPECT_EQ(health["status"], "shutting down");
}

}  // namespace
}  // namespace calla
