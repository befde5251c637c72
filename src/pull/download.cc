#include "pull/download.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>
#include <vector>

#include "pull/digest.h"
#include "pull/pull_error.h"

namespace calla {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void throw_file_error(const std::string& what, const fs::path& path, int error) {
  std::string hint;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    hint = "; make room and run the command again, it goes on where it stopped";
  throw PullError("cannot " + what + " " + path.filename().string() + ": " + std::strerror(error) + hint);
}

// The incomplete file, open for appending, with the hash of what it holds.
class PartFile {
 public:
  PartFile(fs::path path, const RemoteFile& file) : path_(std::move(path)), file_(file), digest_(fresh_digest()) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (descriptor_ < 0) throw_file_error("open", path_, errno);
  }
  ~PartFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  uint64_t size() const { return size_; }

  // Takes over what an earlier run left.
  void read_existing(const std::atomic<bool>& stop) {
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) throw_file_error("look at", path_, errno);
    if (static_cast<uint64_t>(info.st_size) > file_.size) return clear();
    std::vector<char> buffer(1u << 20);
    while (!stop.load(std::memory_order_relaxed)) {
      const ssize_t got = ::read(descriptor_, buffer.data(), buffer.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_file_error("read", path_, errno);
      if (got == 0) return;
      digest_.update(buffer.data(), static_cast<size_t>(got));
      size_ += static_cast<uint64_t>(got);
    }
  }

  void append(const char* data, size_t bytes) {
    digest_.update(data, bytes);
    while (bytes > 0) {
      const ssize_t written = ::pwrite(descriptor_, data, bytes, static_cast<off_t>(size_));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) {
        const int error = errno;
        // The hash is ahead of the file now; this object is not used any more.
        throw_file_error("write", path_, error);
      }
      data += written;
      bytes -= static_cast<size_t>(written);
      size_ += static_cast<uint64_t>(written);
    }
  }

  void clear() {
    if (::ftruncate(descriptor_, 0) != 0) throw_file_error("empty", path_, errno);
    size_ = 0;
    digest_ = fresh_digest();
  }

  // Whether all of it is the file that the hub described. Call once, when size() is right.
  bool is_right() { return digest_.finish() == (file_.sha256.empty() ? file_.git_blob : file_.sha256); }

  void finish(const fs::path& target) {
    if (::fsync(descriptor_) != 0) throw_file_error("write", path_, errno);
    fs::rename(path_, target);
  }

 private:
  // Git hashes a header before the content.
  Digest fresh_digest() const {
    Digest digest(file_.sha256.empty() ? Digest::Kind::kSha1 : Digest::Kind::kSha256);
    if (file_.sha256.empty()) {
      const std::string header = "blob " + std::to_string(file_.size);
      digest.update(header.c_str(), header.size() + 1);
    }
    return digest;
  }

  fs::path path_;
  const RemoteFile& file_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
  Digest digest_;
};

fs::path etag_path(const fs::path& target) { return target.string() + ".etag"; }

std::string read_etag(const fs::path& target) {
  std::ifstream file(etag_path(target), std::ios::binary);
  std::string etag;
  std::getline(file, etag);
  const bool is_sound = etag.size() >= 2 && etag.size() < 200 && etag.front() == '"' && etag.back() == '"' &&
                        std::all_of(etag.begin(), etag.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
  return is_sound ? etag : "";
}

// Only a strong tag promises equal bytes.
void write_etag(const fs::path& target, const std::string& etag) {
  if (!etag.starts_with("\"")) {
    std::error_code ignored;
    fs::remove(etag_path(target), ignored);
    return;
  }
  std::ofstream(etag_path(target), std::ios::binary) << etag;
}

// "bytes 5-99/100" begins at `offset` and is of a file of `size` bytes.
bool is_range(const std::string& content_range, uint64_t offset, uint64_t size) {
  return content_range ==
         "bytes " + std::to_string(offset) + "-" + std::to_string(size - 1) + "/" + std::to_string(size);
}

void wait(int milliseconds, const std::atomic<bool>& stop) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (!stop.load(std::memory_order_relaxed) && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

class FileDownload {
 public:
  FileDownload(HttpClient& client, const std::string& url, const std::string& repo, const RemoteFile& file,
               const fs::path& target, const RetryPolicy& policy, TransferState& state)
      : client_(client),
        url_(url),
        repo_(repo),
        file_(file),
        target_(target),
        policy_(policy),
        state_(state),
        part_(part_path(target), file) {}

  void run() {
    part_.read_existing(state_.stop);
    // A wrong hash once: the bytes were damaged on the way, or what an earlier run left was. Twice: they are wrong.
    for (int round = 0;; ++round) {
      fetch_all();
      if (state_.stop) return;
      if (part_.is_right()) break;
      forget_part();
      if (round == 1)
        throw PullError(file_.name +
                        ": the content does not have the hash that the hub gave, even after a second download; "
                        "the connection or the hub alters it");
    }
    part_.finish(target_);
    std::error_code ignored;
    fs::remove(etag_path(target_), ignored);
  }

 private:
  void forget_part() {
    state_.bytes_done -= part_.size();
    part_.clear();
  }

  void fetch_all() {
    int failures = 0;
    while (part_.size() < file_.size && !state_.stop) {
      const uint64_t before = part_.size();
      std::string problem;
      const int delay = fetch_once(problem);
      if (state_.stop || part_.size() == file_.size) return;
      if (part_.size() > before) failures = 0;
      if (++failures >= policy_.attempts)
        throw PullError(file_.name + ": " + problem + "; gave up after " + std::to_string(failures) +
                        " attempts, run the command again to go on");
      ++state_.retries;
      const int backoff = std::min(policy_.max_delay_ms, policy_.first_delay_ms << std::min(failures - 1, 10));
      wait(std::min(std::max(backoff, delay), policy_.max_delay_ms), state_.stop);
    }
  }

  // One request. Returns the delay that the hub asks for, in ms.
  int fetch_once(std::string& problem) {
    const uint64_t offset = part_.size();
    std::vector<std::string> headers;
    if (offset > 0) {
      headers.push_back("Range: bytes=" + std::to_string(offset) + "-");
      if (const std::string etag = read_etag(target_); !etag.empty()) headers.push_back("If-Range: " + etag);
    }
    bool has_begun = false;
    std::string file_error;
    const auto sink = [&](const HttpResponse& head, const char* data, size_t bytes) {
      if (state_.stop) return false;
      try {
        if (!has_begun) {
          has_begun = true;
          if (head.status == 206 && !is_range(head.header("content-range"), offset, file_.size)) {
            problem = "the server sent another part than the one asked for";
            forget_part();
            return false;
          }
          if (head.status == 200) forget_part();  // it sends the whole file, or the file is not the one begun
          write_etag(target_, head.header("etag"));
        }
        if (part_.size() + bytes > file_.size) {
          problem = "the server sent more than the file's " + std::to_string(file_.size) + " bytes";
          forget_part();
          return false;
        }
        part_.append(data, bytes);
      } catch (const std::exception& error) {  // must not pass through libcurl
        file_error = error.what();
        return false;
      }
      state_.bytes_done += bytes;
      state_.bytes_received += bytes;
      return true;
    };
    const HttpResponse response = client_.get(url_, headers, sink);
    if (!file_error.empty()) throw PullError(file_error);
    if (!problem.empty()) return 0;
    if (response.status == 416) {
      problem = "the server does not have the part asked for (416)";
      forget_part();
      return 0;
    }
    if (response.status == 200 || response.status == 206) {
      problem = response.error.empty() ? "the transfer ended early" : response.error;
      return 0;
    }
    if (!is_passing(response.status)) throw PullError(file_.name + ": " + explain_status(response, repo_));
    problem = explain_status(response, repo_);
    const std::string seconds = response.header("retry-after");
    const bool is_number = !seconds.empty() && seconds.size() < 6 &&
                           std::all_of(seconds.begin(), seconds.end(), [](char c) { return c >= '0' && c <= '9'; });
    return is_number ? std::stoi(seconds) * 1000 : 0;
  }

  HttpClient& client_;
  const std::string& url_;
  const std::string& repo_;
  const RemoteFile& file_;
  const fs::path& target_;
  const RetryPolicy& policy_;
  TransferState& state_;
  PartFile part_;
};

}  // namespace

fs::path part_path(const fs::path& file) { return file.string() + ".part"; }

uint64_t part_size(const fs::path& file) {
  std::error_code error;
  const uintmax_t size = fs::file_size(part_path(file), error);
  return error ? 0 : static_cast<uint64_t>(size);
}

void download_file(HttpClient& client, const std::string& url, const std::string& repo, const RemoteFile& file,
                   const fs::path& target, const RetryPolicy& policy, TransferState& state) {
  FileDownload(client, url, repo, file, target, policy, state).run();
}

}  // namespace calla
