#include "tests/pull/fake_hub.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "pull/digest.h"

namespace calla {
namespace {

using nlohmann::json;

std::string git_blob_of(const std::string& content) {
  Digest digest(Digest::Kind::kSha1);
  const std::string header = "blob " + std::to_string(content.size());
  digest.update(header.c_str(), header.size() + 1);
  digest.update(content.data(), content.size());
  return digest.finish();
}

bool send_all(int socket, const char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, data, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return true;
}

}  // namespace

std::string sha256_of(const std::string& content) {
  Digest digest(Digest::Kind::kSha256);
  digest.update(content.data(), content.size());
  return digest.finish();
}

std::string TestServer::Request::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

TestServer::TestServer(Handler handler) : handler_(std::move(handler)) {
  listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 32) != 0 ||
      ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    throw std::runtime_error("the test server cannot listen");
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { serve(); });
}

TestServer::~TestServer() {
  stop_ = true;
  ::shutdown(listener_, SHUT_RDWR);
  thread_.join();
  ::close(listener_);
  for (std::thread& connection : connections_) connection.join();
}

void TestServer::serve() {
  while (!stop_) {
    const int connection = ::accept(listener_, nullptr, nullptr);
    if (connection < 0) continue;
    const std::lock_guard lock(mutex_);
    connections_.emplace_back([this, connection] { answer(connection); });
  }
}

void TestServer::answer(int connection) {
  std::string head;
  char buffer[4096];
  while (head.find("\r\n\r\n") == std::string::npos) {
    const ssize_t got = ::recv(connection, buffer, sizeof buffer, 0);
    if (got <= 0) {
      ::close(connection);
      return;
    }
    head.append(buffer, static_cast<size_t>(got));
  }
  Request request;
  const size_t path = head.find(' ') + 1;
  request.path = head.substr(path, head.find(' ', path) - path);
  for (size_t at = head.find("\r\n") + 2; at < head.size();) {
    const size_t end = head.find("\r\n", at);
    const std::string line = head.substr(at, end - at);
    at = end + 2;
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    std::string name = line.substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    request.headers[name] = line.substr(colon + 2);
  }
  const Response response = handler_(request);
  std::string text = "HTTP/1.1 " + std::to_string(response.status) + " Status\r\n";
  for (const std::string& header : response.headers) text += header + "\r\n";
  text += "Content-Length: " + std::to_string(response.body.size()) + "\r\nConnection: close\r\n\r\n";
  const size_t length = std::min(response.cut_after, response.body.size());
  const size_t half = response.stall_ms > 0 ? length / 2 : 0;
  bool sent = send_all(connection, text.data(), text.size()) && send_all(connection, response.body.data(), half);
  for (int waited = 0; sent && waited < response.stall_ms && !stop_; waited += 10)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (sent) send_all(connection, response.body.data() + half, length - half);
  if (length < response.body.size()) {
    const linger hard{1, 0};  // a reset, as when a line goes down
    ::setsockopt(connection, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // let the bytes arrive before it
  }
  ::close(connection);
}

FakeHub::FakeHub()
    : hub_([this](const TestServer::Request& request) { return at_hub(request); }),
      network_([this](const TestServer::Request& request) { return at_network(request); }) {}

size_t FakeHub::count(const std::string& part) {
  const std::lock_guard lock(mutex);
  return static_cast<size_t>(std::count_if(
      log.begin(), log.end(), [&](const std::string& line) { return line.find(part) != std::string::npos; }));
}

TestServer::Response FakeHub::send(const File& file, const std::string& etag, const TestServer::Request& request,
                                   bool is_network) {
  TestServer::Response response;
  response.headers = {"ETag: \"" + etag + "\"", "Accept-Ranges: bytes"};
  size_t offset = 0;
  const std::string range = request.header("range"), condition = request.header("if-range");
  if (range.starts_with("bytes=") && !ignores_ranges && (condition.empty() || condition == "\"" + etag + "\"")) {
    offset = std::stoul(range.substr(6));
    if (offset >= file.content.size()) return {.status = 416, .headers = {}, .body = ""};
    if (sends_wrong_range) offset = 0;
    response.status = 206;
    response.headers.push_back("Content-Range: bytes " + std::to_string(offset) + "-" +
                               std::to_string(file.content.size() - 1) + "/" + std::to_string(file.content.size()));
  }
  response.body = file.content.substr(offset);
  if (is_network && stalls-- > 0) response.stall_ms = stall_ms;
  if (is_network && !cuts.empty()) {
    if (cuts.front() != 0) response.cut_after = cuts.front();
    cuts.erase(cuts.begin());
  }
  bytes_served += std::min(response.cut_after, response.body.size());
  return response;
}

TestServer::Response FakeHub::at_hub(const TestServer::Request& request) {
  const std::lock_guard lock(mutex);
  log.push_back("hub GET " + request.path + " " + request.header("range"));
  if (!token.empty() && request.header("authorization") != "Bearer " + token)
    return {.status = 401, .headers = {}, .body = R"({"error":"Invalid username or password."})"};
  const std::string api = "/api/models/org/model";
  if (request.path == api + "/revision/main")
    return {.headers = {"Content-Type: application/json"}, .body = json{{"id", "org/model"}, {"sha", commit_}}.dump()};
  const std::string tree = api + "/tree/" + commit_;
  if (request.path.starts_with(tree)) {
    const size_t begin =
        request.path.size() > tree.size() ? std::stoul(request.path.substr(request.path.find('=') + 1)) : 0;
    json entries = json::array();
    size_t index = 0;
    for (const auto& [name, file] : files) {
      if (index >= begin && index < begin + static_cast<size_t>(page_size)) {
        json entry{{"type", "file"}, {"path", name}, {"size", file.content.size()}, {"oid", git_blob_of(file.content)}};
        if (file.is_large) {
          const std::string hash = file.wrong_hash.empty() ? sha256_of(file.content) : file.wrong_hash;
          entry["lfs"] = {{"oid", hash}, {"size", file.content.size()}, {"pointerSize", 135}};
        } else if (!file.wrong_hash.empty()) {
          entry["oid"] = file.wrong_hash;
        }
        entries.push_back(entry);
      }
      ++index;
    }
    entries.push_back({{"type", "directory"}, {"path", "folder"}, {"size", 0}, {"oid", commit_}});
    TestServer::Response response{.headers = {"Content-Type: application/json"}, .body = entries.dump()};
    const size_t next = begin + static_cast<size_t>(page_size);
    if (next < files.size())
      response.headers.push_back("Link: <" + hub_.origin() + tree + "?cursor=" + std::to_string(next) +
                                 ">; rel=\"next\"");
    return response;
  }
  const std::string resolve = "/org/model/resolve/" + commit_ + "/";
  if (request.path.starts_with(resolve)) {
    if (!failures.empty()) {
      const int status = failures.front();
      failures.erase(failures.begin());
      TestServer::Response response{.status = status, .headers = {}, .body = "{}"};
      if (!extra_failure_header.empty()) response.headers.push_back(extra_failure_header);
      return response;
    }
    const std::string name = request.path.substr(resolve.size());
    const auto found = files.find(name);
    if (found == files.end()) return {.status = 404, .headers = {}, .body = "Entry not found"};
    if (!found->second.is_large) return send(found->second, git_blob_of(found->second.content), request, false);
    return {.status = 302,
            .headers = {"Location: " + network_.origin() + "/blobs/" + name + "?Signature=secret",
                        "X-Linked-ETag: \"" + sha256_of(found->second.content) + "\"",
                        "X-Linked-Size: " + std::to_string(found->second.content.size())},
            .body = "Found"};
  }
  return {.status = 404, .headers = {}, .body = R"({"error":"Repository not found"})"};
}

TestServer::Response FakeHub::at_network(const TestServer::Request& request) {
  const std::lock_guard lock(mutex);
  log.push_back("network GET " + request.path + " " + request.header("range"));
  token_leaked = token_leaked || !request.header("authorization").empty();
  const std::string name = request.path.substr(7, request.path.find('?') - 7);
  return send(files.at(name), "cdn-" + sha256_of(files.at(name).content).substr(0, 8), request, true);
}

std::map<std::string, FakeHub::File> sharded_repository(size_t shard_bytes) {
  std::map<std::string, FakeHub::File> files;
  const auto noise = [](size_t bytes, uint32_t seed) {
    std::string out(bytes, '\0');
    for (char& c : out) {
      seed = seed * 1664525u + 1013904223u;
      c = static_cast<char>(static_cast<uint8_t>(seed >> 24));
    }
    return out;
  };
  files["config.json"] = {R"({"model_type":"qwen3_5_moe"})"};
  files["tokenizer.json"] = {noise(20'000, 3), true};
  files["tokenizer_config.json"] = {"{}"};
  files["generation_config.json"] = {""};  // empty files exist
  files["chat_template.jinja"] = {"{{ messages }}"};
  files["README.md"] = {"not needed"};
  files["onnx/model.safetensors"] = {"not needed either", true};
  files["consolidated.safetensors"] = {"nor this", true};
  files["model-00001-of-00002.safetensors"] = {noise(shard_bytes, 1), true};
  files["model-00002-of-00002.safetensors"] = {noise(shard_bytes / 2 + 1, 2), true};
  files["model.safetensors.index.json"] = {json{{"weight_map",
                                                 {{"a", "model-00001-of-00002.safetensors"},
                                                  {"b", "model-00002-of-00002.safetensors"},
                                                  {"c", "model-00001-of-00002.safetensors"}}}}
                                               .dump()};
  return files;
}

}  // namespace calla
