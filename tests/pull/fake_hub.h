#pragma once
// A hub and its content network on the loopback, with the faults of real ones on demand.
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace calla {

// The smallest HTTP server that can misbehave: one answer a connection.
class TestServer {
 public:
  struct Request {
    std::string path;                            // with the query
    std::map<std::string, std::string> headers;  // names in lower case
    std::string header(const std::string& name) const;
  };
  struct Response {
    int status = 200;
    std::vector<std::string> headers{};
    std::string body{};
    size_t cut_after = std::string::npos;  // the connection breaks after so many bytes of the body
    int stall_ms = 0;                      // before the body's second half
  };
  using Handler = std::function<Response(const Request&)>;

  explicit TestServer(Handler handler);
  ~TestServer();

  std::string origin() const { return "http://127.0.0.1:" + std::to_string(port_); }

 private:
  void serve();
  void answer(int connection);

  Handler handler_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  std::mutex mutex_;
  std::vector<std::thread> connections_;
};

// Serves one repository, "org/model". Large files redirect to a second server, as the real hub's do.
class FakeHub {
 public:
  struct File {
    std::string content;
    bool is_large = false;
    std::string wrong_hash{};  // given out instead of the true one
  };

  FakeHub();

  std::string endpoint() const { return hub_.origin(); }
  std::string commit() const { return commit_; }

  // Change these before pulling (or under `mutex` during one).
  std::map<std::string, File> files;
  std::string token;          // if set, the hub demands it
  std::vector<size_t> cuts;   // each large answer in turn breaks after so many bytes; 0: none
  std::vector<int> failures;  // statuses for the next requests of files at the hub
  bool ignores_ranges = false;
  bool sends_wrong_range = false;
  int page_size = 1000;
  int stall_ms = 0;   // in the middle of large answers
  int stalls = 1000;  // so many of them
  std::string extra_failure_header;
  void set_commit(char digit) { commit_ = std::string(40, digit); }

  // What was asked for.
  std::mutex mutex;
  std::vector<std::string> log;  // "hub GET /path [range]"
  bool token_leaked = false;     // the content network saw a token
  size_t bytes_served = 0;
  size_t count(const std::string& part);  // of the log's lines with it

 private:
  TestServer::Response at_hub(const TestServer::Request& request);
  TestServer::Response at_network(const TestServer::Request& request);
  TestServer::Response send(const File& file, const std::string& etag, const TestServer::Request& request,
                            bool is_network);

  std::string commit_ = std::string(40, 'a');
  TestServer hub_;
  TestServer network_;
};

// A small checkpoint: two shards with an index, the text files, and files that Calla does not need.
std::map<std::string, FakeHub::File> sharded_repository(size_t shard_bytes);

std::string sha256_of(const std::string& content);

}  // namespace calla
